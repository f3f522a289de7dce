"""Steps of a run from its data, and DeepSpeed's scheduler block for scripts of one's own."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.ds_scheduler import build_scheduler
from dslaunch.config.facts import PathFact
from dslaunch.config.length import RunLength, length_of_run
from dslaunch.core.errors import ConfigError
from tests.config.build import plan_of


def length(tmp_path: Path, lines: int, *overrides: str, name: str = "d.jsonl") -> RunLength:
    path = tmp_path / name
    with (gzip.open if name.lower().endswith(".gz") else open)(path, "wb") as stream:
        stream.write(b"{}\n\n" * (lines - 1) + b"{}" if lines else b"\n")
    text = f"model: org/model\ndata: {{train: {name}}}\ntrain_batch_size: 8\ncluster: {{gpu: cpu}}\n"
    there = {"data.train[0].path": PathFact("file", str(path))}
    return length_of_run(plan_of(text, *overrides, paths=there))


@pytest.mark.parametrize(
    ("lines", "overrides", "total", "warmup"),
    [
        (100, (), 13, 1),
        (100, ("num_train_epochs=2.5",), 32, 1),
        (100, ("num_train_epochs=2.5", "scheduler.warmup_ratio=0.1"), 32, 4),
        (3, (), 1, 1),  # one step, filled up with empty rows
        (100, ("scheduler.warmup_steps=5",), 13, 5),
    ],
)
@pytest.mark.parametrize("name", ["d.jsonl", "D.NDJSON.GZ"])
def test_steps_are_counted_in_the_data(
    tmp_path: Path, name: str, lines: int, overrides: tuple[str, ...], total: int, warmup: int
) -> None:
    found = length(tmp_path, lines, *overrides, name=name)
    assert (found.total_steps, found.warmup_steps, found.exact) == (total, warmup, False)
    assert f"{lines} samples x " in found.reason
    assert found.warmup_reason.startswith("scheduler.warmup_")
    assert "dropped for their length" in found.reason
    packed = length(tmp_path, lines, *overrides, "data.packing=true", name=name)
    assert packed.total_steps == total
    assert "at most: packing" in packed.reason


def test_max_steps_is_exact_whatever_the_data(tmp_path: Path) -> None:
    assert length(tmp_path, 3, "max_steps=200") == RunLength(
        200, 6, True, "max_steps", "scheduler.warmup_ratio 0.03 x 200 steps, rounded up"
    )


def test_data_that_is_not_counted(tmp_path: Path) -> None:
    found = length(tmp_path, 3, name="d.parquet")
    assert (found.total_steps, found.warmup_steps) == (None, None)
    assert "once the data is tokenised" in found.reason
    assert length(tmp_path, 3, "scheduler.warmup_steps=2", name="d.json").warmup_steps == 2


def test_a_run_without_a_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sample to train on"):
        length(tmp_path, 0)
    with pytest.raises(ConfigError, match="warmup_steps 14 is more than the 13 steps"):
        length(tmp_path, 100, "scheduler.warmup_steps=14")
    for longer in ((3, "max_steps=10"), (80,)):  # ten steps, as said and as counted
        with pytest.raises(ConfigError, match="6 of decay are more than the 10 steps"):
            length(tmp_path, *longer, "scheduler={type: wsd, warmup_steps: 5, decay_steps: 6}")


def block(**flags: Any) -> dict[str, Any]:
    return build_scheduler(flags, lr=0.5, train_batch_size=64)


def test_the_blocks() -> None:
    assert block(scheduler="linear", num_samples=1000, num_train_epochs=3.0) == {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": 47,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 0.5,
            "warmup_num_steps": 2,
            "warmup_type": "linear",
        },
    }
    cosine = block(scheduler="cosine", max_steps=100, warmup_ratio=0.1)["params"]
    assert (cosine["total_num_steps"], cosine["warmup_num_steps"]) == (100, 10)
    assert "total_num_steps" not in block(scheduler="constant", max_steps=100)["params"]
    assert block(scheduler="linear", num_samples=640)["params"]["total_num_steps"] == 10


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_deepspeed_makes_the_schedule_that_is_meant(kind: str) -> None:
    import torch
    from deepspeed.runtime import lr_schedules

    made = block(scheduler=kind, max_steps=20, warmup_steps=4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = getattr(lr_schedules, made["type"])(optimizer, **made["params"])
    rates = []
    for _ in range(20):
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates[:4] == pytest.approx([0, 0.125, 0.25, 0.375])
    assert max(rates[4:]) == pytest.approx(0.5, rel=0.01)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert (rates[-1] < 0.05) == (kind != "constant")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"num_samples": 3}, "--num-samples is for the scheduler block"),
        ({"scheduler": "linear"}, "how many steps the training has is not said"),
        ({"scheduler": "linear", "num_samples": 9}, "9 samples x 1 epoch are fewer than"),
        ({"scheduler": "linear", "num_samples": 640, "num_train_epochs": 0.05}, "640 samples x 0.05 epochs"),
        ({"scheduler": "linear", "num_samples": 640, "num_train_epochs": 0.0}, "num_train_epochs is 0.0"),
        ({"scheduler": "linear", "num_samples": 640, "num_train_epochs": float("nan")}, "is nan"),
        ({"scheduler": "linear", "max_steps": 9, "num_samples": 9}, "--max-steps and --num-samples"),
        ({"scheduler": "linear", "max_steps": 9, "warmup_steps": 10}, "10 is more than the 9 steps"),
        ({"scheduler": "linear", "max_steps": 9, "warmup_steps": 9}, "9 steps in all are not more than 9"),
        ({"scheduler": "cosine", "max_steps": 1}, "1 step in all is not more than 2 of warm-up"),
        ({"scheduler": "cosine", "max_steps": 2}, "2 steps in all are not more than 2 of warm-up"),
        ({"scheduler": "cosine", "max_steps": 9, "warmup_steps": 1, "warmup_ratio": 0.1}, "are both"),
    ],
)  # fmt: skip
def test_lengths_that_make_no_schedule(flags: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        block(**flags)
    assert part in caught.value.message
