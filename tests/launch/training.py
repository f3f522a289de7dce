"""A small training run in the working directory, for tests of the ways to reach hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.support.plans import read_rows, write_questions
from tests.support.tiny import make_tiny_model_dir

RUN: dict[str, Any] = {
    "seed": 7,
    "model": "./model",
    "data": {"train": "train.jsonl", "max_length": 128},
    "adapter": {"type": "lora", "r": 4},
    "precision": "fp32",
    "zero_optimization": {"stage": 2},
    "optimizer": {"lr": 1e-2},
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "cluster": {"gpu": "cpu"},
    "max_steps": 3,
}


def make_run(folder: Path) -> None:
    """run.yaml, its model and its data."""
    make_tiny_model_dir(folder / "model")
    write_questions(folder / "train.jsonl", 16)
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))


def losses(run_dir: str) -> list[float]:
    """Of each step."""
    return [row["loss"] for row in read_rows(Path(run_dir, "metrics.jsonl"), "train")]
