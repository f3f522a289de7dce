"""What a checkpoint will take on the disk, and one rank's generators."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dslaunch.core.checkpoint_manifest import MANIFEST, FileEntry, Manifest
from dslaunch.train.checkpoint.rng import load_rng, save_rng
from dslaunch.train.checkpoint.save import expected_bytes


def test_the_next_one_takes_what_the_last_did_else_what_is_trained_with_masters_and_moments(
    tmp_path: Path,
) -> None:
    layer: Any = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    layer.bias.requires_grad_(False)
    engine: Any = SimpleNamespace(module=layer)
    assert expected_bytes(engine, tmp_path) == 6 * (2 + 4 + 4 + 4)
    (tmp_path / "step-2").mkdir()
    files = {"a": FileEntry(size=3, sha256=""), "b": FileEntry(size=4, sha256="")}
    last = Manifest(
        step=2, world_size=1, zero_stage=1, precision="bf16", deepspeed_version="", trainable_only=True,
        trainable={}, extra={}, files=files,
    )  # fmt: skip
    (tmp_path / "step-2" / MANIFEST).write_text(json.dumps(last.to_json()))
    assert expected_bytes(engine, tmp_path) == 7


def test_generators_go_on_also_in_the_middle_of_a_pair(tmp_path: Path) -> None:
    """Both normal distributions draw two at a time and keep the second."""

    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))]

    random.seed(0)
    np.random.seed(0)
    draw()
    save_rng(tmp_path, 3)
    expected = [draw(), draw()]
    load_rng(tmp_path, 3)
    assert [draw(), draw()] == expected
