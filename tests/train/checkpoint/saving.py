"""What the cases of the checkpoint tests have in common: runs that train and save."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dslaunch.train import dist
from dslaunch.train.checkpoint import save_checkpoint
from dslaunch.train.engine import Engine
from tests.train.rank_cases import RANK, config

OUT = Path(sys.argv[1])
ADAMW = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}


def settings(stage: int, precision: str) -> dict[str, Any]:
    scale = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    blocks: dict[str, Any] = {"fp16": scale} if precision == "fp16" else {}
    if precision == "bf16-accum32":
        precision, blocks = "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}
    return config(stage, precision, accumulation=2, clipping=1.0, optimizer=ADAMW, **blocks)


def error_of(action: Callable[[], Any]) -> str:
    try:
        return f"returned {action()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def on_rank_0(action: Callable[[], Any]) -> None:
    """Do something to the files, with all ranks waiting before and after."""
    dist.barrier("before")
    if RANK == 0:
        action()
    dist.barrier("after")


def two_saved(name: str, engine: Engine) -> Path:
    """A root with step-1 (weight -1) and step-2 (weight -2)."""
    root = OUT / name
    for step in (1, 2):
        engine.backward(engine(torch.tensor([1.0])))
        engine.step()
        save_checkpoint(engine, root, step, extra={"step": step})
    return root


def shard(root: Path, rank: int) -> Path:
    (found,) = (root / "step-2").glob(f"*zero_pp_rank_{rank}_*optim_states.pt")
    return found
