"""Builds of DeepSpeed's op: turns are taken, dead locks are removed, waiting is said and ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.train import jit_ops

HOLD_FLOCK = (
    "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
    "print('held', flush=True); time.sleep(60)"
)
HOLD_OPEN = (
    "import os, sys, time; fd = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL);"
    "print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def holder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds ``tmp_path/lock`` (flock, or open as torch keeps it)."""
    path = tmp_path / "lock"
    argv = [sys.executable, "-c", request.param, str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process, path
        process.kill()


def kill_soon(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("holder", [HOLD_FLOCK], indirect=True)
def test_a_held_lock_is_waited_for_with_words_and_an_end(
    holder: tuple[subprocess.Popen[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jit_ops, "SAY_AFTER_S", 0.1)
    _, path = holder
    waited = r"waited 0\.5 s for another process that builds"
    with pytest.raises(EnvironmentNotReady, match=waited), jit_ops.exclusive_lock(path, timeout_s=0.5):
        pytest.fail("had a lock that another process holds")
    assert capsys.readouterr().err.count("waiting for another process that builds") == 1


@pytest.mark.parametrize("holder", [HOLD_FLOCK], indirect=True)
def test_the_kernel_frees_the_lock_of_a_killed_process(holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = holder
    kill_soon(process)
    with jit_ops.exclusive_lock(path, timeout_s=30):
        pass


@pytest.mark.parametrize("holder", [HOLD_OPEN], indirect=True)
def test_torchs_lock_of_a_live_build_is_respected(holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = holder
    assert jit_ops.process_with_open(path) == process.pid
    with pytest.raises(EnvironmentNotReady, match=f"process {process.pid}, which builds"):
        jit_ops.wait_for_torch_lock(path, timeout_s=0.5)
    assert path.exists()


@pytest.mark.parametrize("holder", [HOLD_OPEN], indirect=True)
def test_torchs_lock_of_a_killed_build_is_removed(
    holder: tuple[subprocess.Popen[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    process, path = holder
    kill_soon(process)
    process.wait()
    jit_ops.wait_for_torch_lock(path, timeout_s=30)
    assert not path.exists()
    assert "left behind by a build that was killed" in capsys.readouterr().err


def test_no_lock_no_wait(tmp_path: Path) -> None:
    start = time.monotonic()
    jit_ops.wait_for_torch_lock(tmp_path / "lock", timeout_s=30)
    assert time.monotonic() - start < 30


def program(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EnvironmentNotReady, match="ninja is not on PATH") as caught:
        jit_ops.check_build_tools()
    assert caught.value.hint == "pip install ninja"
    program(tmp_path, "ninja")
    with pytest.raises(EnvironmentNotReady, match=r"no C\+\+ compiler \('c\+\+' is not on PATH\)"):
        jit_ops.check_build_tools()
    program(tmp_path, "c++")
    jit_ops.check_build_tools()
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(EnvironmentNotReady, match="no-such-compiler"):
        jit_ops.check_build_tools()


def test_ninja_beside_the_interpreter_is_found_without_activating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "ninja")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    jit_ops.put_interpreter_bin_on_path()
    assert os.environ["PATH"] == f"{tmp_path}{os.pathsep}/nowhere"


def test_an_unwritable_build_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "ops"))
    with pytest.raises(EnvironmentNotReady, match=r"cannot write .*file/ops, where DeepSpeed's"):
        jit_ops.extensions_root()


def test_the_compilers_own_words_are_kept() -> None:
    error = RuntimeError(
        "Error building extension\n[1/2] c++ ...\nx.cpp:3:10: fatal error: Python.h: No such file\n"
    )
    assert jit_ops._compiler_message(error) == "x.cpp:3:10: fatal error: Python.h: No such file"


def test_a_stale_lock_does_not_stop_a_real_start(ops_dir: Path, tmp_path: Path) -> None:
    """The built op with a dead ``lock`` beside it: torch alone would wait for ever."""
    import shutil

    private = tmp_path / "ops"
    shutil.copytree(ops_dir / jit_ops.OP_NAME, private / jit_ops.OP_NAME)
    (private / jit_ops.OP_NAME / "lock").write_text("")
    code = "from dslaunch.train.jit_ops import prepare_ops; prepare_ops(timeout_s=60); print('ready')"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(private), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ready"
    assert "removed" in done.stderr
