"""Builds the C++ op that DeepSpeed needs on a CPU before any rank waits for another.

Left alone, ``deepspeed.init_distributed`` compiles it on first use with one rank
working and the others waiting in silence, and a ``lock`` file that an interrupted
build left behind makes every later run wait for ever. Here the ranks of a machine
take turns under a lock that the kernel releases when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dslaunch.core.errors import EnvironmentNotReady

OP_NAME = "deepspeed_shm_comm"
SAY_AFTER_S = 5.0
POLL_S = 0.1


def prepare_ops(*, timeout_s: float = 900.0) -> None:
    """Build (first time) and load ``deepspeed_shm_comm`` on a CPU; nothing on other devices.

    Waits for the rank or run that is building it, with a message on stderr after 5 s.
    Raises EnvironmentNotReady where ninja or a C++ compiler is missing, the build
    fails, or another process still holds the lock after ``timeout_s``.
    """
    builder = _builder()
    if builder is None:
        return
    put_interpreter_bin_on_path()
    check_build_tools()
    folder = extensions_root()
    with exclusive_lock(folder / f".dslaunch-{OP_NAME}.flock", timeout_s=timeout_s):
        wait_for_torch_lock(folder / OP_NAME / "lock", timeout_s=timeout_s)
        _load(builder, folder)


def _builder() -> Any:
    """DeepSpeed's builder of the op, or None where it would not use it or has it installed."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return None
    builder = accelerator.create_op_builder("ShareMemCommBuilder")
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return None
    from deepspeed.git_version_info import installed_ops

    return None if installed_ops.get(builder.NAME, False) else builder


def put_interpreter_bin_on_path() -> None:
    """Find the ``ninja`` of this virtual environment even where it was not activated."""
    if shutil.which("ninja") is None and (Path(sys.executable).parent / "ninja").exists():
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def check_build_tools() -> None:
    """torch asks for ninja and the compiler even when the op is built already.

    Raises EnvironmentNotReady naming what is missing and how to get it.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which("ninja") is None:
        raise EnvironmentNotReady(
            "ninja is not on PATH; DeepSpeed compiles its CPU communication op with it",
            hint="pip install ninja",
        )
    if shutil.which(compiler.split()[0] if compiler.split() else "c++") is None:
        raise EnvironmentNotReady(
            f"no C++ compiler ({compiler!r} is not on PATH); DeepSpeed compiles its CPU communication op",
            hint="install g++ (Debian: apt-get install g++), or set CXX to your compiler",
        )


def extensions_root() -> Path:
    """Where torch builds: ``$TORCH_EXTENSIONS_DIR``, else its default for this Python, made if missing.

    Raises EnvironmentNotReady where it cannot be written.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        folder = Path(given)
    else:
        from torch.utils.cpp_extension import _get_build_directory

        # torch adds the Python version and the device by itself; ask it, for the op's own folder.
        folder = Path(_get_build_directory(OP_NAME, verbose=False)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentNotReady(
            f"cannot write {folder}, where DeepSpeed's C++ op is built: {error.strerror}",
            hint="set TORCH_EXTENSIONS_DIR to a directory you can write",
        ) from error
    return folder


@contextlib.contextmanager
def exclusive_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold ``path`` under flock. The kernel drops it when the holder dies, however it dies.

    Raises EnvironmentNotReady where it cannot be made or is not had within ``timeout_s``.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise EnvironmentNotReady(
            f"cannot write {path}: {error.strerror}",
            hint="set TORCH_EXTENSIONS_DIR to a directory you can write",
        ) from error

    def free() -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        wait_until(free, f"another process that builds {OP_NAME} (it holds {path})", timeout_s=timeout_s)
        yield
    finally:
        os.close(fd)  # releases the lock


def wait_for_torch_lock(path: Path, *, timeout_s: float) -> None:
    """See that torch's own ``lock`` file stops no one: wait for a live holder, remove a dead one's.

    torch keeps the file open while it builds (torch/utils/file_baton.py), so a holder
    on this machine is found in /proc. Without one the file was left by a build that
    was killed, and torch would wait for it for ever.
    """
    if not path.exists():
        return
    holder = process_with_open(path)
    if holder is not None:
        wait_until(
            lambda: not path.exists() or process_with_open(path) is None,
            f"process {holder}, which builds {OP_NAME}",
            timeout_s=timeout_s,
        )
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        print(f"note: removed {path}, left behind by a build that was killed", file=sys.stderr)


def process_with_open(path: Path) -> int | None:
    """The id of a process of this machine that has ``path`` open, as far as /proc may be read."""
    try:
        wanted = path.stat()
    except OSError:
        return None
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = link.stat()
        except OSError:  # ended meanwhile, or another user's
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return int(link.parts[2])
    return None


def wait_until(done: Callable[[], bool], what: str, *, timeout_s: float) -> None:
    """Poll ``done``; says on stderr what is waited for after 5 s. Raises EnvironmentNotReady in the end."""
    start = time.monotonic()
    said = False
    while not done():
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise EnvironmentNotReady(
                f"waited {timeout_s:g} s for {what}",
                hint="see whether that process is still at work; a private TORCH_EXTENSIONS_DIR avoids it",
            )
        if waited > SAY_AFTER_S and not said:
            print(f"waiting for {what}", file=sys.stderr)
            said = True
        time.sleep(POLL_S)


def _load(builder: Any, folder: Path) -> None:
    if not (folder / OP_NAME / f"{OP_NAME}.so").exists():
        print(f"building {OP_NAME} in {folder} (once, about a minute)", file=sys.stderr)
    try:
        builder.load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        raise EnvironmentNotReady(
            f"DeepSpeed's {OP_NAME} op could not be built: {_compiler_message(error)}",
            hint="see that g++ and the Python headers are installed, "
            f"or remove {folder / OP_NAME} and try again",
        ) from error


def _compiler_message(error: BaseException) -> str:
    """The compiler's first error line, else the first line of the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    blame = next((line for line in lines if "error:" in line.lower()), None)
    return blame or (lines[0] if lines else type(error).__name__)
