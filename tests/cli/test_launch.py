"""`dslaunch launch` as a command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dslaunch.core.plan import to_json
from dslaunch.launch.record import hold_run_dir
from tests.launch.plans import run_plan

HELLO = ("--", sys.executable, "-S", "-c", "import os; print('rank', os.environ['RANK'])")


def dslaunch(
    *argv: str, cwd: Path, command: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dslaunch", "launch", *argv, *command],
        cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def error_of(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def record(run_dir: Path, *argv: str) -> Path:
    """A run directory with the plan of a training run whose ranks run ``argv``."""
    run_dir.mkdir()
    plan = run_plan(run_dir, argv=argv)
    (run_dir / "plan.json").write_text(json.dumps(to_json(plan)))
    return run_dir / "plan.json"


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


def test_json_is_one_object_on_stdout(tmp_path: Path) -> None:
    command = ("--", "bash", "-c", "echo said; exit $((RANK * 3))")
    done = dslaunch("--num-gpus-per-node", "2", "--json", "--run-dir", "r", command=command, cwd=tmp_path)
    value = json.loads(done.stdout)
    assert done.returncode == value["exit_code"] == 3
    assert value["first_failure"] == {"rank": 1, "host": "localhost", "code": 3}
    assert {rank["rank"] for rank in value["ranks"]} == {0, 1}
    assert "said" in done.stderr


def test_a_named_run_directory_is_never_another_one(tmp_path: Path, run_file: Path) -> None:
    name = "true-20260101T000000Z"  # as a default one would be
    options = ("--num-gpus-per-node", "1", "--run-dir", name)
    assert dslaunch(*options, command=("--", "true"), cwd=tmp_path).returncode == 0
    assert "exists already" in error_of(dslaunch(*options, command=("--", "true"), cwd=tmp_path))
    named = ("mine.yaml", "--set", "output.run_dir=mine-20260101T000000Z")
    assert dslaunch(*named, cwd=tmp_path).returncode == 0
    assert "exists already" in error_of(dslaunch(*named, cwd=tmp_path))
    assert dslaunch(*named, "--resume", cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in tmp_path.glob("*Z*")) == ["mine-20260101T000000Z", name]


def test_one_slot_that_is_not_the_first(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    run_file.write_text(run_file.read_text().replace("num_gpus_per_node: 2, ", ""))
    options = ("--hostfile", "hosts", "--include", "localhost:2", "--run-dir", "r")
    done = dslaunch("mine.yaml", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "hostfile").read_text() == "localhost slots=2,\n"


def test_a_plan_for_gpus_does_not_start_without_them(tmp_path: Path, run_file: Path) -> None:
    options = ("--gpu", "a100", "--set", "precision=bf16", "--run-dir", "r")
    done = dslaunch("mine.yaml", *options, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    text = error_of(done, 3)
    assert "nothing was started" in text
    assert not (tmp_path / "r").exists()
    dry = dslaunch("mine.yaml", *options, "--dry-run", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert error_of(dry, 3) == text


def test_planning_and_launching_agree_on_what_this_machine_is(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.2 slots=2\n")
    run_file.write_text(run_file.read_text().replace(", gpu: cpu", ""))
    done = dslaunch("mine.yaml", "--hostfile", "hosts", "--run-dir", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r" / "plan.json").read_text())["launch"]["device_type"] == "cpu"


@pytest.mark.parametrize(
    "argv", [("--version",), ("launch", "--num-gpus-per-node", "1", "--dry-run", "--", "true")]
)
def test_a_full_disk_under_stdout_is_no_bug_of_ours(tmp_path: Path, argv: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dslaunch", *argv],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "Error: cannot write the output: No space left on device\n")


def test_an_existing_run_directory_is_refused(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--run-dir", "r")
    assert dslaunch(*options, command=HELLO, cwd=tmp_path).returncode == 0
    before = (tmp_path / "r" / "events.jsonl").read_bytes()
    text = error_of(dslaunch(*options, command=HELLO, cwd=tmp_path))
    assert "exists already; nothing was started" in text
    assert "--resume" in text
    assert (tmp_path / "r" / "events.jsonl").read_bytes() == before


def test_resuming_a_command(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--run-dir", "r")
    assert dslaunch(*options, command=HELLO, cwd=tmp_path).returncode == 0
    assert dslaunch(*options, "--resume", command=HELLO, cwd=tmp_path).returncode == 0
    assert (tmp_path / "r" / "logs" / "rank-0.log").read_text() == "rank 0\nrank 0\n"
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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "give one of: a run file"),
        (("run.yaml", "--", "true"), "both a run file (run.yaml) and a command after -- were given"),
        (("--num-gpus-per-node", "2", "bash", "foo.sh"), "launch ... -- bash foo.sh"),
        (("--num-gpus-per-node", "2", "foo.py", "--lr", "3"), "launch ... -- python foo.py --lr 3"),
        (("bash",), "put -- before the command"),
        (("--run-dir", "bash", "run.yaml", "--bogus"), "No such option"),
        (("--dry-run", "bash", "-c", "true"), "put -- before the command"),
        (("--plan", "full.yaml"), "this is a run file, not a recorded plan"),
        (("--plan", "."), "there is no plan.json in it"),
        (("--run-dir", "r", "--resume"), "no plan at"),
        (("--",), "there is no command to run"),
        (("--", ""), "there is no command to run"),
        (("--set", "seed=1", "--", "true"), "--set changes a run file"),
        (("--hostfile", "h", "--", "true"), "hostfile not found"),
        (("--via", "pigeon", "--", "true"), "is not one of auto, local, ssh"),
        (("--num-gpus-per-node", "0", "--", "true"), "at least 1"),
        (("--master-port", "70000", "--", "true"), "a port is 1 to 65535"),
        (("--", "true"), "say it: --num-gpus-per-node 2"),
        (("--num-gpus-per-node", "1", "--env", "=x", "--", "true"), "write NAME=VALUE"),
        (("--num-gpus-per-node", "1", "--env", "RANK=3", "--", "true"), "RANK is set by dslaunch"),
        (("--num-gpus-per-node", "1", "--resume", "--", "true"), "--resume needs the run directory"),
        (("--plan", "no/plan.json"), "no plan at"),
        (("no-such-run.yaml",), "no-such-run.yaml"),
    ],
)
def test_what_makes_no_sense_starts_and_writes_nothing(
    tmp_path: Path, argv: tuple[str, ...], words: str
) -> None:
    assert words in error_of(dslaunch(*argv, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_secret_that_is_not_set(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--env", "NOT_SET_HERE")
    text = error_of(dslaunch(*options, command=HELLO, cwd=tmp_path), 3)
    assert "NOT_SET_HERE is to be passed to the ranks but is not set here" in text
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = error_of(
        dslaunch("--num-gpus-per-node", "1", "--run-dir", "file/r", command=HELLO, cwd=tmp_path), 3
    )
    assert "cannot write the run directory" in text


def test_resume_proposes_the_newest_run(tmp_path: Path) -> None:
    for stamp in ("20260101T000000Z", "20260301T000000Z", "20260201T000000Z"):
        path = tmp_path / "runs" / f"train-{stamp}"
        path.mkdir(parents=True)
        (path / "plan.json").touch()
    (tmp_path / "runs" / "other-20270101T000000Z").mkdir()
    options = ("--num-gpus-per-node", "1", "--resume")
    text = error_of(dslaunch(*options, command=("--", "python", "train.py"), cwd=tmp_path))
    assert f"--run-dir {tmp_path}/runs/train-20260301T000000Z is the newest run of train" in text


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run file whose "python" only prints what it is asked to run."""
    fake = tmp_path / "fake python"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "data.jsonl").write_text('{"text": "x"}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {path: ./model}\ndata: {train: data.jsonl}\noptimizer: {type: AdamW, lr: 0.001}\n"
        "max_steps: 3\ntrain_batch_size: 4\ncluster: {num_gpus_per_node: 2, gpu: cpu}\n"
        "launch: {python: ./fake python}\n"
    )
    return path


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


