"""`dslaunch launch` as a command: what it starts, shows and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.cli.main import main
from tests.cli.launching import HELLO, dslaunch, record


def test_the_run_directory(tmp_path: Path) -> None:
    done = dslaunch("--num-gpus-per-node", "2", command=HELLO, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0\n"
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"run directory {run_dir}\n" in done.stderr
    assert {path.name for path in run_dir.iterdir()} == {
        ".lock", "plan.json", "hostfile", "launch.sh", "logs", "checkpoints", "events.jsonl",
    }  # fmt: skip


def test_runs_of_the_same_second_get_directories_of_their_own(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "dslaunch", "launch", "--num-gpus-per-node", "1", "--", "true"]
    started = [subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.DEVNULL) for _ in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_dry_run_shows_the_object_and_writes_nothing(tmp_path: Path) -> None:
    argv = ("--num-gpus-per-node", "2", "--env", "A=b c", "--env", "HF_TOKEN", "--dry-run")
    command = ("--", "echo", "it's", "$HOME")
    shown = dslaunch(*argv, command=command, cwd=tmp_path, HF_TOKEN="s3cret")
    assert shown.returncode == 0, shown.stderr
    assert """  echo 'it'"'"'s' '$HOME'\n""" in shown.stdout
    assert "  A='b c'\n" in shown.stdout
    as_json = dslaunch(*argv, "--json", command=command, cwd=tmp_path, HF_TOKEN="s3cret")
    value = json.loads(as_json.stdout)
    assert value["schema_version"] == 1
    assert value["plan"]["launch"]["argv"] == ["echo", "it's", "$HOME"]
    assert [rank["env"]["RANK"] for rank in value["hosts"][0]["ranks"]] == ["0", "1"]
    assert "s3cret" not in shown.stdout + shown.stderr + as_json.stdout + as_json.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("via", "words"),
    [
        ("ssh", ["ssh", "-T", "-o", "BatchMode=yes"]),
        ("openmpi", ["mpirun", "-np", "1", "--bind-to", "none", "--host", "a.invalid", "/bin/sh", "-c"]),
        ("mpich", ["mpiexec.hydra", "-genvnone"]),
        ("pdsh", ["pdsh", "-S", "-N", "-f", "1", "-t", "15", "-w", "a.invalid"]),
    ],
)
def test_a_dry_run_shows_what_starts_each_agent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    via: str,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ssh", "mpirun", "mpiexec.hydra", "pdsh"):
        (tmp_path / name).write_text("#!/bin/sh\necho run >> ran\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("hosts").write_text("a.invalid slots=1\nb.invalid slots=1\n")
    options = ["launch", "--hostfile", "hosts", "--gpu", "cpu", "--via", via, "--dry-run"]
    assert main([*options, "--json", "--", "true"]) == 0
    first, second = json.loads(capsys.readouterr().out)["commands"]
    assert first["argv"][: len(words)] == words
    assert (first["host"], second["host"]) == ("a.invalid", "b.invalid")
    assert "b.invalid" in second["argv"]
    assert main([*options, "--", "true"]) == 0
    assert f" {' '.join(words)} " in capsys.readouterr().out
    assert not Path("ran").exists()


def test_a_dry_run_of_many_hosts_takes_no_open_files(tmp_path: Path) -> None:
    """The launch that it tells of would."""
    lines = [f"node{i} slots={2 if i == 150 else 1}\n" for i in range(199)] + ["bob@last slots=1\n"]
    (tmp_path / "hosts").write_text("".join(lines))
    words = [sys.executable, "-m", "dslaunch", "launch", "--hostfile", "hosts", "--gpu", "cpu"]
    limited = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *words]
    dry = subprocess.run([*limited, "--dry-run", "--", "true"], cwd=tmp_path, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    assert "note: 200 hosts take 728 open files here, and the limit is 256\n" in dry.stderr
    # Two hosts in full, the others in a line for all that are alike, with not a rank left out.
    assert dry.stdout.count("where the agent is started by") == 2
    assert dry.stdout.partition(" has the orders of each)\n\n")[2].splitlines() == [
        "  node2 to node149, 148 hosts by ssh: slots 0, ranks 2-149",
        "  node150 by ssh: slots 0,1, ranks 150-151",
        "  node151 to node198, 48 hosts by ssh: slots 0, ranks 152-199",
        "  last by ssh, user bob: slots 0, rank 200",
    ]
    real = subprocess.run([*limited, "--", "true"], cwd=tmp_path, capture_output=True, text=True)
    assert real.returncode == 3
    assert "200 hosts take 728 open files here, and the limit is 256; nothing was started" in real.stderr


def test_a_secret_reaches_the_rank_and_no_file(tmp_path: Path) -> None:
    code = (
        "import os; assert os.environ['HF_TOKEN'] == 's3' + 'cret' and os.environ['MY_API_KEY'] == 'k' + '3y'"
    )
    options = ("--num-gpus-per-node", "1", "--run-dir", "r", "--env", "HF_TOKEN", "--env", "MY_API_KEY=k3y")
    done = dslaunch(*options, command=("--", sys.executable, "-c", code), cwd=tmp_path, HF_TOKEN="s3cret")
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cret" in path.read_bytes() or b"k3y" in path.read_bytes()]
    assert json.loads((tmp_path / "r" / "plan.json").read_text())["launch"]["secret_env"] == [
        "HF_TOKEN", "MY_API_KEY",
    ]  # fmt: skip


def test_the_password_of_a_proxy_is_a_secret(tmp_path: Path) -> None:
    url, hostfile = "http://bob:s3cret@proxy:3128", tmp_path / "hosts"
    hostfile.write_text("198.51.100.1 slots=1\n198.51.100.2 slots=1\n")
    given = ("--env", f"MLFLOW_TRACKING_URI={url}", "--gpu", "cpu")
    there = ("--hostfile", str(hostfile), *given)
    shown = [
        dslaunch(*there, *more, command=("--", "true"), cwd=tmp_path, HTTPS_PROXY=url)
        for more in (
            ["--dry-run"],
            ["--dry-run", "--json"],
            ["--print-as", "deepspeed", "--run-dir", "d"],
            ["--print-as", "torchrun", "--run-dir", "t", "--json"],
        )
    ]
    code = "import os; assert os.environ['MLFLOW_TRACKING_URI'].endswith('3cret@proxy:3128')"
    shown.append(dslaunch(*given, "--run-dir", "r", command=("--", sys.executable, "-c", code), cwd=tmp_path))
    for done in shown:
        assert done.returncode == 0, done.stderr
        assert "s3cret" not in done.stdout + done.stderr
    assert "HTTPS_PROXY='(taken from the environment at start)'" in shown[0].stdout
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    secrets = json.loads((tmp_path / "r" / "plan.json").read_text())["launch"]["secret_env"]
    assert secrets == ["MLFLOW_TRACKING_URI"]


def test_json_is_one_object_on_stdout(tmp_path: Path) -> None:
    command = ("--", "bash", "-c", "echo said; exit $((RANK * 3))")
    done = dslaunch("--num-gpus-per-node", "2", "--json", "--run-dir", "r", command=command, cwd=tmp_path)
    value = json.loads(done.stdout)
    assert done.returncode == value["exit_code"] == 3
    assert value["first_failure"] == {"rank": 1, "host": "localhost", "code": 3}
    assert {rank["rank"] for rank in value["ranks"]} == {0, 1}
    assert "said" in done.stderr


def test_a_run_file_starts_our_worker(tmp_path: Path, run_file: Path) -> None:
    done = dslaunch("mine.yaml", "--run-dir", "r", "--env", "A=b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"-m dslaunch.train.worker --plan {tmp_path}/r/plan.json\n"
    plan = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert plan["launch"]["env"] == {"A": "b"}
    assert json.loads((tmp_path / "r" / "ds_config.json").read_text()) == plan["ds_config"]
    again = subprocess.run(["bash", tmp_path / "r" / "launch.sh", "--run-dir", "again"], cwd=tmp_path,
                           capture_output=True, text=True, timeout=60)  # fmt: skip
    assert again.stdout == f"-m dslaunch.train.worker --plan {tmp_path}/again/plan.json\n", again.stderr


def test_dry_run_of_a_run_file_writes_nothing(tmp_path: Path, run_file: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = dslaunch("mine.yaml", "--run-dir", "r", "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["plan"]["batch"]["train_batch_size"] == 4
    assert sorted(tmp_path.rglob("*")) == before


def test_one_slot_that_is_not_the_first(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    run_file.write_text(run_file.read_text().replace("num_gpus_per_node: 2, ", ""))
    options = ("--hostfile", "hosts", "--include", "localhost:2", "--run-dir", "r")
    done = dslaunch("mine.yaml", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "hostfile").read_text() == "localhost slots=2,\n"


def test_planning_and_launching_agree_on_what_this_machine_is(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.2 slots=2\n")
    run_file.write_text(run_file.read_text().replace(", gpu: cpu", ""))
    done = dslaunch("mine.yaml", "--hostfile", "hosts", "--run-dir", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r" / "plan.json").read_text())["launch"]["device_type"] == "cpu"


def test_the_last_line_of_a_training_run_is_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "my run").mkdir()
    record(tmp_path / "my run" / "r", "bash", "-c", 'mkdir -p "$DSLAUNCH_RUN_DIR/checkpoints/step-1"', "bash")
    done = dslaunch("--run-dir", "my run/r", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"next: dslaunch export '{tmp_path}/my run/r' -o DIR"
