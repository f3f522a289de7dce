"""dslaunch status: what became of a run, from its directory."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from dslaunch.cli import options

if TYPE_CHECKING:
    from dslaunch.observe.run_status import Progress, RunStatus


@click.command("status", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_dir", metavar="RUN_DIR")
@options.json_option
def command(run_dir: str, as_json: bool) -> None:
    """Say how the run in RUN_DIR stands, alive or dead: state, ranks, step, loss, checkpoints, trouble."""
    from pathlib import Path

    from dslaunch.observe.run_status import load_status

    status = load_status(Path(run_dir))
    if as_json:
        click.echo(json.dumps(status.to_json(), indent=2))
    else:
        click.echo("\n".join(status_lines(status, datetime.now(timezone.utc))))


def status_lines(status: RunStatus, now: datetime) -> list[str]:
    """The status for a reader; ``now`` is in UTC."""
    rows = [("run", f"{status.name}  ({status.run_dir})"), ("state", _state(status, now))]
    if status.progress is not None:
        rows.append(("step", _progress(status.progress, now, running=status.state in ("running", "unknown"))))
    if status.checkpoints:
        count = len(status.checkpoints)
        steps = ", ".join(f"step-{step}" for step in status.checkpoints[-4:])
        rows.append(("saved", steps if count <= 4 else f"{count} checkpoints, the last {steps}"))
    rows += [("damaged", f"step-{step}: {why}") for step, why in status.damaged.items()]
    rows += [("trouble", text) for text in status.trouble]
    if status.failed_rank is not None:
        host = status.logs_elsewhere.get(status.failed_rank)
        there = "" if host is None else f"{host}:"
        rows.append(("log", f"{there}{status.run_dir}/logs/rank-{status.failed_rank}.log"))
    if (advice := _advice(status)) is not None:
        rows.append(("next", advice))
    return [f"{name:<9}{text}" for name, text in rows]


def _state(status: RunStatus, now: datetime) -> str:
    ranks = f"{status.ranks_up} of {status.world_size} ranks up on {_hosts(status)}"
    again = f", restart {status.restarts}" if status.restarts else ""
    ago = f" {_since(status.restarted, now)} ago" if status.restarts else ""
    up = "waits to be started again" if status.ended else f"{status.hosts_up} of {len(status.hosts)} hosts up"
    words = {
        "not started": "not started",
        "starting": f"starting, {up}{again}",
        "running": f"running for {_since(status.started, now)}: {ranks}{again}{ago}",
        "done": f"done after {_between(status)}",
        "stopped": f"stopped at a checkpoint after {_between(status)} (exit code 75)",
        "cancelled": f"cancelled after {_between(status)} (exit code {status.exit_code})",
        "failed": f"failed after {_between(status)} (exit code {status.exit_code}){again}",
        "unknown": "started by another launcher, which does not say whether it still runs",
        "gone": "gone: the launcher ended without a word, most often by a KILL or with its machine",
    }
    text = words[status.state]
    return f"{text}; launched by {status.holder}" if status.holder else text


def _hosts(status: RunStatus) -> str:
    return f"{len(status.hosts)} hosts" if len(status.hosts) > 1 else "".join(status.hosts)


def _progress(progress: Progress, now: datetime, *, running: bool) -> str:
    total = progress.total_steps
    parts = [f"{progress.step} of {total} ({progress.step / total:.0%})" if total else str(progress.step)]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.eval_loss is not None:
        parts.append(f"held-out {progress.eval_loss:.4g}")
    if progress.lr is not None:
        parts.append(f"lr {progress.lr:.3g}")
    if progress.loss_scale not in (None, 1.0):
        parts.append(f"loss scale {progress.loss_scale:g}")
    if progress.skipped_steps:
        parts.append(f"{progress.skipped_steps} steps skipped")
    if progress.tokens_per_s is not None:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if running:
        parts.append(f"last {_since(progress.time, now)} ago")
        if progress.seconds_left:
            parts.append(f"about {_duration(progress.seconds_left)} to go")
    return ", ".join(parts)


def _advice(status: RunStatus) -> str | None:
    from dslaunch.core.command import quote
    from dslaunch.core.errors import EXIT_USAGE

    has_whole_one = any(step not in status.damaged for step in status.checkpoints)
    if status.state == "done" and has_whole_one:
        return f"dslaunch export {quote(status.run_dir)} -o DIR"
    # What a rank found wrong in the run itself (a checkpoint, too) would end the next start alike.
    can_go_on = has_whole_one and status.exit_code != EXIT_USAGE
    if status.state in ("stopped", "gone", "failed", "cancelled") and can_go_on:
        return f"{quote(status.run_dir + '/launch.sh')} --resume"
    return None


def _between(status: RunStatus) -> str:
    if status.started is None or status.ended is None:
        return "?"
    return _duration((_time(status.ended) - _time(status.started)).total_seconds())


def _since(then: str | None, now: datetime) -> str:
    return "?" if then is None else _duration((now - _time(then)).total_seconds())


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours == 0:
        return f"{minutes} min {whole % 60} s" if minutes < 10 else f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days == 0 else f"{days} d {hours % 24} h"