def test_dry_run_of_a_run_file_writes_nothing(tmp_path: Path, run_file: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = dslaunch("mine.yaml", "--run-dir", "r", "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["plan"]["batch"]["train_batch_size"] == 4
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    options = ("--num-gpus-per-node", "1", "--run-dir", "r")
    command = ("--", "bash", "-c", "echo x >> started")
    assert dslaunch(*options, command=command, cwd=tmp_path).returncode == 0
    (tmp_path / "r" / "events.jsonl").unlink()
    (tmp_path / "r" / "events.jsonl").mkdir()
    text = error_of(dslaunch(*options, "--resume", command=command, cwd=tmp_path), 3)
    assert "cannot write the run directory" in text
    assert "nothing was started" in text
    assert (tmp_path / "started").read_text() == "x\n"


FAILING = "#!/bin/sh\necho 'Error: no wandb' >&2\nexit 3\n"


def test_a_start_without_a_step_leaves_its_directory_to_the_retry(tmp_path: Path, run_file: Path) -> None:
    program = tmp_path / "fake python"
    good = program.read_text()
    program.write_text(FAILING)
    assert "Error: no wandb" in error_of(dslaunch("mine.yaml", "--run-dir", "r", cwd=tmp_path), 3)
    program.write_text(good)
    changed = ("mine.yaml", "--run-dir", "r", "--set", "optimizer.lr=0.002")
    assert "leave --resume out" in error_of(dslaunch(*changed, "--resume", cwd=tmp_path))
    done = dslaunch(*changed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the start before this one did no step; its files are replaced\n") == 1
    assert "no wandb" not in (tmp_path / "r" / "logs" / "rank-0.log").read_text()
    assert (tmp_path / "r" / "events.jsonl").read_text().count('"launch_start"') == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("notes.txt", "it holds notes.txt"),
        ("checkpoints/step-1", "it holds checkpoints/step-1"),
        ("metrics.jsonl", "training was done in it"),
    ],
)
def test_a_directory_with_anything_of_worth_is_refused(
    tmp_path: Path, run_file: Path, name: str, words: str
) -> None:
    (tmp_path / "fake python").write_text(FAILING)
    error_of(dslaunch("mine.yaml", "--run-dir", "r", cwd=tmp_path), 3)
    (tmp_path / "r" / name).write_text("x\n")
    before = sorted(tmp_path.rglob("*"))
    for options in ((), ("--dry-run",)):
        assert words in error_of(dslaunch("mine.yaml", "--run-dir", "r", *options, cwd=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_files_of_the_user_with_our_names_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("mine\n")
    text = error_of(dslaunch("--num-gpus-per-node", "1", "--run-dir", ".", command=HELLO, cwd=tmp_path))
    assert "it holds hostfile" in text
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine\n"]


def test_a_start_without_a_rank_leaves_no_default_directory(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no #! line\n")
    program.chmod(0o755)
    done = dslaunch("--num-gpus-per-node", "1", command=("--", "./program"), cwd=tmp_path)
    assert "is not a program this system can run" in error_of(done, 3)
    assert list((tmp_path / "runs").iterdir()) == []
    named = ("--num-gpus-per-node", "1", "--run-dir", "r")
    error_of(dslaunch(*named, command=("--", "./program"), cwd=tmp_path), 3)
    assert dslaunch(*named, command=HELLO, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("key", ["launch.python=./none", "launch.cwd=./none"])
def test_a_dry_run_refuses_what_the_launch_does(tmp_path: Path, run_file: Path, key: str) -> None:
    options = ("mine.yaml", "--run-dir", "r", "--set", key)
    real, dry = dslaunch(*options, cwd=tmp_path), dslaunch(*options, "--dry-run", cwd=tmp_path)
    assert real.returncode in (2, 3)
    assert (dry.returncode, dry.stderr) == (real.returncode, real.stderr)
    assert not (tmp_path / "r").exists()


def test_a_dry_run_sees_a_run_that_is_going_on(tmp_path: Path) -> None:
    record(tmp_path / "r", "true")
    with hold_run_dir(tmp_path / "r"):
        done = dslaunch("--run-dir", "r", "--resume", "--dry-run", cwd=tmp_path)
    assert f"is still going on (process {os.getpid()} on " in error_of(done)
    assert dslaunch("--run-dir", "r", "--resume", "--dry-run", cwd=tmp_path).returncode == 0


def test_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "r").touch()
    for more in ((), ("--dry-run",)):
        done = dslaunch("--num-gpus-per-node", "1", "--run-dir", "r", *more, command=HELLO, cwd=tmp_path)
        assert "r is a file; nothing was started" in error_of(done)


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    argv = [sys.executable, "-m", "dslaunch", "launch", "--num-gpus-per-node", "1", *HELLO]
    done = subprocess.run(["bash", "-c", script, "bash", *argv], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": os.getcwd()},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "the current directory is gone" in error_of(done, 3)


def test_a_run_directory_is_enough_to_resume(tmp_path: Path) -> None:
    record(tmp_path / "r", "bash", "-c", 'echo "$@"', "bash")
    done = dslaunch("--run-dir", "r", "--resume", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "--resume\n"), done.stderr
    again = dslaunch("--plan", "r", "--dry-run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_the_last_line_of_a_training_run_is_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "my run").mkdir()
    record(tmp_path / "my run" / "r", "bash", "-c", 'mkdir -p "$DSLAUNCH_RUN_DIR/checkpoints/step-1"', "bash")
    done = dslaunch("--run-dir", "my run/r", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"next: dslaunch export '{tmp_path}/my run/r' -o DIR"


def test_a_port_that_is_taken_is_found_before_anything_is_made(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        options = ("--num-gpus-per-node", "1", "--run-dir", "r", "--master-port", str(port))
        for more in ((), ("--dry-run",)):
            done = dslaunch(*options, *more, command=HELLO, cwd=tmp_path)
            assert f"master_port {port} is taken" in error_of(done, 3)
    assert list(tmp_path.iterdir()) == []
