"""`dslaunch launch` of a run that was there before: resumed in place, or started anew beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.launching import HELLO, dslaunch, error_of, record
from tests.support.plans import make_plan


def test_resuming_a_command(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--run-dir", "r")
    assert dslaunch(*options, command=HELLO, cwd=tmp_path).returncode == 0
    assert dslaunch(*options, "--resume", command=HELLO, cwd=tmp_path).returncode == 0
    log = (tmp_path / "r" / "logs" / "rank-0.log").read_text()
    assert re.fullmatch(r"rank 0\n\n\[dslaunch: started anew 20\S+Z\]\nrank 0\n", log), log
    text = error_of(dslaunch(*options, "--resume", command=("--", "true"), cwd=tmp_path))
    assert "the run of another command" in text
    text = error_of(
        dslaunch("--num-gpus-per-node", "1", "--run-dir", "no", "--resume", command=HELLO, cwd=tmp_path)
    )
    assert "no run to resume" in text


def test_a_recorded_plan_starts_anew_beside_it(tmp_path: Path) -> None:
    plan = record(tmp_path / "old", "bash", "-c", 'echo "$@"', "bash", "--plan", f"{tmp_path}/old/plan.json")
    done = dslaunch("--plan", str(plan), cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    (new,) = [path for path in tmp_path.iterdir() if path.name != "old"]
    assert new.name.startswith("tiny-")
    assert done.stdout == f"--plan {new}/plan.json\n"
    assert (new / "ds_config.json").exists()


def test_a_recorded_training_run_is_resumed_in_place(tmp_path: Path) -> None:
    plan = record(tmp_path / "old", "bash", "-c", 'echo "$@"', "bash", "--plan", f"{tmp_path}/old/plan.json")
    (tmp_path / "old").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / plan.name
    done = dslaunch("--plan", str(moved), "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"--plan {moved} --resume\n"
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_run_directory_is_enough_to_resume(tmp_path: Path) -> None:
    record(tmp_path / "r", "bash", "-c", 'echo "$@"', "bash")
    done = dslaunch("--run-dir", "r", "--resume", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "--resume\n"), done.stderr
    again = dslaunch("--plan", "r", "--dry-run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("options", [(), ("--resume",), ("--dry-run",)])
def test_what_a_recorded_plan_names_and_is_gone(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "model").mkdir()
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "a"}\n')
    plan = make_plan(tmp_path, tmp_path / "model", data)
    file = record(tmp_path / "r", "true", model=plan.model, data=plan.data)
    assert dslaunch("--plan", str(file), "--dry-run", cwd=tmp_path).returncode == 0
    data.rename(tmp_path / "moved.jsonl")
    (tmp_path / "model").rmdir()
    before = sorted(tmp_path.rglob("*"))
    text = error_of(dslaunch("--plan", str(file), *options, cwd=tmp_path))
    assert f"model.path: {tmp_path}/model of the plan is not there any more" in text
    assert f"data.train[0].path: {data} of the plan is not there any more; nothing was started" in text
    assert sorted(tmp_path.rglob("*")) == before


def test_resuming_a_run_file(tmp_path: Path, run_file: Path) -> None:
    assert dslaunch("mine.yaml", "--run-dir", "r", cwd=tmp_path).returncode == 0
    done = dslaunch("mine.yaml", "--run-dir", "r", "--resume", "--set", "output.save_steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"-m dslaunch.train.worker --plan {tmp_path}/r/plan.json --resume\n"
    plan = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert plan["output"]["save_steps"] == 2
    assert "--resume" not in plan["launch"]["argv"]
    changed = dslaunch("mine.yaml", "--run-dir", "r", "--resume", "--set", "optimizer.lr=0.002", cwd=tmp_path)
    text = error_of(changed)
    assert "optimizer.lr: recorded 0.001, now 0.002" in text
    assert "nothing was started" in text


def test_resuming_a_run_file_needs_its_directory(tmp_path: Path, run_file: Path) -> None:
    assert dslaunch("mine.yaml", cwd=tmp_path).returncode == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    text = error_of(dslaunch("mine.yaml", "--resume", cwd=tmp_path))
    assert f"--run-dir {run_dir} is the newest run of mine" in text


def test_resume_proposes_the_newest_run(tmp_path: Path) -> None:
    for stamp in ("20260101T000000Z", "20260301T000000Z", "20260201T000000Z"):
        path = tmp_path / "runs" / f"train-{stamp}"
        path.mkdir(parents=True)
        (path / "plan.json").touch()
    (tmp_path / "runs" / "other-20270101T000000Z").mkdir()
    options = ("--num-gpus-per-node", "1", "--resume")
    text = error_of(dslaunch(*options, command=("--", "python", "train.py"), cwd=tmp_path))
    assert f"--run-dir {tmp_path}/runs/train-20260301T000000Z is the newest run of train" in text
