"""A run file for the tests of `dslaunch launch`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run file whose "python" only prints what it is asked to run."""
    fake = tmp_path / "fake python"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "data.jsonl").write_text('{"text": "x"}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {path: ./model}\ndata: {train: data.jsonl}\noptimizer: {type: AdamW, lr: 0.001}\n"
        "max_steps: 3\ntrain_batch_size: 4\ncluster: {num_gpus_per_node: 2, gpu: cpu}\n"
        "launch: {python: ./fake python}\n"
    )
    return path
