"""dslaunch logs: what the ranks of a run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dslaunch.cli.talk import note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dslaunch.observe.run_status import RunStatus


@click.command("logs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_dir", metavar="RUN_DIR")
@click.option(
    "--rank",
    "ranks",
    metavar="RANKS",
    help="0,3 or 4-7 or all (default: the failed one, else 0).",
)
@click.option("-n", "--lines", type=click.IntRange(min=0), default=40, metavar="N", help="Last lines (40).")
@click.option("-f", "--follow", is_flag=True, help="Go on showing what is added, until the run ends.")
def command(run_dir: str, ranks: str | None, lines: int, follow: bool) -> None:
    """Show the last lines that ranks of the run in RUN_DIR wrote. Ranks that say the same are shown once."""
    from dslaunch.core.topology import span
    from dslaunch.observe import rank_logs
    from dslaunch.observe.run_status import is_over, load_status

    path = Path(run_dir)
    status = load_status(path)
    default = 0 if status.failed_rank is None else status.failed_rank
    wanted = [default] if ranks is None else None if ranks == "all" else parse_ranks(ranks)
    if elsewhere := [rank for rank in sorted(status.logs_elsewhere) if wanted is None or rank in wanted]:
        wanted = _without_those_elsewhere(status, elsewhere, wanted)
    shown = rank_logs.find_ranks(path, wanted)
    tails = rank_logs.read_tails(path, shown, lines, finished=follow)
    for members, tail in rank_logs.group_tails(tails):
        prefix = "" if len(shown) == 1 else f"rank {span(members)}| "
        for line in tail:
            click.echo(prefix + line)
    if lines and not follow and not any(tail.lines for tail in tails.values()):
        note(f"rank{'s' if len(tails) > 1 else ''} {span(sorted(tails))} wrote nothing")
    if follow:
        places = {rank: tail.end for rank, tail in tails.items()}
        for rank, line in rank_logs.follow(path, places, lambda: is_over(path)):
            click.echo(line if len(shown) == 1 else f"rank {rank}| {line}")


def _without_those_elsewhere(
    status: RunStatus, elsewhere: Sequence[int], wanted: Sequence[int] | None
) -> Sequence[int]:
    """The other ranks, after a note of where these have their logs. Raises ConfigError where none is left."""
    from dslaunch.cli.talk import note
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.topology import span

    hosts = dict.fromkeys(status.logs_elsewhere[rank] for rank in elsewhere)
    path = f"{status.run_dir}/logs/rank-{elsewhere[0] if len(elsewhere) == 1 else 'N'}.log"
    have = "have their logs" if len(elsewhere) > 1 else "has its log"
    where = f"{', '.join(hosts)}, which {'do' if len(hosts) > 1 else 'does'} not see this run directory"
    text = f"rank{'s' * (len(elsewhere) > 1)} {span(elsewhere)} {have} on {where}: {path}"
    all_ranks = range(status.world_size) if wanted is None else wanted
    left = [rank for rank in all_ranks if rank not in status.logs_elsewhere]
    if not left:
        raise ConfigError(text, hint=f"look there: ssh {next(iter(hosts))} tail {path}")
    note(text)
    return left


def parse_ranks(text: str) -> Sequence[int]:
    """``0,3`` or ``4-7`` -> numbers. Raises ConfigError where it is neither."""
    from dslaunch.core.errors import ConfigError

    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(
                f"--rank {text!r}: {part.strip()!r} is no rank", hint="write 0,3 or 4-7, or all"
            )
        found += range(int(first), int(last or first) + 1)
    return found
