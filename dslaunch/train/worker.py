"""One rank of a run: ``python -m dslaunch.train.worker --plan RUN_DIR/plan.json [--resume]``.

``dslaunch launch``, ``deepspeed`` and ``torchrun`` can all start it: it reads
RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment.
torch and DeepSpeed are imported only once the plan has been read.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dslaunch.core.errors import EXIT_CANCELLED_INT, EXIT_OK, ConfigError
from dslaunch.core.events import utc_now
from dslaunch.core.plan import RunPlan, load_run_plan
from dslaunch.core.run_dir import RunDir
from dslaunch.train.failures import report_failure
from dslaunch.train.stopping import StopRequest
from dslaunch.train.whereabouts import answer

if TYPE_CHECKING:
    from dslaunch.train.dist import World
    from dslaunch.train.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank; returns its exit code. Errors are sentences, never a traceback."""
    since = utc_now()
    arguments = _parse_arguments(argv)
    run_dir: Path | None = None
    try:
        plan = load_run_plan(arguments.plan)
        run_dir = Path(plan.launch.run_dir)
        return run_rank(plan, resume=arguments.resume)
    except KeyboardInterrupt:
        return EXIT_CANCELLED_INT
    except Exception as error:
        return report_failure(error, rank=rank_for_messages(), run_dir=run_dir, since=since)


def leave(code: int) -> NoReturn:
    """End this process with the exit code of :func:`main`, at once.

    Python's normal end takes down what is left of the process group: after a failure it
    waits under NCCL for ranks that will never come, and under gloo a thread that still
    runs turns a finished run into an abort ("terminate called without an active exception").
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader may be gone
            stream.flush()
    os._exit(code)


def run_rank(plan: RunPlan, *, resume: bool) -> int:
    """Load, train, evaluate and save as ``plan`` says. Collective over all its ranks.

    Returns 0 when the training is complete and 75 when it was asked to stop
    and has done so at a checkpoint. Raises DslaunchError for everything a user can mend;
    the process group is then left as it is, see :func:`leave`.
    """
    answer(rank_for_messages())
    stop = StopRequest()
    stop.catch_warnings()
    _check_start(plan, resume=resume)
    from dslaunch.train.quiet import quiet_libraries

    quiet_libraries()
    from dslaunch.train.dist import check_device, init_world, shutdown

    check_device(plan.launch.device_type)
    if plan.engine == "deepspeed":
        from dslaunch.train.engine.settings import check_version

        check_version(plan.allow_untested_deepspeed)  # the engine says so as well, after the model is loaded
    world = init_world(timeout_s=plan.launch.ddp_timeout_s)
    code = train_rank(plan, world, stop, resume=resume)
    shutdown()
    return code


def train_rank(plan: RunPlan, world: World, stop: StopRequest, *, resume: bool) -> int:
    """What :func:`run_rank` does once the ranks are connected; several plans may follow each other."""
    from dslaunch.train import prepare
    from dslaunch.train.loop import run_training
    from dslaunch.train.report import open_report

    inputs = prepare.load_inputs(plan, world)
    start = prepare.find_start(plan, world, inputs) if resume else prepare.Start()
    total = inputs.schedule.total_steps
    # Trackers log in here: before the model is loaded, not after.
    with _closing(open_report(plan, is_main=world.rank == 0, first_step=start.step)) as report:
        if start.step >= total:
            report.say(f"already at step {start.step} of {total}: nothing to do")
            return EXIT_OK
        job = prepare.build_job(plan, world, inputs, start, report, stop)
        stop.catch_termination()
        return run_training(job, start.step)


@contextlib.contextmanager
def _closing(report: Report) -> Iterator[Report]:
    """Close ``report`` in the end; a tracker that fails to close does not hide an earlier error."""
    try:
        yield report
    except BaseException:
        with contextlib.suppress(Exception):
            report.close()
        raise
    report.close()


def _check_start(plan: RunPlan, *, resume: bool) -> None:
    """Before anything is loaded: the ranks fit the plan, the trackers are there, nothing is overwritten."""
    from dslaunch.train.dist import read_rank_environment
    from dslaunch.train.report import check_trackers

    _, world_size, _ = read_rank_environment()
    if world_size != plan.batch.world_size:
        raise ConfigError(
            f"{world_size} ranks were started (WORLD_SIZE), but the plan is for {plan.batch.world_size}",
            hint=f"start {plan.batch.world_size} ranks, or resolve the run file again for {world_size}",
        )
    check_trackers(plan.output.report_to)
    run_dir = RunDir(Path(plan.launch.run_dir))
    if not resume and run_dir.checkpoint_steps():
        raise ConfigError(
            f"{run_dir.checkpoints} holds checkpoints already; nothing was trained",
            hint="add --resume to go on from the last one, or use another run directory",
        )


def rank_for_messages() -> int:
    """RANK, or 0 where that is no number: an error must have a name to go by."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dslaunch.train.worker",
        description="One rank of a dslaunch run; started by dslaunch launch, deepspeed or torchrun.",
        allow_abbrev=False,
    )
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the run directory")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    # The deepspeed launcher and old torch ones add this; LOCAL_RANK in the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
