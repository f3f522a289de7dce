"""launch refuses what this host certainly cannot hold, and only that."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dslaunch.cli.host_check import check_host_memory, host_memory_in_words
from dslaunch.cli.launch_request import LaunchRequest, resolve_request
from dslaunch.cli.main import main
from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.core.plan import RunPlan, load_run_plan
from tests.support.tiny import make_tiny_model_dir

RUN = """\
name: large
model: model
data: {train: train.jsonl}
train_batch_size: 2
train_micro_batch_size_per_gpu: 1
cluster: {num_gpus_per_node: 2, gpu: cpu}
precision: fp32
zero_optimization: {stage: 2}
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    make_tiny_model_dir(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"text": "a b c"}\n')
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def make_it_huge(model: Path) -> None:
    """The sizes of a model with 400 billion parameters: 7 TiB on two CPU ranks, more than any host here."""
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
    config |= {"num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128}
    (model / "config.json").write_text(json.dumps(config))
    for weights in model.glob("*.safetensors"):
        weights.unlink()


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_what_cannot_fit_is_refused_before_anything_is_there(
    here: Path, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    make_it_huge(here / "model")
    assert main(["launch", "run.yaml", *how]) == 3
    err = capsys.readouterr().err
    assert "this host cannot hold what the ranks keep between two steps: 7" in err
    assert "nothing was started" in err
    assert not (here / "runs").exists()


def test_offload_that_this_host_cannot_hold_is_refused(here: Path) -> None:
    make_it_huge(here / "model")
    offload = "zero_optimization: {stage: 3, offload_optimizer: cpu, offload_param: cpu}\n"
    text = RUN.replace("zero_optimization: {stage: 2}\n", offload).replace("gpu: cpu", "gpu: a100-80g")
    (here / "run.yaml").write_text(text)
    plan = resolve_request(LaunchRequest(run_file="run.yaml"))
    assert isinstance(plan, RunPlan)
    with pytest.raises(
        EnvironmentNotReady, match="cannot hold what is offloaded between two steps: "
    ) as caught:
        check_host_memory(plan)
    assert "nothing was started" in caught.value.message


def test_a_killed_rank_is_told_what_the_plan_takes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = here / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    offload = "zero_optimization: {stage: 2, offload_optimizer: cpu}\nlaunch: {python: ./killed}\n"
    (here / "run.yaml").write_text(RUN.replace("zero_optimization: {stage: 2}\n", offload))
    assert main(["launch", "run.yaml"]) == 137
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"  planned      \d+\.\d\d GiB of memory on the fullest host when \w+, 0\.00 GiB of it offloaded;"
        r" dslaunch plan shows the sum",
        last,
    )
    make_it_huge(here / "model")
    (plan,) = here.glob("runs/*/plan.json")
    words = host_memory_in_words(load_run_plan(plan))
    assert words is not None and "GiB of it offloaded" in words and "0.00 GiB" not in words


def test_what_fits_is_let_pass(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "run.yaml", "--dry-run"]) == 0
    assert "cannot hold" not in capsys.readouterr().err


def test_a_model_of_unknown_size_is_let_pass(here: Path) -> None:
    make_it_huge(here / "model")
    config = json.loads((here / "model/config.json").read_text())
    (here / "model/config.json").write_text(json.dumps({**config, "model_type": "novel"}))
    assert main(["launch", "run.yaml", "--dry-run"]) == 0


def test_other_hosts_are_not_judged_by_this_one(here: Path) -> None:
    make_it_huge(here / "model")
    (here / "hostfile").write_text("elsewhere-1 slots=2\n")
    assert main(["launch", "run.yaml", "--hostfile", "hostfile", "--dry-run"]) != 3
