"""From a plan to a job that can be trained, in the order in which it can fail cheaply.

Data first, then the checkpoint to go on from, the trackers, the model, the engine.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dslaunch.core.plan import DataSource, RunPlan
from dslaunch.core.run_dir import RunDir, cache_dir
from dslaunch.train.checkpoint import find_whole_checkpoint, read_manifest, restore_checkpoint
from dslaunch.train.checkpoint.record import (
    DataRecord,
    RunRecord,
    check_same_data,
    read_record,
)
from dslaunch.train.corpus import Corpus, build_corpus
from dslaunch.train.data.context import check_context, row_width
from dslaunch.train.data.dataset import TokenizingOptions, prepare_on_rank
from dslaunch.train.data.isolation import check_packing_isolation
from dslaunch.train.data.markers import marker_warning
from dslaunch.train.data.sampler import BatchSchedule
from dslaunch.train.dist import World, barrier
from dslaunch.train.embedding_noise import EmbeddingNoise
from dslaunch.train.engine import TorchSettings, TrainingEngine, initialize, initialize_torch
from dslaunch.train.loop import Job
from dslaunch.train.model import DTYPES, LoadedModel, load_model, load_tokenizer
from dslaunch.train.new_tokens import unused_tokens
from dslaunch.train.objectives.sft import SftObjective
from dslaunch.train.optimizers import build_optimizer, build_torch_optimizer, parameter_groups
from dslaunch.train.report import Report
from dslaunch.train.schedule import build_scheduler_factory
from dslaunch.train.stopping import StopRequest
from dslaunch.train.watch import Watch

_PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What can be had without the model's weights. ``record`` goes into each checkpoint."""

    tokenizer: Any
    train: Corpus
    evaluation: Corpus | None
    schedule: BatchSchedule
    record: RunRecord


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the training begins: at step 0, or where ``checkpoint`` was saved."""

    step: int = 0
    checkpoint: Path | None = None


def load_inputs(plan: RunPlan, world: World) -> Inputs:
    """Tokenizer, tokenised data and batch order. Collective.

    One rank a host tokenises what is not in the cache yet. Raises ConfigError and
    EnvironmentNotReady as the data's readers do.
    """
    tokenizer = load_tokenizer(plan.model, DTYPES[plan.precision])
    train = _load_corpus(plan, plan.data.train, "training", tokenizer, world)
    for line in unused_tokens(train.dataset, tokenizer, plan.model.new_tokens):
        say(world, f"warning: {line}")
    if warning := marker_warning(train.dataset.report, tokenizer):
        say(world, f"warning: {warning}")
    evaluation = _load_corpus(plan, plan.data.eval, "held-out", tokenizer, world) if plan.data.eval else None
    schedule = _build_schedule(plan, len(train))
    return Inputs(
        tokenizer=tokenizer,
        train=train,
        evaluation=evaluation,
        schedule=schedule,
        record=_make_record(plan, train, schedule),
    )


def find_start(plan: RunPlan, world: World, inputs: Inputs) -> Start:
    """The last whole checkpoint, verified, or step 0 where there is none yet. Collective.

    Raises ConfigError where none is whole or the data is not what it was trained on.
    """
    root = RunDir(Path(plan.launch.run_dir)).checkpoints
    path = find_whole_checkpoint(root, on_note=lambda text: say(world, f"note: {text}"))
    if path is None:
        say(world, f"no checkpoint in {root} yet: starting at step 0")
        return Start()
    return _start_at(path, inputs)


def find_start_before(plan: RunPlan, world: World, inputs: Inputs, step: int) -> Start:
    """The last whole checkpoint from which step ``step`` (counted from 1) is still to come. Collective."""
    root = RunDir(Path(plan.launch.run_dir)).checkpoints
    path = find_whole_checkpoint(root, before=step, on_note=lambda text: say(world, f"note: {text}"))
    return Start() if path is None else _start_at(path, inputs)


def _start_at(path: Path, inputs: Inputs) -> Start:
    manifest = read_manifest(path)
    saved = read_record(manifest.extra, f"{path}/manifest.json extra")
    check_same_data(saved.data, inputs.record.data)
    return Start(step=manifest.step, checkpoint=path)


def build_job(
    plan: RunPlan, world: World, inputs: Inputs, start: Start, report: Report, stop: StopRequest
) -> Job:
    """Load the model, make the engine, and restore the checkpoint of ``start``. Collective.

    Raises DslaunchErrors of the model, the engine and the checkpoint.
    """
    loaded = load(plan, world, inputs.tokenizer)
    _check_contexts(loaded, inputs, world)
    engine = start_engine(plan, world, loaded, inputs.schedule.total_steps, report)
    if plan.data.packing:
        say(world, "checking that packed samples do not see each other")
        check_packing_isolation(engine.module, len(inputs.tokenizer), engine.device)
    _seed_everything(plan.seed + world.rank)
    if start.checkpoint is not None:
        restore_checkpoint(engine, start.checkpoint)
        say(world, f"resuming at step {start.step} of {inputs.schedule.total_steps}")
        report.event("resumed", step=start.step, total_steps=inputs.schedule.total_steps)
    return Job(
        plan=plan,
        world=world,
        engine=engine,
        objective=build_objective(plan, world, engine),
        train=inputs.train,
        evaluation=inputs.evaluation,
        schedule=inputs.schedule,
        report=report,
        stop=stop,
        watch=Watch(
            precision=plan.precision,
            limits=plan.watch,
            event=report.event,
            say=report.say,
            diagnosis=RunDir(Path(plan.launch.run_dir)).diagnosis if world.rank == 0 else None,
        ),
        extra=inputs.record.to_json(),
        keep_alive=loaded.keep_alive,
    )


def load(plan: RunPlan, world: World, tokenizer: Any) -> LoadedModel:
    """The plan's model, and what is to be said of it. Collective. Raises DslaunchErrors of the model."""
    say(world, f"loading {plan.model.path} in {plan.precision}")
    loaded = load_model(plan, tokenizer)
    for note in loaded.notes:
        say(world, note)
    return loaded


