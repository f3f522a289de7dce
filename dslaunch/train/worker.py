"""One rank of a run: ``python -m dslaunch.train.worker --plan RUN_DIR/plan.json [--resume]``.

``dslaunch launch``, ``deepspeed`` and ``torchrun`` can all start it: it reads
RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment.
torch and DeepSpeed are imported only once the plan has been read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.core.errors import EXIT_CANCELLED_INT, EXIT_OK, ConfigError
from dslaunch.core.events import utc_now
from dslaunch.core.plan import DataSource, RunPlan, load_run_plan
from dslaunch.core.run_dir import RunDir, cache_dir
from dslaunch.train.failures import report_failure
from dslaunch.train.stopping import StopRequest

if TYPE_CHECKING:
    from dslaunch.train.corpus import Corpus
    from dslaunch.train.data.sampler import BatchSchedule
    from dslaunch.train.dist import World
    from dslaunch.train.engine import Engine
    from dslaunch.train.loop import Job
    from dslaunch.train.model import LoadedModel

_PROGRESS_EVERY_S = 5.0


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
        return report_failure(error, rank=_rank_for_messages(), run_dir=run_dir, since=since)


def run_rank(plan: RunPlan, *, resume: bool) -> int:
    """Load, train, evaluate and save as ``plan`` says. Collective over all its ranks.

    Returns 0 when the training is complete and 75 when it was asked to stop
    and has done so at a checkpoint. Raises DslaunchError for everything a user can mend.
    """
    stop = StopRequest()
    stop.catch_warnings()
    _check_start(plan, resume=resume)
    from dslaunch.train.quiet import quiet_libraries

    quiet_libraries()
    from dslaunch.train.dist import init_world, shutdown

    world = init_world()
    try:
        return train_rank(plan, world, stop, resume=resume)
    finally:
        shutdown()


def train_rank(plan: RunPlan, world: World, stop: StopRequest, *, resume: bool) -> int:
    """What :func:`run_rank` does once the ranks are connected; several plans may follow each other."""
    from dslaunch.train.loop import run_training

    job, first_step = _prepare(plan, world, stop, resume=resume)
    total = job.schedule.total_steps
    try:
        if first_step >= total:
            job.report.say(f"already at step {first_step} of {total}: nothing to do")
            return EXIT_OK
        stop.catch_termination()
        return run_training(job, first_step)
    finally:
        job.report.close()


def _prepare(plan: RunPlan, world: World, stop: StopRequest, *, resume: bool) -> tuple[Job, int]:
    """Everything before the first step, in the order in which it can fail cheaply: data, model, engine."""
    from dslaunch.train.loop import Job
    from dslaunch.train.model import DTYPES, load_model, load_tokenizer
    from dslaunch.train.objectives.sft import SftObjective
    from dslaunch.train.report import open_report

    tokenizer = load_tokenizer(plan.model, DTYPES[plan.precision])
    train, evaluation = _load_data(plan, tokenizer, world)
    schedule = _build_schedule(plan, len(train))
    _say(world, f"loading {plan.model.path} in {plan.precision}")
    loaded = load_model(plan, tokenizer)
    for note in loaded.notes:
        _say(world, note)
    engine = _build_engine(plan, loaded, schedule, world)
    if plan.data.packing:
        _check_isolation(engine, tokenizer)
    _seed_everything(plan.seed + world.rank)
    first_step = _resume(plan, world, engine, train, schedule) if resume else 0
    report = open_report(plan, is_main=world.rank == 0, first_step=first_step)
    if resume:
        report.event("resumed", step=first_step, total_steps=schedule.total_steps)
    job = Job(
        plan=plan,
        world=world,
        engine=engine,
        objective=SftObjective(engine, engine.module, world.device),
        train=train,
        evaluation=evaluation,
        schedule=schedule,
        report=report,
        stop=stop,
        extra=_extra(plan, train, schedule),
        keep_alive=loaded.keep_alive,
    )
    return job, first_step


def _build_schedule(plan: RunPlan, num_units: int) -> BatchSchedule:
    from dslaunch.train.data.sampler import BatchSchedule

    return BatchSchedule(
        num_units=num_units,
        train_batch_size=plan.batch.train_batch_size,
        train_micro_batch_size_per_gpu=plan.batch.train_micro_batch_size_per_gpu,
        gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
        world_size=plan.batch.world_size,
        seed=plan.seed,
        num_train_epochs=plan.num_train_epochs,
        max_steps=plan.max_steps,
        shuffle=plan.data.shuffle,
    )


def _build_engine(plan: RunPlan, loaded: LoadedModel, schedule: BatchSchedule, world: World) -> Engine:
    from dslaunch.train.engine import initialize
    from dslaunch.train.schedule import build_scheduler_factory

    return initialize(
        loaded.model,
        dict(plan.ds_config),
        lr_scheduler=build_scheduler_factory(plan.scheduler, schedule.total_steps),
        model_parameters=loaded.trainable,
        on_note=lambda text: _say(world, f"note: {text}"),
    )


def _load_data(plan: RunPlan, tokenizer: Any, world: World) -> tuple[Corpus, Corpus | None]:
    """Training and held-out data; one rank a host tokenises what is not in the cache yet."""
    from dslaunch.train.corpus import build_corpus
    from dslaunch.train.data.dataset import prepare_on_rank
    from dslaunch.train.dist import barrier

    directory = Path(plan.data.cache_dir) if plan.data.cache_dir else cache_dir(os.environ) / "tokens"

    def prepare(sources: Sequence[DataSource], what: str) -> Corpus:
        dataset = prepare_on_rank(
            sources,
            is_builder=world.local_rank == 0,
            barrier=lambda: barrier(f"the {what} data being tokenised"),
            tokenizer=tokenizer,
            max_length=plan.data.max_length,
            cache_dir=directory,
            max_dropped_fraction=plan.data.max_dropped_fraction,
            seed=plan.seed,
            progress=_tokenising_progress(world),
        )
        for line in dataset.report.lines():
            _say(world, f"{what} data: {line.strip()}")
        return build_corpus(dataset, plan.data, pad_token_id=tokenizer.pad_token_id, seed=plan.seed)

    train = prepare(plan.data.train, "training")
    return train, prepare(plan.data.eval, "held-out") if plan.data.eval else None


def _tokenising_progress(world: World) -> Callable[[str, int], None]:
    """Says every few seconds how far tokenising has come; a small file is done before the first line."""
    import time

    last = time.monotonic()

    def tell(path: str, num_records: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_EVERY_S:
            last = time.monotonic()
            _say(world, f"tokenising {path}: {num_records} records so far")

    return tell


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
    checkpoints = RunDir(Path(plan.launch.run_dir)).checkpoints
    if not resume and any(checkpoints.glob("step-*")):
        raise ConfigError(
            f"{checkpoints} holds checkpoints already; nothing was trained",
            hint="add --resume to go on from the last one, or use another run directory",
        )


def _check_isolation(engine: Engine, tokenizer: Any) -> None:
    from dslaunch.train.data.isolation import check_packing_isolation

    check_packing_isolation(engine.module, len(tokenizer), engine.device)


def _resume(plan: RunPlan, world: World, engine: Engine, train: Corpus, schedule: BatchSchedule) -> int:
    """Load the last whole checkpoint; the step to go on with. Raises ConfigError if the data has changed."""
    from dslaunch.train.checkpoint import load_checkpoint

    root = RunDir(Path(plan.launch.run_dir)).checkpoints
    saved = load_checkpoint(engine, root, on_note=lambda text: _say(world, f"note: {text}"))
    if saved is None:
        _say(world, f"no checkpoint in {root} yet: starting at step 0")
        return 0
    _check_same_data(saved, _extra(plan, train, schedule))
    step: int = engine.global_step
    _say(world, f"resuming at step {step} of {schedule.total_steps}")
    return step


def _extra(plan: RunPlan, train: Corpus, schedule: BatchSchedule) -> dict[str, Any]:
    """What a checkpoint keeps of its run: to check a resume, and to export without the run directory."""
    from dslaunch.core.plan import to_json

    value = to_json(plan)
    return {
        "model": value["model"],
        "adapter": value["adapter"],
        "precision": plan.precision,
        "data": {
            "fingerprint": train.fingerprint,
            "num_units": len(train),
            "packing": plan.data.packing,
            "shuffle": plan.data.shuffle,
            "seed": plan.seed,
            "train_batch_size": plan.batch.train_batch_size,
            "total_steps": schedule.total_steps,
        },
    }


def _check_same_data(saved: dict[str, Any], present: dict[str, Any]) -> None:
    then, now = saved["data"], present["data"]
    differing = [key for key in now if then.get(key) != now[key]]
    if differing:
        shown = ", ".join(f"{key} {then.get(key)} then, {now[key]} now" for key in differing)
        raise ConfigError(
            f"the training data is not what the checkpoint was trained on: {shown}",
            hint="resume with the same data, template and batch size, or start a new run",
        )


def _seed_everything(seed: int) -> None:
    """Each rank its own stream: dropout must differ between ranks."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _rank_for_messages() -> int:
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
    sys.exit(main())
