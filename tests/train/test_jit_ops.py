"""Builds of DeepSpeed's op: turns are taken, dead locks are removed, waiting is said and ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.core import file_lock
from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.train import jit_ops
from tests.support.python import run_python

OP_NAME = "deepspeed_shm_comm"
HOLD_OPEN = (
    "import os, sys, time; fd = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL);"
    "print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def holder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has ``tmp_path/lock`` open, as torch does while it builds."""
    path = tmp_path / "lock"
    argv = [sys.executable, "-c", request.param, str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process, path
        process.kill()


def kill_soon(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)


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


def test_a_build_of_another_process_is_waited_for_with_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each op has a lock of its own in the build directory, and its builder is said to be at work."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(file_lock, "SAY_AFTER_S", 0.0)
    with (
        file_lock.exclusive(tmp_path / ".dslaunch-fused_adam.flock"),
        pytest.raises(EnvironmentNotReady, match=rf"fused_adam\.flock is held by process {os.getpid()}"),
    ):
        jit_ops.prepare_op("FusedAdamBuilder", hint="", timeout_s=0.01)
    said = f"waiting for process {os.getpid()} on {os.uname().nodename}: building fused_adam in {tmp_path}"
    assert said in capsys.readouterr().err


def test_upstream_waits_for_a_lock_that_nobody_holds(tmp_path: Path) -> None:
    """F10. Red: torch knows a dead lock by now, and need not be kept from it."""
    from torch.utils.file_baton import FileBaton

    lock = tmp_path / "lock"
    lock.touch()
    waiting = threading.Thread(target=FileBaton(str(lock), wait_seconds=0.01).wait, daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    lock.unlink()
    waiting.join(10)
    assert not waiting.is_alive()


def test_no_lock_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jit_ops.file_lock, "poll", lambda *_, **__: pytest.fail("it waited"))
    jit_ops.wait_for_torch_lock(tmp_path / "lock", timeout_s=30)
    assert capsys.readouterr() == ("", "")


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
    assert jit_ops.compiler_message(error) == "x.cpp:3:10: fatal error: Python.h: No such file"


def test_a_stale_lock_does_not_stop_a_real_start(ops_dir: Path, tmp_path: Path) -> None:
    """The built op with a dead ``lock`` beside it: torch alone would wait for ever."""
    import shutil

    private = tmp_path / "ops"
    shutil.copytree(ops_dir / OP_NAME, private / OP_NAME)
    (private / OP_NAME / "lock").write_text("")
    code = "from dslaunch.train import jit_ops; jit_ops.prepare_communication(timeout_s=60); print('ready')"
    done = run_python("-c", code, env={"TORCH_EXTENSIONS_DIR": str(private)}, timeout_s=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ready"
    assert "removed" in done.stderr


@pytest.mark.parametrize(
    ("optimizer", "offload", "ops"),
    [
        ({"type": "AdamW"}, None, ("FusedAdamBuilder",)),
        ({"type": "Muon"}, None, ()),
        ({"type": "Adam", "params": {"torch_adam": False}}, "none", ("FusedAdamBuilder",)),
        ({"type": "AdamW"}, "cpu", ("CPUAdamBuilder",)),
        ({"type": "AdamW"}, "nvme", ("CPUAdamBuilder", "AsyncIOBuilder")),
        ({"type": "AdamW", "params": {"torch_adam": True}}, None, ()),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "nvme", ("AsyncIOBuilder",)),
        ({"type": "Lion"}, None, ("FusedLionBuilder",)),
        ({"type": "Lion"}, "cpu", ("CPULionBuilder",)),
        ({"type": "Adagrad"}, "cpu", ("CPUAdagradBuilder",)),
        ({"type": "Lamb"}, None, ("FusedLambBuilder",)),
        ({"type": "SGD"}, "cpu", ()),
        (None, "nvme", ()),
    ],
)
def test_which_ops_an_optimizer_compiles(
    optimizer: dict[str, object] | None, offload: str | None, ops: tuple[str, ...]
) -> None:
    zero = {"stage": 2, **({"offload_optimizer": {"device": offload}} if offload else {})}
    assert jit_ops.optimizer_ops({"optimizer": optimizer, "zero_optimization": zero}) == ops


def test_deepspeed_has_every_builder_and_optimizers_ask_for_these() -> None:
    """The names are DeepSpeed's: renamed upstream, this goes red instead of the build going unguarded."""
    import inspect

    from deepspeed.ops import adagrad, adam, lamb, lion, op_builder

    users = {
        "FusedAdamBuilder": adam.FusedAdam,
        "CPUAdamBuilder": adam.DeepSpeedCPUAdam,
        "FusedLionBuilder": lion.FusedLion,
        "CPULionBuilder": lion.DeepSpeedCPULion,
        "CPUAdagradBuilder": adagrad.DeepSpeedCPUAdagrad,
        "FusedLambBuilder": lamb.FusedLamb,
    }
    assert hasattr(op_builder, "AsyncIOBuilder")
    for name, user in users.items():
        assert hasattr(op_builder, name)
        assert f"{name}().load()" in inspect.getsource(user)


FAILING_COMPILER = """#!/bin/sh
case "$*" in *-c*) echo 'fused_adam.cpp:1:10: fatal error: no_such.h: No such file'; exit 1 ;; esac
exec c++ "$@"
"""


def test_an_optimizer_that_cannot_be_compiled_is_one_sentence(tmp_path: Path) -> None:
    """A real build of DeepSpeed's Adam, with a compiler that fails."""
    program(tmp_path, "broken")
    (tmp_path / "broken").write_text(FAILING_COMPILER)
    code = (
        "from dslaunch.core.errors import DslaunchError\n"
        "from dslaunch.train.jit_ops import prepare_optimizer\n"
        "try:\n    prepare_optimizer({'optimizer': {'type': 'AdamW'}})\n"
        "except DslaunchError as error:\n    print(type(error).__name__, error.format())\n"
    )
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"), "CXX": str(tmp_path / "broken")}
    done = run_python("-c", code, env=env, timeout_s=200)
    assert "EnvironmentNotReady Error: DeepSpeed's fused_adam op could not be built: " in done.stdout, (
        done.stderr
    )
    assert "fatal error: no_such.h" in done.stdout
    assert "or set optimizer.params.torch_adam: true" in done.stdout


class BareBuilder:
    """Fails as DeepSpeed's builders do on a machine with a GPU and no CUDA toolkit."""

    NAME = "fused_adam"

    def load(self, verbose: bool) -> None:
        from deepspeed.ops.op_builder.builder import MissingCUDAException

        raise MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")


def test_a_missing_cuda_toolkit_is_one_sentence(ops_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda name: BareBuilder())
    with pytest.raises(EnvironmentNotReady, match="fused_adam op could not be built: CUDA_HOME") as caught:
        jit_ops.prepare_optimizer({"optimizer": {"type": "AdamW"}})
    assert caught.value.hint is not None and "torch_adam: true" in caught.value.hint
