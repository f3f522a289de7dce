"""dslaunch compare: a run file as it is and once more with other settings, and both side by side."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dslaunch.cli import options
from dslaunch.cli.talk import note, say, talk
from dslaunch.core.errors import EXIT_CANCELLED_TERM, EXIT_OK, EXIT_STOPPED_AT_CHECKPOINT, DslaunchError

if TYPE_CHECKING:
    from dslaunch.cli.launch_request import LaunchRequest
    from dslaunch.config.load import LoadedSpec
    from dslaunch.config.spec import RunSpec
    from dslaunch.core.errors import ConfigError
    from dslaunch.launch.record import RecordedPlan

BASE, CHANGED = "base", "changed"  # their directories too
_REPORT = "comparison.json"


@dataclass(frozen=True)
class _Run:
    """One of the two, planned."""

    name: str
    plan: RecordedPlan
    request: LaunchRequest


@dataclass(frozen=True)
class _Pair:
    """Both, and the directory above theirs. ``is_named``: the user chose it."""

    root: Path
    is_named: bool
    runs: tuple[_Run, _Run]

    def at(self, root: Path) -> _Pair:
        """The same in another directory."""
        from dslaunch.launch.record import move_plan

        runs = []
        for run in self.runs:
            where = root / run.name
            request = dataclasses.replace(run.request, run_dir=str(where) if self.is_named else None)
            runs.append(_Run(run.name, move_plan(run.plan, where), request))
        return _Pair(root, self.is_named, (runs[0], runs[1]))


@click.command("compare", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_file", metavar="RUN.yaml")
@options.set_option
@click.option(
    "--to",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key for the second run alone (repeatable). Default: the other engine, deepspeed or torch.",
)
@click.option(
    "--max-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps of each run. Default: as the run file says.",
)
@options.cluster_options
@options.master_options
@options.via_option
@options.container_option
@options.env_option
@click.option("--run-dir", metavar="DIR", help="Directory of both runs: DIR/base and DIR/changed.")
@options.dry_run_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    run_file: str,
    set_: tuple[str, ...],
    to: tuple[str, ...],
    max_steps: int | None,
    run_dir: str | None,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Train RUN.yaml as it is, then again with --to, and lay the two side by side.

    Same data, order, seed and ranks, one run after the other, each as `dslaunch launch` would start it.
    Prints loss, gradient norm and loss scale by step, skipped steps, speed, peak memory and what differed.
    With the other engine, keys that act with DeepSpeed only are left out, and named.

    \b
    dslaunch compare RUN.yaml --max-steps 20                     ZeRO against plain AMP
    dslaunch compare RUN.yaml --to precision=fp32 --max-steps 20 is it the precision?
    dslaunch compare RUN.yaml --to zero_optimization.stage=3     two stages

    Exit code 0: both came to their end; else that of the first that did not.
    """
    from dslaunch.cli.launch_request import LaunchRequest
    from dslaunch.cli.launch_run import check_start, check_working_directory

    check_working_directory()
    if run_file == "-":
        raise click.UsageError("compare reads the run file twice, so it must be a file: not -")
    common = (*set_, "output.logging_steps=1", *_length(max_steps))
    request = LaunchRequest(run_file=run_file, set_=common, **flags)
    base = _load(request)
    to = _settings_of_second(base, to)
    pair = _plan_both(request, base, to, run_dir)
    first, second = pair.runs
    check_start(first.plan, first.request, dry_run=dry_run)
    with _of_second(to):
        check_start(second.plan, second.request, dry_run=dry_run)
    if dry_run:
        _show(pair.runs, as_json=as_json)
        return EXIT_OK
    with _claimed(pair) as runs:
        code = _run_both(runs)
        _report(runs, code, as_json=as_json)
    return code


# --- planning ---------------------------------------------------------------------------------------


def _length(max_steps: int | None) -> tuple[str, ...]:
    return () if max_steps is None else ("num_train_epochs=null", f"max_steps={max_steps}")


def _settings_of_second(base: LoadedSpec[RunSpec], to: tuple[str, ...]) -> tuple[str, ...]:
    """``--to``; where it is not given, the other engine. Raises ConfigError where one is not KEY=VALUE."""
    from dslaunch.config.overrides import parse_override
    from dslaunch.core.errors import ConfigError

    for text in to:
        if text.partition("=")[0].strip() == "output.run_dir":
            raise ConfigError(f"--to {text}: the second run is kept beside the first", hint="use --run-dir")
        try:
            parse_override(text)
        except ConfigError as error:
            words = (error.message, error.hint or "")
            message, hint = (word.replace("--set", "--to") for word in words)
            raise ConfigError(message, hint=hint) from None
    if to:
        return to
    return ("engine=torch" if base.spec.engine == "deepspeed" else "engine=deepspeed",)


def _load(request: LaunchRequest) -> LoadedSpec[RunSpec]:
    assert request.run_file is not None
    return options.load_run_spec(request.run_file, request.set_, {})


def _changed_request(request: LaunchRequest, base: LoadedSpec[RunSpec], to: tuple[str, ...]) -> LaunchRequest:
    """What the second run is asked for: ``to`` beyond the first.

    Keys that act with DeepSpeed only are taken away where the second run is the one without it.
    """
    from dslaunch.config.without_deepspeed import keys_of_deepspeed

    changed = dataclasses.replace(request, set_=(*request.set_, *to))
    if (base.spec.engine, _load(changed).spec.engine) != ("deepspeed", "torch"):
        return changed
    keys = keys_of_deepspeed(base)
    if keys:
        note(f"left out of the run with engine torch, since they act with DeepSpeed only: {', '.join(keys)}")
    return dataclasses.replace(request, set_=(*request.set_, *(f"{key}=null" for key in keys), *to))


