"""Run by the ranks of test_weights.py: python -m tests.train.checkpoint.ranks_weights OUT_DIR."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from dslaunch.losses.sft import token_nll
from dslaunch.train.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from dslaunch.train.engine import Engine
from tests.train.rank_cases import Case, TinyLM, config, engine_for, run_cases

RANK = int(os.environ["RANK"])
OUT = Path(sys.argv[1])


def model(frozen: bool) -> TinyLM:
    made = TinyLM()
    made.embedding.requires_grad_(not frozen)
    return made


def loads(root: Path, engine: Engine) -> str:
    try:
        return f"loaded {load_checkpoint(engine, root)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def checked(stage: int, precision: str, frozen: bool) -> dict[str, Any]:
    """One step saved; loaded; loaded with its weights left out; and with one rank's left out."""
    root = OUT / f"{stage}-{precision}"
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    settings = config(stage, precision, optimizer=adam)
    with engine_for(model(frozen), settings) as engine:
        loss = token_nll(engine(torch.tensor([[1, 2, 3]])), torch.tensor([[2, 3, 4]]))
        engine.backward_token_sum(loss.sum, num_tokens=6)
        engine.step()
        path = save_checkpoint(engine, root, 1, extra={})
    with engine_for(model(frozen), settings) as engine:
        usual = loads(root, engine)
    found = {"usual": usual, "sums": len(read_manifest(path).weight_sums)}
    for name, ranks in (("nothing", {0, 1}), ("on one rank", {1})):
        with engine_for(model(frozen), settings) as engine:
            if RANK in ranks:
                engine.deepspeed.load_checkpoint = lambda *_, **__: (str(path), {})
            # At stage 3 DeepSpeed meets the other ranks while it loads.
            found[name] = "" if ranks == {1} and stage == 3 else loads(root, engine)
    return found


def all_cases() -> dict[str, Case]:
    cells = [(0, "fp32", False), (1, "bf16", True), (2, "fp32", True), (3, "bf16", False), (3, "fp32", True)]
    return {
        f"{stage}/{precision}": lambda s=stage, p=precision, f=frozen: checked(s, p, f)  # type: ignore[misc]
        for stage, precision, frozen in cells
    }


if __name__ == "__main__":
    run_cases(all_cases(), OUT, RANK)
