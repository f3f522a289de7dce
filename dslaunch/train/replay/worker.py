"""One rank of a replay: ``python -m dslaunch.train.replay.worker --plan PLAN --step N --report FILE``.

Started by ``dslaunch replay`` as the training's ranks were: as many, on the same kind of device.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dslaunch.core.errors import EXIT_CANCELLED_INT, EXIT_OK, ConfigError
from dslaunch.core.events import utc_now
from dslaunch.core.plan import RunPlan, load_run_plan
from dslaunch.core.run_dir import RunDir
from dslaunch.train.failures import report_failure
from dslaunch.train.stopping import StopRequest
from dslaunch.train.whereabouts import answer
from dslaunch.train.worker import leave, rank_for_messages

if TYPE_CHECKING:
    from dslaunch.train.dist import World
    from dslaunch.train.engine import TrainingEngine
    from dslaunch.train.objectives.sft import SftObjective
    from dslaunch.train.replay.window import Window


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank; returns its exit code. Errors are sentences, never a traceback."""
    since = utc_now()
    arguments = _parse_arguments(argv)
    log_dir: Path = arguments.report.parent
    try:
        plan = _here(load_run_plan(arguments.plan), arguments.plan.parent)
        return run_rank(plan, arguments.step, arguments.report, detect_anomaly=arguments.detect_anomaly)
    except KeyboardInterrupt:
        return EXIT_CANCELLED_INT
    except Exception as error:
        return report_failure(error, rank=rank_for_messages(), run_dir=log_dir, since=since)


def _here(plan: RunPlan, run_dir: Path) -> RunPlan:
    """The plan for the directory that it lies in: the run may have been moved since."""
    return dataclasses.replace(plan, launch=dataclasses.replace(plan.launch, run_dir=str(run_dir)))


def run_rank(plan: RunPlan, step: int, report_path: Path, *, detect_anomaly: bool) -> int:
    """Join the other ranks, replay, and let rank 0 write the report. Collective."""
    answer(rank_for_messages())
    from dslaunch.train.quiet import quiet_libraries

    quiet_libraries()
    from dslaunch.train.dist import check_device, init_world, shutdown

    check_device(plan.launch.device_type)
    world = init_world(timeout_s=plan.launch.ddp_timeout_s)
    report = replay_rank(plan, world, step, detect_anomaly=detect_anomaly)
    if world.rank == 0:
        from dslaunch.core import atomic

        atomic.write_json(report_path, report)
    shutdown()
    return EXIT_OK


def replay_rank(plan: RunPlan, world: World, step: int, *, detect_anomaly: bool = False) -> dict[str, Any]:
    """What :func:`run_rank` does once the ranks are connected; the report, on every rank.

    A step whose weights were kept is run with those. Any other one is reached as the training
    did: from the last checkpoint before it, or from the start.
    """
    from dslaunch.train import prepare
    from dslaunch.train.replay.passes import Passes
    from dslaunch.train.replay.trace import Trace

    ready = _kept(plan, world, step) or _reached(plan, world, step)
    prepare.say(world, f"running step {step} again")
    passes = Passes(ready.engine, ready.objective)
    return Trace(passes, ready.window, rank=world.rank).run(detect_anomaly=detect_anomaly)


class _Ready(NamedTuple):
    """All that a trace takes. ``keep_alive``: see ``LoadedModel``."""

    window: Window
    engine: TrainingEngine
    objective: SftObjective
    keep_alive: tuple[Any, ...]


def _kept(plan: RunPlan, world: World, step: int) -> _Ready | None:
    """The step as it was kept when the run failed, if it was, with its weights. Reads no training data."""
    from dslaunch.train import prepare
    from dslaunch.train.model import DTYPES, load_tokenizer
    from dslaunch.train.replay.weights import load_weights
    from dslaunch.train.replay.window import read_index, read_rank, window_path

    run_dir = Path(plan.launch.run_dir)
    if step not in RunDir(run_dir).kept_steps():
        return None
    folder = window_path(run_dir, step)
    if not read_index(folder)["has_weights"]:
        prepare.say(
            world, f"step {step} was kept without its weights: it takes the training data to reach it"
        )
        return None
    tokenizer = load_tokenizer(plan.model, DTYPES[plan.precision])
    window = read_rank(folder, world.rank, pad_token_id=tokenizer.pad_token_id)
    loaded = prepare.load(plan, world, tokenizer)
    engine = prepare.start_engine(plan, world, loaded, total_steps=step)
    prepare.say(world, f"weights and micro-batches as they were in step {step}")
    load_weights(folder, world.rank if engine.zero_stage == 3 else 0, engine.module)
    objective = prepare.build_objective(plan, world, engine)
    return _Ready(window, engine, objective, loaded.keep_alive)


def _reached(plan: RunPlan, world: World, step: int) -> _Ready:
    """The step as the training reaches it, from the last checkpoint before it."""
    from dslaunch.train import prepare
    from dslaunch.train.loop import train_step
    from dslaunch.train.replay.window import build_window, take_rng
    from dslaunch.train.report import Report

    inputs = prepare.load_inputs(plan, world)
    if not 1 <= step <= inputs.schedule.total_steps:
        raise ConfigError(f"--step {step}: the run has steps 1 to {inputs.schedule.total_steps}")
    start = prepare.find_start_before(plan, world, inputs, step)
    job = prepare.build_job(plan, world, inputs, start, Report(None, {}), StopRequest())
    if start.step < step - 1:
        prepare.say(world, f"training steps {start.step + 1} to {step - 1} again to get there")
    for number in range(start.step, step - 1):
        train_step(job, number)
    units = job.schedule.window_units(step - 1)
    window = build_window(
        step,
        corpus=job.train,
        micro_batches=job.schedule.micro_batches(step - 1, world.rank),
        num_tokens=job.train.count_supervised(units),
        loss_scale=job.engine.loss_scale,
        rng=take_rng(),
    )
    return _Ready(window, job.engine, job.objective, job.keep_alive)


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dslaunch.train.replay.worker",
        description="One rank of a replay; started by dslaunch replay.",
        allow_abbrev=False,
    )
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the run directory")
    parser.add_argument("--step", type=int, required=True, help="the step to run again, from 1")
    parser.add_argument("--report", type=Path, required=True, help="where rank 0 writes what was found")
    parser.add_argument("--detect-anomaly", action="store_true", help="ask autograd as well")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
