"""What the ranks of the engine tests have in common: models, configs, and how cases are run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dslaunch.train.engine import Engine, initialize

Case = Callable[[], Any]

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
STAGES = (0, 1, 2, 3)

VOCABULARY, HIDDEN = 13, 5  # odd sizes: flattened partitions need padding
SAMPLES = [  # (ids, targets); 23 supervised tokens, ragged
    ([1, 2, 3, 4, 5], [-100, -100, 4, 5, 0]),
    ([6, 7], [-100, 8]),
    ([8, 9, 10, 11, 12, 0, 1], [9, 10, 11, 12, 0, 1, 2]),
    ([3], [7]),
    ([4, 4, 4, 4], [-100, 4, 4, 4]),
    ([0, 5, 11], [-100, -100, -100]),
    ([2, 12, 6, 8, 1, 10], [-100, 6, 8, 1, 10, 3]),
    ([9, 7, 5], [7, 5, 9]),
]


class TinyLM(torch.nn.Module):
    """The model of tests/oracles/linear_softmax.py."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)
        self.dropout = torch.nn.Dropout(dropout)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.dropout(self.embedding(ids)))
        return logits


class OneWeight(torch.nn.Module):
    """loss = sum(w * x): its gradient is x itself. ``start`` and ``size`` of w."""

    def __init__(self, size: int = 1, start: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((size,), start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x.to(self.w.dtype)).sum()


def config(
    stage: int,
    precision: str = "fp32",
    *,
    micro: int = 1,
    accumulation: int = 1,
    clipping: float = 0.0,
    optimizer: dict[str, Any] | None = None,
    **blocks: Any,
) -> dict[str, Any]:
    """A DeepSpeed config for the CPU: SGD with lr 1, so that an update is minus the gradient.

    ``blocks`` are merged in one level deep, e.g. ``fp16={"hysteresis": 1}``.
    """
    value: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": optimizer if optimizer is not None else {"type": "SGD", "params": {"lr": 1.0}},
        "steps_per_print": 2**31 - 1,
    }
    if precision != "fp32":
        value[precision] = {"enabled": True}
    for name, block in blocks.items():
        value[name] = {**value.get(name, {}), **block}
    return value


@contextlib.contextmanager
def engine_for(model: torch.nn.Module, settings: dict[str, Any], **more: Any) -> Iterator[Engine]:
    """An engine of ours, taken down afterwards. It is not watched: these losses may be inf."""
    more = {"watch": None, "on_note": lambda text: None, **more}
    engine = initialize(model, settings, allow_emulated_fp16=True, **more)
    try:
        yield engine
    finally:
        engine.deepspeed.destroy()


@contextlib.contextmanager
def bare_deepspeed(model: torch.nn.Module, settings: dict[str, Any], **more: Any) -> Iterator[Any]:
    """DeepSpeed's own engine without any cure (but with fp16 permitted on the CPU)."""
    import deepspeed

    from dslaunch.train.dist import init_world
    from dslaunch.train.engine.cures import permit_emulated_fp16

    init_world()
    permit_emulated_fp16()
    engine = deepspeed.initialize(
        model=model, config=settings, model_parameters=list(model.parameters()), **more
    )[0]
    try:
        yield engine
    finally:
        engine.destroy()


def shared_folder() -> str:
    """A new temporary directory that all ranks see. Collective."""
    name = [tempfile.mkdtemp(prefix="cases-") if RANK == 0 else None]
    torch.distributed.broadcast_object_list(name, src=0)
    assert name[0] is not None
    return name[0]


def step_once(engine: Engine, value: float) -> Any:
    """One micro-batch whose gradient is ``value``, then step()."""
    engine.backward(engine(torch.tensor([value])))
    return engine.step()


def master(parameter: torch.nn.Parameter) -> list[float]:
    """The fp32 value that the optimizer holds, whole, on every rank."""
    from deepspeed.utils import safe_get_full_fp32_param

    value = safe_get_full_fp32_param(parameter)
    value = parameter if value is None else value
    flat: list[float] = value.detach().double().flatten().tolist()
    return flat


def gradient(parameter: torch.nn.Parameter) -> list[float]:
    """The reduced gradient, whole, on every rank; valid after the last backward of a window."""
    from deepspeed.utils import safe_get_full_grad

    value = safe_get_full_grad(parameter)
    assert value is not None
    flat: list[float] = value.detach().double().flatten().tolist()
    return flat


def run_cases(cases: dict[str, Case], out_dir: Path, rank: int) -> None:
    """Run every case and write its result, or its traceback, to ``out_dir/rank-N.json``.

    Every rank runs every case in the same order. A case that fails on all ranks alike
    does not stop the ones after it.
    """
    results: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            results[name] = {"value": case()}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(f"case {name} failed:\n{results[name]['error']}", file=sys.stderr)
        (out_dir / f"rank-{rank}.json").write_text(json.dumps(results))
