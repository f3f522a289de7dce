"""What checkpoints and exports take on disk: told by plan and launch, and true."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.disk_space import DiskSpace, _most_at_once, disk_line, disk_of_run, disk_warning
from dslaunch.cli.main import main
from dslaunch.cli.options import load_and_resolve
from dslaunch.core.plan import RunPlan

GIB = 2**30
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
# embedding and head; q, o, k, v; gate, up, down; two norms a layer; the last norm
NUMEL = 2 * 512 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64) + 64
LORA = 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))  # r x layers x (in + out)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "run.yaml").write_text(
        "model: ./model\ndata: {train: train.jsonl}\ntrain_batch_size: 8\nprecision: bf16\nmax_steps: 10\n"
    )


def plan(*set_: str) -> RunPlan:
    return load_and_resolve("run.yaml", set_=set_, run_dir="r")


def test_an_export_of_the_whole_model_has_the_dtype_of_the_run() -> None:
    disk = disk_of_run(plan())
    assert disk is not None
    assert (disk.export_bytes, disk.merged_export_bytes) == (2 * NUMEL, None)
    assert disk.checkpoint_bytes > 14 * NUMEL  # 2 bytes of the model, 12 of master weights and moments


def test_an_adapter_is_exported_in_fp32_or_merged() -> None:
    disk = disk_of_run(plan("adapter.r=4"))
    assert disk is not None
    assert (disk.export_bytes, disk.merged_export_bytes) == (4 * LORA, 2 * NUMEL)


@pytest.mark.parametrize(
    ("set_", "most"),
    [
        ((), 1),  # the one at the end
        (("output.save_steps=3",), 4),  # 3, 6, 9 and the end
        (("output.save_steps=5",), 2),
        (("output.save_steps=3", "output.save_total_limit=2"), 3),  # a new one beside those kept
        (("output.save_steps=5", "output.save_total_limit=2"), 2),
        (("num_train_epochs=1", "output.save_steps=3"), None),
        (("num_train_epochs=1", "output.save_steps=3", "output.save_total_limit=2"), 3),
        (("num_train_epochs=1",), 1),
    ],
)
def test_the_most_checkpoints_that_stand_there_together(set_: tuple[str, ...], most: int | None) -> None:
    assert _most_at_once(plan(*set_)) == most


def space(**changes: Any) -> DiskSpace:
    return dataclasses.replace(DiskSpace(10 * GIB, 3, 0, 29 * GIB, GIB, None), **changes)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, 30),
        ({"free_bytes": 30 * GIB}, None),
        ({"checkpoints_there": 2}, None),  # of before, when a run goes on
        ({"checkpoints_there": 3, "free_bytes": 9 * GIB}, 10),
        ({"checkpoints_at_once": None}, None),
        ({"checkpoints_at_once": None, "free_bytes": 9 * GIB}, 10),
        ({"checkpoints_at_once": 1, "free_bytes": 9 * GIB}, 10),
    ],
)
def test_a_warning_where_they_will_not_fit(changes: dict[str, Any], needed: int | None) -> None:
    warning = disk_warning(space(**changes))
    if needed is None:
        assert warning is None
        return
    assert warning is not None
    assert warning.startswith(f"the checkpoints will not fit: {needed}.00 GiB (10.00 GiB each) are needed")
    assert ("save_total_limit" in warning) == (changes.get("checkpoints_at_once", 3) != 1)


def test_the_line() -> None:
    assert disk_line(space()) == (
        "disk: 10.00 GiB a checkpoint, up to 3 at once; 1.00 GiB an export; 29.00 GiB free"
    )
    assert disk_line(space(checkpoints_at_once=None, merged_export_bytes=2 * GIB)) == (
        "disk: 10.00 GiB a checkpoint, all are kept; 1.00 GiB an export (2.00 GiB merged); 29.00 GiB free"
    )


def test_plan_and_launch_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("disk: ")
    assert "a checkpoint, one at the end;" in last
    assert main(["plan", "run.yaml", "--json"]) == 0
    disk = json.loads(capsys.readouterr().out)["disk"]
    assert disk["export_bytes"] == 2 * NUMEL
    assert main(["launch", "run.yaml", "--dry-run"]) == 0
    assert "disk: " in capsys.readouterr().err


def test_checkpoints_without_end_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    many = ["--set", "output.save_steps=1", "--set", "max_steps=1000000000000"]
    for argv in (["plan", "run.yaml"], ["launch", "run.yaml", "--dry-run"]):
        assert main([*argv, *many]) == 0
        assert "note: the checkpoints will not fit: " in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["{", "[]", "{}", None])
def test_a_model_that_cannot_be_read_is_left_to_the_ranks(tmp_path: Path, broken: str | None) -> None:
    whole = plan()
    if broken is None:
        (tmp_path / "model/config.json").unlink()
    else:
        (tmp_path / "model/config.json").write_text(broken)
    assert disk_of_run(whole) is None
    (tmp_path / "model/model.safetensors").write_bytes(b"\xff" * 100)
    assert disk_of_run(whole) is None
