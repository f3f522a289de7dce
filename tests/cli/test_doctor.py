"""``dslaunch doctor`` as a user types it, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.cli.doctor_ops import ops_to_build
from dslaunch.cli.main import main


@pytest.fixture(autouse=True)
def ops_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may just be building in theirs, where a lock is no fault."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("ops")))


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    assert main(["doctor", *argv]) == code, capsys.readouterr()
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = said(capsys)
    rows = dict(line.split(None, 1) for line in out.splitlines() if line and not line.startswith(" "))
    assert rows["machine"].startswith(os.uname().nodename)
    assert rows["devices"] == "none"
    assert rows["precision"].startswith(("fp32: the CPU", "bf16: the CPU"))
    assert rows["python"] == f"{sys.version.split()[0]}, {sys.executable}"
    assert "torch " in rows["packages"]
    assert "deepspeed " in rows["packages"]
    assert err == "nothing is missing\n"
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_line_and_an_inventory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = said(capsys, "--json")
    assert out.count("\n") == 1
    report = json.loads(out)
    assert (report["schema_version"], report["ready"], report["findings"]) == (1, True, [])
    assert report["hosts"][0]["packages"]["torch"] is not None
    monkeypatch.chdir(tmp_path)
    node = os.uname().nodename
    Path("inventory.json").write_text(out)
    Path("hosts").write_text(f"{node} slots=1\n")
    argv = ["gen-config", "--hostfile", "hosts", "--inventory", "inventory.json", "--zero-stage", "0",
            "--train-batch-size", "1", "--lr", "1e-4"]  # fmt: skip
    assert main(argv) == 0
    enabled = json.loads(capsys.readouterr().out)["bf16"]["enabled"]
    assert enabled == (report["precision"]["value"] == "bf16")


def test_a_lock_that_a_killed_build_left(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam/lock").touch()
    out, err = said(capsys, code=1)
    assert f"error    no process has {tmp_path}/cpu_adam/lock open" in out
    assert f"-> rm {tmp_path}/cpu_adam/lock" in out
    assert err == "1 error\n"
    (tmp_path / "cpu_adam/lock").unlink()
    said(capsys)


def test_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSLAUNCH_CACHE", "/proc/nothing")
    out, _ = said(capsys, code=1)
    assert "error    cannot write the cache /proc/nothing: " in out
    assert "-> set DSLAUNCH_CACHE to a directory that can be written" in out


def test_slots_that_this_machine_has_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost slots=2\n")
    out, _ = said(capsys, "--hostfile", "hosts", "--gpu", "h100", code=1)
    assert "error    the plan is for GPU 0, but it shows none" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--hostfile", "nowhere"), "hostfile not found: "),
        (("nowhere.yaml",), "nowhere.yaml"),
        (("--via", "pigeon"), "--via 'pigeon' is not one of auto, local, ssh"),
        (("--num-nodes", "2", "--num-gpus-per-node", "1"), "host node-0 cannot be reached"),
        (("--hostfile", "two", "--via", "local"), "host here.invalid cannot be reached"),
        (("--set", "a=b"), "--set changes a run file"),
        (("--hosts", "two", "--hostfile", "two"), "--hosts is another word for --hostfile"),
    ],
)
def test_what_cannot_be_asked(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two").write_text("here.invalid slots=1\n")
    assert message in said(capsys, *argv, code=2)[1]


def test_a_run_file_says_what_is_needed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python and its run directory; nothing of them is made."""
    monkeypatch.chdir(tmp_path)
    run_file = Path(__file__).parents[2] / "examples/quickstart.yaml"
    out, _ = said(capsys, str(run_file), "--set", "launch.python=/bin/true", code=1)
    assert "error    /bin/true does not work: it printed nothing" in out
    out, _ = said(capsys, str(run_file), "--run-dir", "some/run")
    assert f", {sys.executable}\n" in out
    assert list(tmp_path.iterdir()) == []


def test_in_a_job_of_several_nodes_local_means_this_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "far[1-2].invalid")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    out, _ = said(capsys, "--via", "local", "--json")
    assert [host["node"] for host in json.loads(out)["hosts"]] == [os.uname().nodename]


def test_ops_are_built_where_ranks_look_for_them(ops_dir: Path, tmp_path: Path) -> None:
    """By a process like the ranks', so in the cache that they are given. The op is there already."""
    cache = {"DSLAUNCH_CACHE": str(tmp_path / "cache"), "TORCH_EXTENSIONS_DIR": str(ops_dir)}
    env = {**os.environ, **cache}
    argv = [sys.executable, "-m", "dslaunch", "doctor", "--build-ops"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"the ops are in {ops_dir}\n" in done.stderr
    (log,) = (tmp_path / "cache/build-ops").glob("*/logs/rank-0.log")
    assert f"built on 1 host; logs in {log.parents[1]}\n" in done.stderr
    assert "Traceback" not in log.read_text()


def test_an_op_that_cannot_be_built_is_said(tmp_path: Path) -> None:
    """No compiler: torch would not build, and doctor has said so before; nothing is started."""
    env = {**os.environ, "CXX": "no-such-compiler", "DSLAUNCH_CACHE": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "dslaunch", "doctor", "--build-ops"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "error    no c++: DeepSpeed's ops cannot be compiled" in done.stdout
    assert "no op was built: see the errors\n" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_which_ops_are_built() -> None:
    assert ops_to_build("cpu", None) == ()
    assert ops_to_build("cuda", None) == ("FusedAdamBuilder", "CPUAdamBuilder")
    offload = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert ops_to_build("cuda", offload) == ("CPUAdamBuilder",)