def start_engine(
    plan: RunPlan, world: World, loaded: LoadedModel, total_steps: int, report: Report | None = None
) -> TrainingEngine:
    """The engine around a loaded model. Collective. Raises DslaunchErrors of the engine.

    What it has to say at its start goes to stderr, and to ``report`` as events.
    """

    def on_note(text: str) -> None:
        say(world, f"note: {text}")
        if report is not None:
            report.event("note", message=text)

    say(world, _engine_in_words(plan))
    with loaded.fp32.admitted() if loaded.fp32 is not None else contextlib.nullcontext():
        engine = _build_engine(plan, loaded, total_steps, world, on_note)
    if loaded.fp32 is not None:
        loaded.fp32.check_forward(engine.module, world.device)
    return engine


def build_objective(plan: RunPlan, world: World, engine: TrainingEngine) -> SftObjective:
    """The loss. After all probes of the model: they are to see it without NEFTune's noise."""
    alpha = plan.neftune_noise_alpha
    noise = EmbeddingNoise(engine.module, alpha) if alpha is not None else None
    return SftObjective(engine, engine.module, world.device, noise=noise)


def say(world: World, text: str) -> None:
    """One line on stderr, from rank 0."""
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _load_corpus(
    plan: RunPlan, sources: Sequence[DataSource], what: str, tokenizer: Any, world: World
) -> Corpus:
    options = TokenizingOptions(
        tokenizer=tokenizer,
        max_length=plan.data.max_length,
        cache_dir=Path(plan.data.cache_dir) if plan.data.cache_dir else cache_dir(os.environ) / "tokens",
        max_dropped_fraction=plan.data.max_dropped_fraction,
        seed=plan.seed,
        progress=_tokenising_progress(world),
    )
    dataset = prepare_on_rank(
        sources,
        options,
        is_builder=world.local_rank == 0,
        barrier=lambda: barrier(f"the {what} data being tokenised"),
    )
    for line in dataset.report.lines():
        say(world, f"{what} data: {line.strip()}")
    return build_corpus(dataset, plan.data, pad_token_id=tokenizer.pad_token_id, seed=plan.seed)


