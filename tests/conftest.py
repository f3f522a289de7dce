"""One environment for every test, the prebuilt op, and a summary that names what could not run.

The environment is set when this file is imported, before any test module imports
torch or DeepSpeed. Nothing is read from or written to the caller's home directory.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import itertools
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import CANNOT_RUN, missing

REPO_ROOT = Path(__file__).resolve().parents[1]
SESSION_PREFIX = "dslaunch-tests-"
OP_NAME = "deepspeed_shm_comm"

# A caller's job or cache must not leak into a test.
_FORGET = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR",
    "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "DSLAUNCH_RUNS", "PYTHONHOME", "NO_COLOR", "FORCE_COLOR",
    # a scheduler's job
    "SLURM_JOB_NODELIST", "SLURM_NODELIST", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS",
    "LSB_HOSTS", "PE_HOSTFILE", "FLUX_ENCLOSING_ID", "FLUX_JOB_ID", "FLUX_URI",
)  # fmt: skip


def _ops_directory(session_dir: Path) -> Path:
    """Where the op is built: given by the caller, else kept in the checkout, else of this session.

    Kept per interpreter, versions and CPU: the op is compiled for the very CPU.
    """
    if os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(os.environ["TORCH_EXTENSIONS_DIR"]).resolve()
    try:
        versions = [metadata.version("torch"), metadata.version("deepspeed")]
    except metadata.PackageNotFoundError:  # a core-only installation: no test will build an op
        return session_dir / "ops"
    parts = [sys.executable, platform.python_version(), *versions, _cpu_flags()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    kept = REPO_ROOT / ".cache" / "test-ops" / key
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:
        return session_dir / "ops"
    return kept if os.access(kept, os.W_OK) else session_dir / "ops"


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _remove_old_sessions(temp_root: Path) -> None:
    """Of sessions that were killed, a day ago or more: those could not remove their directory."""
    for path in temp_root.glob(f"{SESSION_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - 24 * 3600:
                shutil.rmtree(path, ignore_errors=True)


def _set_environment() -> None:
    temp_root = tempfile.gettempdir()
    worker = os.environ.pop("PYTEST_XDIST_WORKER", None)  # no affair of what tests start
    if worker:  # within the controller's, which goes with it
        session_dir = Path(temp_root).parent / worker
        session_dir.mkdir(exist_ok=True)
    else:
        _remove_old_sessions(Path(temp_root))
        session_dir = Path(tempfile.mkdtemp(prefix=SESSION_PREFIX))
        atexit.register(shutil.rmtree, session_dir, ignore_errors=True)
    if "CUDA_VISIBLE_DEVICES" in os.environ:  # tests/gpu keeps to them
        os.environ["DSLAUNCH_TEST_GPUS"] = os.environ["CUDA_VISIBLE_DEVICES"]
    for name in _FORGET:
        os.environ.pop(name, None)
    home, temp = session_dir / "home", session_dir / "tmp"
    home.mkdir()
    temp.mkdir()
    # What torch, torchrun, wandb and others leave in the directory for temporary files goes with the
    # session; pytest's own directories stay where people look for those of a failed test.
    tempfile.tempdir = str(temp)
    os.environ.update(
        TMPDIR=str(temp),
        PYTEST_DEBUG_TEMPROOT=temp_root,
        HOME=str(home),
        XDG_CACHE_HOME=str(session_dir / "cache"),
        HF_HOME=str(session_dir / "huggingface"),
        HF_HUB_OFFLINE="1",
        DSLAUNCH_CACHE=str(session_dir / "dslaunch-cache"),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        TORCH_EXTENSIONS_DIR=str(_ops_directory(session_dir)),
        PYTHONNOUSERSITE="1",
        # ninja and the console scripts of the interpreter that runs the tests
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    )


_set_environment()
# Under nohup, or in the background of a script, they are ignored, and so they would be in every launch
# that a test starts and then hangs up on or interrupts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ops_dir() -> Path:
    """TORCH_EXTENSIONS_DIR with DeepSpeed's shared-memory op built in it. Ask for it before starting ranks.

    Built once, in a process of its own, under a lock that the kernel releases; a
    ``lock`` file of torch that an interrupted build left behind is removed first.
    """
    path = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".tests.flock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        op_dir = path / OP_NAME
        if not (op_dir / f"{OP_NAME}.so").exists():
            (op_dir / "lock").unlink(missing_ok=True)
            _build_op()
    return path


def _build_op() -> None:
    code = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load(verbose=False)"
    built = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=600
    )
    if built.returncode != 0:
        pytest.fail(f"could not build {OP_NAME} (g++ and ninja are needed):\n{built.stderr[-4000:]}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`, as `make test` has it."""
    from tests.support.workers import FromBothEnds

    return FromBothEnds(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs more than this machine has; sort what two workers share between them."""
    for item in items:
        reasons = [text for mark in item.iter_markers("needs") for text in missing(mark.args)]
        if reasons:
            item.add_marker(pytest.mark.skip(reason=CANNOT_RUN + ", ".join(reasons)))
    if hasattr(config, "workerinput"):
        from tests.support.workers import place

        items.sort(key=lambda item: place(item.nodeid))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name every test that could not run on this machine, and why."""
    by_reason: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason.startswith(CANNOT_RUN):
            by_reason.setdefault(reason.removeprefix(CANNOT_RUN), []).append(report.nodeid)
    if not by_reason:
        return
    terminalreporter.section("COULD NOT RUN ON THIS MACHINE", sep="!", yellow=True, bold=True)
    for reason, tests in sorted(by_reason.items()):
        terminalreporter.write_line(f"{len(tests)} test(s): {reason}", yellow=True, bold=True)
        for name, same in itertools.groupby(tests, key=lambda test: test.partition("[")[0]):
            first, *others = same
            terminalreporter.write_line(f"    {name}, {len(others) + 1} cases" if others else f"    {first}")
