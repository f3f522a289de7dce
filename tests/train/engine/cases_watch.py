"""Planted faults, as a loop of one's own meets them: what is said, on which rank, and when it stops."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dslaunch.observe.diagnose.read import diagnose
from dslaunch.train.engine import Diverged, Engine
from tests.train.rank_cases import (
    RANK,
    WORLD_SIZE,
    Case,
    OneWeight,
    config,
    engine_for,
    shared_folder,
)

LAST = WORLD_SIZE - 1
SGD = {"type": "SGD", "params": {"lr": 1e-4}}
Feed = Callable[[Engine, int], None]


class RootOfZero(torch.nn.Module):
    """The loss is 1 and its gradient nan: 0 times the infinite slope of a root at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x.to(self.w.dtype)).float().sqrt().sum() + 1


def number(value: float, *, bad: float = 0.0, at: int = -1) -> Feed:
    """``value`` every step; ``bad`` on the last rank at step ``at`` (from 1)."""

    def feed(engine: Engine, step: int) -> None:
        x = bad if step == at and RANK == LAST else value
        engine.backward(engine(torch.tensor([x])))

    return feed


def root_from(first: int) -> Feed:
    """Nothing is wrong before step ``first``; from there on no loss scale is small enough (RootOfZero)."""

    def feed(engine: Engine, step: int) -> None:
        engine.backward(engine(torch.tensor([0.0 if step >= first else float(step)])))

    return feed


def loss_alone(engine: Engine, step: int) -> None:
    """At step 2 the last rank's loss is nan, though its gradient is not."""
    nan = math.nan if step == 2 and RANK == LAST else 0.0
    engine.backward(engine(torch.tensor([1.0])) + nan)


def watched(
    settings: dict[str, Any], feed: Feed, *, steps: int, model: torch.nn.Module | None = None, **more: Any
) -> dict[str, Any]:
    """Run ``steps`` steps; what the watch told by event and on stderr, and how it stopped."""
    events: list[dict[str, Any]] = []
    error: dict[str, Any] | None = None
    done = 0
    with (
        engine_for(
            OneWeight(start=1.0) if model is None else model,
            settings,
            on_event=lambda kind, **fields: events.append({"kind": kind, **fields}),
            **{"watch": {}, **more},
        ) as engine,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        for step in range(1, steps + 1):
            feed(engine, step)
            try:
                engine.step()
            except Diverged as caught:
                error = {"verdict": caught.verdict, "step": caught.step, "message": caught.message,
                         "hint": caught.hint, "exit_code": caught.exit_code,
                         "culprit": caught.culprit}  # fmt: skip
                break
            done += 1
    return {"events": events, "error": error, "steps": done, "said": said.getvalue().splitlines()}


def fp16(stage: int = 2, **keys: Any) -> dict[str, Any]:
    scale = {"initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1, **keys}
    return config(stage, "fp16", optimizer=SGD, fp16=scale)


def with_files() -> dict[str, Any]:
    folder = Path(shared_folder())
    settings = fp16(initial_scale_power=2, min_loss_scale=2)
    result = watched(settings, number(60000.0), steps=9, run_dir=folder / "mine")
    torch.distributed.barrier()
    files = {path.name for path in (folder / "mine").iterdir()}
    diagnosis = json.loads((folder / "mine" / "diagnosis.json").read_text())
    kinds = [json.loads(line)["kind"] for line in (folder / "mine" / "events.jsonl").read_text().splitlines()]
    diagnosed = diagnose([str(folder / "mine")]).to_json()
    torch.distributed.barrier()
    if RANK == 0:
        shutil.rmtree(folder)
    return {
        **result, "files": sorted(files), "kinds": kinds, "diagnosis": diagnosis, "diagnosed": diagnosed,
    }  # fmt: skip


def all_cases() -> dict[str, Case]:
    tame = {**fp16(2, loss_scale_window=12)}
    bf16 = config(2, "bf16", optimizer=SGD)
    still = config(2, "bf16", optimizer={"type": "SGD", "params": {"lr": 0.0}})
    cases: dict[str, Case] = {
        "watch/descent": lambda: watched(fp16(), number(1000.0), steps=4),
        "watch/saw-tooth": lambda: watched(tame, number(1000.0), steps=45),
        "watch/forward": lambda: watched(bf16, number(1.0, bad=math.nan, at=3), steps=5),
        "watch/forward-let-pass": lambda: watched(
            bf16, number(1.0, bad=math.inf, at=3), steps=5, watch={"max_nonfinite_losses_in_a_row": 2}
        ),
        "watch/loss-alone": lambda: watched(bf16, loss_alone, steps=5),
        "watch/persistent": lambda: watched(
            bf16, number(0.0), steps=9, model=RootOfZero(), watch={"max_skipped_in_a_row": 3}
        ),
        "watch/persistent-static": lambda: watched(
            fp16(loss_scale=256), number(60000.0), steps=9, watch={"max_skipped_in_a_row": 3}
        ),
        "watch/persistent-dynamic": lambda: watched(
            fp16(hysteresis=2), root_from(3), steps=9, model=RootOfZero(), watch={"max_skipped_in_a_row": 4}
        ),
        "watch/persistent-at-start": lambda: watched(
            fp16(), root_from(1), steps=9, model=RootOfZero(), watch={"max_skipped_in_a_row": 4}
        ),
        "watch/silence": lambda: watched(still, number(1.0), steps=8, model=OneWeight(start=0.0)),
        "watch/off": lambda: watched(bf16, number(1.0, bad=math.nan, at=1), steps=3, watch=None),
        "watch/limit": lambda: _refused(watch={"max_skiped_in_a_row": 3}),
        "watch/limit-0": lambda: _refused(watch={"max_skipped_in_a_row": 0}),
        "watch/files": with_files,
    }
    for stage in (1, 2, 3):
        cases[f"watch/one-rank/{stage}"] = lambda s=stage: watched(
            fp16(s, hysteresis=2), number(1.0, bad=60000.0, at=2), steps=4
        )
    cases["watch/one-rank/0"] = lambda: watched(
        config(0, optimizer=SGD), number(1.0, bad=0.0, at=2), steps=4, model=RootOfZero()
    )
    cases["watch/moves"] = lambda: watched(
        fp16(hysteresis=2, loss_scale_window=2), number(1.0, bad=60000.0, at=1), steps=5
    )
    return cases


def _refused(**more: Any) -> str:
    try:
        with engine_for(OneWeight(), config(1), **more):
            return "accepted"
    except Exception as error:
        return f"{type(error).__name__}: {error}; {getattr(error, 'hint', '')}"