def _tokenising_progress(world: World) -> Callable[[str, int], None]:
    """Says every few seconds how far tokenising has come; a small file is done before the first line."""
    last = time.monotonic()

    def tell(path: str, num_records: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_EVERY_S:
            last = time.monotonic()
            say(world, f"tokenising {path}: {num_records} records so far")

    return tell


def _build_schedule(plan: RunPlan, num_units: int) -> BatchSchedule:
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


def _make_record(plan: RunPlan, train: Corpus, schedule: BatchSchedule) -> RunRecord:
    return RunRecord(
        model=plan.model,
        adapter=plan.adapter,
        precision=plan.precision,
        fp32_modules=plan.fp32_modules,
        data=DataRecord(
            fingerprint=train.fingerprint,
            num_units=len(train),
            packing=plan.data.packing,
            shuffle=plan.data.shuffle,
            seed=plan.seed,
            train_batch_size=plan.batch.train_batch_size,
            total_steps=schedule.total_steps,
        ),
    )


def _check_contexts(loaded: LoadedModel, inputs: Inputs, world: World) -> None:
    """Rows must fit the model's positions: an error where it would crash, a note where it would be worse."""
    for corpus in filter(None, (inputs.train, inputs.evaluation)):
        note = check_context(
            loaded.model.config,
            row_width(int(corpus.lengths.max())),
            longest_sample=int(corpus.dataset.lengths.max()),
        )
        if note is not None:
            say(world, f"note: {note}")


def _engine_in_words(plan: RunPlan) -> str:
    if plan.engine == "deepspeed":
        return f"starting DeepSpeed, ZeRO stage {plan.zero_stage}"
    computes = "fp32" if plan.precision == "fp32" else f"{plan.precision} autocast"
    return f"starting torch without DeepSpeed: {computes}, {plan.batch.world_size} ranks with the whole model"


def _build_engine(
    plan: RunPlan, loaded: LoadedModel, total_steps: int, world: World, on_note: Callable[[str], None]
) -> TrainingEngine:
    scheduler = build_scheduler_factory(plan.scheduler, total_steps)
    groups = parameter_groups(loaded.model, plan.optimizer)
    for line in groups.notes:
        say(world, f"optimizer group: {line}")
    if plan.engine == "torch":
        settings = TorchSettings(
            precision=plan.precision,
            gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
            gradient_clipping=plan.gradient_clipping,
            fp16=plan.fp16,
        )
        make = build_torch_optimizer(plan.optimizer, loaded.model)
        return initialize_torch(
            loaded.model,
            settings,
            lambda _: make(groups.parameters),
            scheduler,
            world.device,
            allow_emulated_fp16=plan.allow_emulated_fp16,
            watch=None,  # the loop watches, whatever the engine
            on_note=on_note,
        )
    fp32 = loaded.fp32
    return initialize(
        loaded.model,
        dict(plan.ds_config),
        optimizer=build_optimizer(plan.optimizer, loaded.model),
        lr_scheduler=scheduler,
        model_parameters=groups.parameters if fp32 is None else fp32.groups(groups.parameters),
        on_note=on_note,
        allow_emulated_fp16=plan.allow_emulated_fp16,
        allow_untested_deepspeed=plan.allow_untested_deepspeed,
        watch=None,
    )


def _seed_everything(seed: int) -> None:
    """Each rank its own stream: dropout must differ between ranks."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
