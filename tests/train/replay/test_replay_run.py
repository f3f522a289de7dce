"""A run that ends for nan keeps its last step: traced there, replayed, reached again from a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dslaunch.cli.main import main
from dslaunch.core.plan import RunPlan, WatchPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.launch.record import hold_run_dir
from dslaunch.train.data.order import seeded_permutation
from tests.support.plans import LORA, make_plan, read_rows, save_plan, write_questions
from tests.support.ranks import check_ranks, run_ranks
from tests.support.tiny import make_tiny_model_dir, make_tiny_tokenizer
from tests.train.conftest import FinishedRuns

SCRIPT = Path(__file__).with_name("rank_run.py")
STEP, PLACE = 3, 21  # of the 24 samples, 8 a step: in rank 0's second micro-batch
RARE = "€"
EMBEDDING = "base_model.model.model.embed_tokens"


class BrokenRun:
    """``plan``, ``sample`` that breaks it, what rank 0 said and what each way of replaying it found."""

    def __init__(self, plan: RunPlan, sample: int, said: str, results: dict[str, Any]) -> None:
        self.plan, self.sample, self.said, self.results = plan, sample, said, results
        self.run_dir = RunDir(Path(plan.launch.run_dir))


@pytest.fixture(scope="module")
def broken_run(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> BrokenRun:
    root = tmp_path_factory.mktemp("broken-run")
    sample = int(seeded_permutation(24, 7, "epoch", 0)[PLACE])
    data = write_questions(root / "train.jsonl")
    lines = data.read_text().splitlines()
    lines[sample] = lines[sample].replace(f"number {sample}.", RARE)
    data.write_text("\n".join(lines) + "\n")
    plan = make_plan(
        root, _model(root / "model"), data, max_steps=9, zero_stage=3, precision="bf16",
        adapter=replace(LORA, lora_dropout=0.2), output={"save_steps": 1},
    )  # fmt: skip
    launch = replace(plan.launch, argv=(sys.executable, *plan.launch.argv[1:]))
    plan = replace(plan, watch=WatchPlan(on_nonfinite="trace"), launch=launch)
    results = run_ranks([SCRIPT, save_plan(plan), root], world_size=2, timeout_s=240)
    check_ranks(results)
    return BrokenRun(plan, sample, results[0].stdout, json.loads((root / "results.json").read_text()))


def _model(path: Path) -> Path:
    """inf in the embedding of a byte that one sample alone has."""
    file = make_tiny_model_dir(path, tie=False) / "model.safetensors"
    tensors = load_file(file)
    rare = min(make_tiny_tokenizer()(RARE)["input_ids"])
    tensors["model.embed_tokens.weight"][rare, 0] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_the_run_says_how_to_go_on(broken_run: BrokenRun) -> None:
    ended = broken_run.results["diverged"]
    assert "step 3 has loss nan on rank 0" in ended["message"]
    assert f"dslaunch replay {broken_run.run_dir.path} names the module, rank and samples" in ended["hint"]
    diagnosis = json.loads(broken_run.run_dir.diagnosis.read_text())
    assert "dslaunch replay" in diagnosis["advice"]
    kept, traced = (
        read_rows(broken_run.run_dir.events, f"nonfinite_{what}")[0] for what in ("kept", "traced")
    )
    assert kept["step"] == traced["step"] == STEP and kept["weights"] is True
    assert EMBEDDING in traced["message"]
    assert "looking for the first module" in broken_run.said


@pytest.mark.parametrize("way", ["traced", "kept", "reached"])
def test_the_sample_is_named_with_its_line(broken_run: BrokenRun, way: str) -> None:
    report = broken_run.results[way]
    (finding,) = report["findings"]
    assert (finding["rank"], finding["micro_batch"], finding["module"]) == (0, 1, EMBEDDING)
    assert finding["parameter"] == f"{EMBEDDING}.weight"
    (sample,) = finding["samples"]
    assert sample["where"] == f"{broken_run.plan.data.train[0].path}:{broken_run.sample + 1}"
    assert report["step"] == STEP


def test_each_way_has_the_weights_and_the_dropout_of_that_step(broken_run: BrokenRun) -> None:
    """To the last bit, at stage 3: in the run itself, with the kept weights, from the checkpoint before."""
    losses = [broken_run.results[way]["losses"] for way in ("traced", "kept", "reached")]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][0][1] == "nan" and all(isinstance(loss, float) for loss in losses[0][1])


def test_the_command_replays_a_run_that_was_moved_without_its_data(
    broken_run: BrokenRun, ops_dir: Path
) -> None:
    """From the micro-batches that were kept: neither the data nor its tokens are there."""
    home, data = broken_run.run_dir.path, Path(broken_run.plan.data.train[0].path)
    moved = home.rename(home.with_name("moved run"))
    gone = [path.rename(path.with_name(f"{path.name} gone")) for path in (data, home.parent / "tokens")]
    argv = [sys.executable, "-m", "dslaunch", "replay", str(moved), "--json", "--via", "local"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=os.environ)
    assert not home.exists()
    moved.rename(home)
    for path in gone:
        path.rename(path.with_name(path.name.removesuffix(" gone")))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["losses"] == broken_run.results["traced"]["losses"]
    assert report["findings"][0]["module"] == EMBEDDING
    assert json.loads((home / "replays/step-3/report.json").read_text()) == report
    assert "Traceback" not in done.stderr


def test_a_step_that_went_well_is_reached_and_has_no_culprit(broken_run: BrokenRun, ops_dir: Path) -> None:
    argv = [sys.executable, "-m", "dslaunch", "replay", str(broken_run.run_dir.path), "--step", "2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 1, done.stderr
    assert "nothing went inf or nan this time" in done.stdout
    assert "resuming at step 1 of 9" in done.stderr and "failed" not in done.stderr


def test_a_dry_run_shows_the_ranks_and_writes_nothing(
    broken_run: BrokenRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = broken_run.run_dir.path
    before = sorted(run_dir.rglob("*"))
    assert main(["replay", str(run_dir), "--dry-run", "--detect-anomaly", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (host,) = shown["hosts"]
    assert [rank["rank"] for rank in host["ranks"]] == [0, 1]
    report = host["argv"][host["argv"].index("--report") + 1]
    plan = str(run_dir / "plan.json")
    words = ["--plan", plan, "--step", "3", "--report", report, "--detect-anomaly"]
    assert host["argv"] == [sys.executable, "-m", "dslaunch.train.replay.worker", *words]
    assert sorted(run_dir.rglob("*")) == before and not Path(report).parent.exists()


def test_other_hosts_have_as_many_slots(
    broken_run: BrokenRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=3\n")
    assert main(["replay", str(broken_run.run_dir.path), "--hostfile", str(hosts)]) == 2
    error = capsys.readouterr().err
    assert "a step is replayed by as many ranks as the run had, 2, and there are 3 slots" in error
    assert "--via local starts 2 ranks on this machine" in error


def test_a_run_that_goes_on_is_not_replayed(
    broken_run: BrokenRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_run_dir(broken_run.run_dir.path):
        assert main(["replay", str(broken_run.run_dir.path)]) == 2
    assert "is still going on" in capsys.readouterr().err


def test_diagnose_points_to_it(broken_run: BrokenRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(broken_run.run_dir.path), "--json"]) == 1
    worst = json.loads(capsys.readouterr().out)["verdicts"][0]
    assert worst["name"] == "forward_nonfinite"
    assert worst["next"].startswith("traced: rank 0, micro-batch 1: first in the forward, in " + EMBEDDING)
    assert f"all of it is in {broken_run.run_dir.nonfinite}/step-{STEP}/report.json. Then " in worst["next"]


def test_a_run_that_went_well_keeps_nothing(finished_runs: FinishedRuns) -> None:
    for name in finished_runs.plans:
        assert not RunDir(finished_runs.run_dir(name)).nonfinite.exists()


def test_replay_of_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "holds no run: there is no plan.json in it" in capsys.readouterr().err
    own = tmp_path / "nonfinite" / "step-4"
    own.mkdir(parents=True)
    (own / "window.json").write_text("{}")
    assert main(["replay", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is the run_dir of a loop of your own: dslaunch cannot build its model" in said
    assert f"replay(engine, '{own}')" in said


def test_replay_of_a_run_that_kept_nothing(
    finished_runs: FinishedRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = finished_runs.run_dir("s2-full")
    assert main(["replay", str(run_dir)]) == 2
    assert "--step N runs step N again" in capsys.readouterr().err
    assert not (run_dir / "replays").exists()
