"""A loop of one's own that ends for nan: what the trace in place names, keeps and can run again."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import torch

from dslaunch.observe.diagnose.read import diagnose
from dslaunch.train.dist import init_world
from dslaunch.train.engine import Diverged, Engine, TrainingEngine
from dslaunch.train.replay.own_loop import replay
from tests.train.engine.cases_torch import torch_engine
from tests.train.engine.cases_watch import Feed, watched
from tests.train.rank_cases import RANK, WORLD_SIZE, Case, config, engine_for, shared_folder
from tests.train.replay.planted import LENGTH, TRIGGER, LogOfZero, PlantedLM, RootOfZero

ROWS, ACCUMULATION, BAD_STEP, BAD_MICRO_BATCH, BAD_ROW = 3, 2, 2, 1, 2
SGD = {"type": "SGD", "params": {"lr": 1e-4}}
TRACE = {"on_nonfinite": "trace", "max_skipped_in_a_row": 1}


class GivesLoss(PlantedLM):
    """A model that gives its loss as the models of transformers do."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids).logits
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}


def mean_square(output: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    return output.logits.float().square().mean()  # type: ignore[no-any-return]


def ids(step: int, micro_batch: int) -> torch.Tensor:
    rows = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 50 + step
    if (step, micro_batch, RANK) == (BAD_STEP, BAD_MICRO_BATCH, WORLD_SIZE - 1):
        rows[BAD_ROW, 4] = TRIGGER
    return rows


def given(engine: TrainingEngine, step: int, *, gives_loss: bool) -> torch.Tensor:
    """A window but its last step(), which is the caller's; its last input."""
    for micro_batch in range(ACCUMULATION):
        rows = ids(step, micro_batch)
        if gives_loss:
            loss = engine(rows, labels=rows)["loss"]
        else:
            with torch.no_grad():
                engine(input_ids=rows)  # a look without training is no part of the step
            engine(input_ids=rows[:1])  # nor is one whose output nothing is made of
            loss = mean_square(engine(input_ids=rows), rows)
        engine.backward(loss)
        if micro_batch + 1 < ACCUMULATION:
            assert engine.step() is None
    return rows


def feed(gives_loss: bool) -> Feed:
    def give(engine: Engine, step: int) -> None:
        given(engine, step, gives_loss=gives_loss)

    return give


def written_into() -> dict[str, Any]:
    """And whether the engine goes on to keep what it is called with."""
    engines: list[Engine] = []

    def give(engine: Engine, step: int) -> None:
        engines.append(engine)
        given(engine, step, gives_loss=True).add_(1)

    result = inside(2, LogOfZero(), give)
    return {**result, "records": engines[-1]._recorder is not None}


def settings(stage: int) -> dict[str, Any]:
    return config(stage, "bf16", micro=ROWS, accumulation=ACCUMULATION, optimizer=SGD)


def outside(stage: int, plant: torch.nn.Module, **more: Any) -> dict[str, Any]:
    return watched(settings(stage), feed(False), steps=4, model=PlantedLM(plant), watch=TRACE, **more)


def inside(stage: int, plant: torch.nn.Module, give: Feed, **more: Any) -> dict[str, Any]:
    more = {"watch": TRACE, **more}
    return watched(settings(stage), give, steps=4, model=GivesLoss(plant), **more)


def kept_and_replayed(stage: int) -> dict[str, Any]:
    """The run, and then its kept step again on an engine of another model with other weights."""
    init_world()
    where = Path(shared_folder())
    result = outside(stage, LogOfZero(), trace_loss=mean_square, run_dir=where)
    folder = where / "nonfinite" / f"step-{BAD_STEP}"
    model = PlantedLM(LogOfZero())
    with torch.no_grad():
        model.head.weight.zero_()
    refused = ""
    with engine_for(model, settings(stage)) as engine:
        torch.manual_seed(99)
        again = replay(engine, folder, trace_loss=mean_square)
    with engine_for(model, settings(1)) as engine:
        try:
            replay(engine, folder)
        except Exception as error:
            refused = str(error)
    torch.distributed.barrier()
    report = {
        **result, "again": again, "refused": refused, "files": sorted(p.name for p in folder.iterdir()),
        "report": json.loads((folder / "report.json").read_text()),
        "diagnosis": json.loads((where / "diagnosis.json").read_text()),
        "diagnosed": diagnose([str(where)]).to_json(),
        "where": str(where),
    }  # fmt: skip
    torch.distributed.barrier()
    if RANK == 0:
        shutil.rmtree(where)
    return report


def without_deepspeed() -> dict[str, Any]:
    """The engine on torch alone watches, holds and traces as well."""
    kinds: list[str] = []
    engine = torch_engine(
        GivesLoss(LogOfZero()),
        "bf16",
        accumulation=ACCUMULATION,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        watching={"watch": TRACE, "on_event": lambda kind, **fields: kinds.append(kind)},
    )
    found: dict[str, Any] = {}
    with contextlib.redirect_stderr(io.StringIO()):
        for step in range(1, BAD_STEP + 2):
            given(engine, step, gives_loss=True)
            try:
                engine.step()
            except Diverged as error:
                found = {"verdict": error.verdict, "step": error.step, "culprit": error.culprit}
                break
    return {**found, "kinds": kinds, "records": engine._recorder is not None}


def off(**more: Any) -> dict[str, Any]:
    """After a step: whether its micro-batch is held on to, and the hooks that there are."""
    with engine_for(GivesLoss(), settings(2), **more) as engine:
        seen = weakref.ref(given(engine, 1, gives_loss=True))
        engine.step()
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules())
        return {"held": seen() is not None, "hooks": hooks}


def all_cases() -> dict[str, Case]:
    return {
        "trace/kept/2": lambda: kept_and_replayed(2),
        "trace/kept/3": lambda: kept_and_replayed(3),
        "trace/backward": lambda: inside(2, RootOfZero(), feed(True)),
        "trace/without-loss": lambda: outside(2, RootOfZero()),
        "trace/written-into": written_into,
        "trace/stop": lambda: inside(2, LogOfZero(), feed(True), watch={}),
        "trace/torch": without_deepspeed,
        "trace/off": lambda: [off(watch=None), off(watch={}), off(watch={"on_nonfinite": "trace"})],
    }