@contextmanager
def _of_second(to: tuple[str, ...]) -> Iterator[None]:
    """Say of an error in the block that it is the second run's, where ``--set`` stands for ``--to``, too."""
    try:
        yield
    except DslaunchError:
        say(f"of the second run, with {', '.join(to)}:")
        raise


def _plan_both(
    request: LaunchRequest, base: LoadedSpec[RunSpec], to: tuple[str, ...], run_dir: str | None
) -> _Pair:
    """Both plans, the second in the directory beside the first. Raises ConfigError where one cannot be."""
    from dslaunch.cli.launch_request import names_run_dir, resolve_request

    with _of_second(to):
        changed = dataclasses.replace(_changed_request(request, base, to), run_dir=run_dir)
    request = dataclasses.replace(request, run_dir=run_dir)
    first = resolve_request(request)
    with _of_second(to):
        second = resolve_request(changed)
    root, is_named = Path(first.launch.run_dir), names_run_dir(first, request)
    if is_named:
        _check_root(root)
    return _Pair(root, is_named, (_Run(BASE, first, request), _Run(CHANGED, second, changed))).at(root)


def _check_root(root: Path) -> None:
    from dslaunch.core.run_dir import RunDir
    from dslaunch.launch.claim import find_obstacle

    if root.exists() and not root.is_dir():
        raise _taken(root, "it is a file")
    if RunDir(root).plan.exists():
        raise _taken(root, "it is the directory of a run")
    for name in (BASE, CHANGED):
        if (obstacle := find_obstacle(root / name)) is not None:
            raise _taken(root / name, obstacle)


def _taken(path: Path, why: str) -> ConfigError:
    from dslaunch.core.errors import ConfigError

    return ConfigError(
        f"{path} cannot be the directory of a comparison: {why}; nothing was started",
        hint="give another --run-dir",
    )


def _show(runs: tuple[_Run, ...], *, as_json: bool) -> None:
    from dslaunch.cli.launch_request import rank_plan
    from dslaunch.cli.launch_show import show, start_json

    if as_json:
        starts = {run.name: start_json(run.plan, rank_plan(run.plan, run.request)) for run in runs}
        click.echo(json.dumps({"schema_version": 1, "dry_run": True, **starts}))
        return
    for number, run in enumerate(runs):
        if number:
            click.echo("\nand when it has ended\n")
        show(run.plan, rank_plan(run.plan, run.request), as_json=False)


# --- acting -----------------------------------------------------------------------------------------


@contextmanager
def _claimed(pair: _Pair) -> Iterator[tuple[_Run, _Run]]:
    """The runs. A directory that nobody named is one of this comparison alone, and goes if no rank starts."""
    from dslaunch.cli.launch_request import make_unused
    from dslaunch.launch.claim import remove_failed_start

    if pair.is_named:
        yield pair.runs
        return
    root = make_unused(pair.root)
    try:
        yield dataclasses.replace(pair, is_named=True).at(root).runs
    except DslaunchError:
        if (root / BASE).is_dir():
            remove_failed_start(root / BASE)
        if not any(root.iterdir()):
            root.rmdir()
            talk(f"no rank was started; removed {root}")
        raise


def _run_both(runs: tuple[_Run, ...]) -> int:
    """One after the other; the exit code of the first that did not come to its end.

    A run that fails is no reason to leave the other out; one that somebody stopped is.
    """
    from dslaunch.cli.launch_run import run as run_ranks

    codes = []
    for number, run in enumerate(runs, 1):
        talk(f"run {number} of {len(runs)}: {run.name}")
        try:
            _, outcome = run_ranks(run.plan, run.request, sys.stderr.buffer)
        except DslaunchError as error:
            if number == 1:
                raise  # nothing was done yet
            say(error.format())
            codes.append(error.exit_code)
            break
        codes.append(outcome.exit_code)
        if outcome.cancelled_by is not None or _was_stopped(outcome.exit_code):
            talk("a comparison that was stopped is not taken up again: to have both runs, start it anew")
            break
    return next((code for code in codes if code != EXIT_OK), EXIT_OK)


def _was_stopped(code: int) -> bool:
    by_signal = {128 + number for number in (signal.SIGINT, signal.SIGHUP, signal.SIGALRM)}
    return code in (EXIT_STOPPED_AT_CHECKPOINT, EXIT_CANCELLED_TERM, *by_signal)


def _report(runs: tuple[_Run, ...], code: int, *, as_json: bool) -> None:
    """Print both side by side, and keep it beside them."""
    from dslaunch.cli.comparison_table import comparison_lines
    from dslaunch.observe.comparison import compare_runs

    base, changed = (Path(run.plan.launch.run_dir) for run in runs)
    found = compare_runs(base, changed)
    text = json.dumps({**found.to_json(), "exit_code": code}, indent=2)
    _keep(base.with_name(_REPORT), text)
    click.echo(text if as_json else "\n".join(comparison_lines(found)))


def _keep(path: Path, text: str) -> None:
    from dslaunch.core.atomic import write_text

    try:
        write_text(path, text + "\n")
    except OSError as error:  # what is printed next is all of it
        note(f"cannot write {path}: {error.strerror}")
    else:
        talk(f"all of it is in {path}")
