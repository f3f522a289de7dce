"""Builds the compiled ops that DeepSpeed needs before any rank waits for another.

Left alone, DeepSpeed compiles an op on first use with one rank working and the others
waiting in silence, and a ``lock`` file that an interrupted build left behind makes
every later run wait for ever. Here the ranks of a machine take turns under a lock that
the kernel releases when its holder dies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dslaunch.core import file_lock
from dslaunch.core.errors import EnvironmentNotReady, one_line
from dslaunch.train.waiting import waiting_for

COMMUNICATION_OP = "ShareMemCommBuilder"
BUILD_TIMEOUT_S = 900.0


def prepare_communication(*, timeout_s: float = BUILD_TIMEOUT_S) -> None:
    """Build (first time) and load the op that joins the ranks of a CPU; nothing on other devices.

    Raises EnvironmentNotReady as :func:`prepare_op`.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    builder = get_accelerator().create_op_builder(COMMUNICATION_OP)
    # As deepspeed/comm/torch.py: where the op does not fit this CPU, it does without.
    if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        prepare_op(COMMUNICATION_OP, hint="install g++ and the Python headers", timeout_s=timeout_s)


def prepare_optimizer(config: Mapping[str, Any], *, timeout_s: float = BUILD_TIMEOUT_S) -> None:
    """Build (first time) and load the ops of the optimizer that a DeepSpeed ``config`` names.

    Raises EnvironmentNotReady as :func:`prepare_op`.
    """
    for op in optimizer_ops(config):
        prepare_optimizer_op(op, timeout_s=timeout_s)


def prepare_optimizer_op(op: str, *, timeout_s: float = BUILD_TIMEOUT_S) -> None:
    """Build and load one of :func:`optimizer_ops`. Raises EnvironmentNotReady as :func:`prepare_op`."""
    hint = "install the CUDA toolkit of torch's CUDA version and a C++ compiler"
    if "Adam" in op:
        hint += ", or set optimizer.params.torch_adam: true"
    prepare_op(op, hint=hint, timeout_s=timeout_s)


def optimizer_ops(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The builder classes of the ops that the config's optimizer compiles; empty for torch's own, and for
    Muon, in whose place the engine puts one that needs none.

    Source: runtime/engine.py ``_configure_basic_optimizer`` and
    ``get_optimizer_configuration``, runtime/swap_tensor/ for NVMe (DeepSpeed 0.19.8).
    """
    block = config.get("optimizer") or {}
    zero = config.get("zero_optimization") or {}
    kind = str(block.get("type") or "").lower()
    offload = str((zero.get("offload_optimizer") or {}).get("device") or "none")
    offloaded = offload in ("cpu", "nvme")
    ops = []
    if kind in ("adam", "adamw") and not (block.get("params") or {}).get("torch_adam"):
        ops.append("CPUAdamBuilder" if offloaded else "FusedAdamBuilder")
    elif kind == "lion":
        ops.append("CPULionBuilder" if offloaded else "FusedLionBuilder")
    elif kind == "adagrad" and offloaded:
        ops.append("CPUAdagradBuilder")
    elif kind == "lamb":
        ops.append("FusedLambBuilder")
    if kind and offload == "nvme":
        ops.append("AsyncIOBuilder")
    return tuple(ops)


def prepare_op(builder_name: str, *, hint: str, timeout_s: float = BUILD_TIMEOUT_S) -> None:
    """Build (first time) and load one of DeepSpeed's ops, one rank of this machine after the other.

    Waits for the rank or run that is building it, with a message on stderr after 5 s.
    Raises EnvironmentNotReady (``hint``) where the build fails, whatever DeepSpeed or torch
    raise for it; where ninja or a C++ compiler is missing; where the build directory cannot
    be written; or where another process still holds the lock after ``timeout_s``.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    builder = get_accelerator().create_op_builder(builder_name)
    name = str(getattr(builder, "NAME", builder_name))
    if installed_ops.get(name, False):  # compiled when DeepSpeed was installed
        _load(builder, name, hint)
        return
    put_interpreter_bin_on_path()
    check_build_tools()
    folder = extensions_root()
    with _build_turn(folder, name, timeout_s=timeout_s):
        wait_for_torch_lock(folder / name / "lock", timeout_s=timeout_s)
        if not (folder / name / f"{name}.so").exists():
            print(f"building {name} in {folder} (once, about a minute)", file=sys.stderr)
        _load(builder, name, f"{hint}; or remove {folder / name} and try again")


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
            "ninja is not on PATH; DeepSpeed compiles its ops with it", hint="pip install ninja"
        )
    if shutil.which(compiler.split()[0] if compiler.split() else "c++") is None:
        raise EnvironmentNotReady(
            f"no C++ compiler ({compiler!r} is not on PATH); DeepSpeed compiles its ops with it",
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

        # torch adds the Python version and the device by itself; ask it, for the folder of some op.
        folder = Path(_get_build_directory("deepspeed", verbose=False)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


@contextlib.contextmanager
def _build_turn(folder: Path, name: str, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock of one op's build."""
    path = folder / f".dslaunch-{name}.flock"
    busy = waiting_for(f"building {name} in {folder} (once, about a minute)")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock.exclusive(path, timeout_s=timeout_s, on_wait=busy))
        except OSError as error:
            raise _unwritable(path, error) from error
        yield


def _unwritable(path: Path, error: OSError) -> EnvironmentNotReady:
    return EnvironmentNotReady(
        f"cannot write {path}, where DeepSpeed's ops are built: {error.strerror}",
        hint="set TORCH_EXTENSIONS_DIR to a directory of a local disk that you can write",
    )


def wait_for_torch_lock(path: Path, *, timeout_s: float) -> None:
    """See that torch's own ``lock`` file stops no one: wait for a live holder, remove a dead one's.

    torch keeps the file open while it builds (torch/utils/file_baton.py), so a holder
    on this machine is found in /proc. Without one the file was left by a build that
    was killed, and torch would wait for it for ever. Raises EnvironmentNotReady where
    a live one still builds after ``timeout_s``.
    """
    if not path.exists():
        return
    holder = process_with_open(path)
    if holder is not None:
        what = f"process {holder}, which builds {path.parent.name}"
        gone = file_lock.poll(
            lambda: not path.exists() or process_with_open(path) is None,
            timeout_s=timeout_s,
            on_wait=lambda waited_s: print(f"waiting for {what} ({waited_s:.0f} s)", file=sys.stderr),
        )
        if not gone:
            raise EnvironmentNotReady(
                f"waited {timeout_s:g} s for {what}",
                hint="see whether that process is still at work; a private TORCH_EXTENSIONS_DIR avoids it",
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


def _load(builder: Any, name: str, hint: str) -> None:
    try:
        builder.load(verbose=False)
    except Exception as error:  # DeepSpeed's MissingCUDAException and CUDAMismatchException are bare ones
        raise EnvironmentNotReady(
            f"DeepSpeed's {name} op could not be built: {compiler_message(error)}", hint=hint
        ) from error


def compiler_message(error: BaseException) -> str:
    """The compiler's first error line, else the whole message on one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    blame = next((line for line in lines if "error:" in line.lower()), None)
    return blame or one_line(error)
