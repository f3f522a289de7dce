"""What a rank says when it fails: one sentence, once, with the right exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
import traceback
from pathlib import Path

from dslaunch.core.errors import (
    EXIT_HOST_LOST,
    EXIT_OUR_BUG,
    Diverged,
    DslaunchError,
    EnvironmentNotReady,
    LaunchFailed,
    one_line,
)
from dslaunch.core.events import JsonlWriter, read_lines, utc_now
from dslaunch.core.packages import explain_missing_module
from dslaunch.core.run_dir import RunDir
from dslaunch.train.whereabouts import COLLECTIVES

_PEER_LOST = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "socket timeout",
    "broken pipe",
    "nccl communicator was aborted",
    # torch/csrc/distributed/c10d/NCCLUtils.hpp. A system error is mostly a socket whose other end died.
    "ncclremoteerror",
    "ncclsystemerror",
    "remote process exited",
    "closed by remote peer",
)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_TIMED_OUT = re.compile(r"timed out waiting (\d+)ms for (?:recv|send) operation")  # gloo's unbound_buffer.cc
# DeepSpeed's op_builder/builder.py; bare Exceptions, known by name so that it need not be imported here.
_NO_CUDA_TOOLKIT = ("MissingCUDAException", "CUDAMismatchException")


def explain(error: Exception) -> DslaunchError:
    """The error as a sentence for the user. What we do not know is our bug (70)."""
    if isinstance(error, DslaunchError):
        return error
    lower = " ".join(str(error).split()).lower()
    if "loss scale already at minimum" in lower:
        return Diverged(
            "the gradients overflow even at the minimum loss scale: training has diverged",
            hint="use precision bf16 if the hardware has it, or lower optimizer.lr",
        )
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in lower:
        return EnvironmentNotReady(
            f"out of memory: {one_line(error, 200)}",
            hint="lower train_micro_batch_size_per_gpu, set model.gradient_checkpointing: true, "
            "or raise zero_optimization.stage",
        )
    if type(error).__name__ in _NO_CUDA_TOOLKIT:
        return EnvironmentNotReady(
            f"DeepSpeed cannot compile an op: {one_line(error)}",
            hint="install the CUDA toolkit of torch's CUDA version, or turn off what needs the op",
        )
    if isinstance(error, RuntimeError) and (waited := _TIMED_OUT.search(lower)) is not None:
        return LaunchFailed(
            f"a time-out: rank {os.environ.get('RANK', '0')} waited {int(waited[1]) / 1000:g} s "
            f"in {_collective_of(error)} for a rank that did not come",
            exit_code=EXIT_HOST_LOST,
            hint="see where that rank was; launch.ddp_timeout_s is how long others wait",
        )
    if isinstance(error, RuntimeError) and any(sign in lower for sign in _PEER_LOST):
        return LaunchFailed(
            "this rank lost the connection to another one",
            exit_code=EXIT_HOST_LOST,
            hint="the cause is in the log of the rank that failed first",
        )
    if isinstance(error, ModuleNotFoundError) and (missing := explain_missing_module(error)) is not None:
        return missing
    if isinstance(error, OSError) and error.errno in _DISK:
        where = f" ({error.filename})" if error.filename else ""
        return EnvironmentNotReady(f"cannot write the run's files: {error.strerror}{where}")
    return DslaunchError(
        f"internal error: {type(error).__name__}: {one_line(error, 500)}",
        hint="this is our bug; the traceback is in logs/ of the run directory",
    )


def _collective_of(error: Exception) -> str:
    """The collective that raised it, by its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    names = [frame.name for frame in frames if frame.filename.endswith(COLLECTIVES)]
    return names[0] if names else "a collective"


def report_failure(error: Exception, *, rank: int, run_dir: Path | None, since: str) -> int:
    """Print what went wrong, unless rank 0 has said the same; returns the exit code.

    Every rank's failure is an event ``rank_error``, which is also how the ranks
    learn of each other's: it works before they are connected and after.
    ``since``: when this process started (UTC), to tell its run from earlier ones.
    """
    told = explain(error)
    _record(told, rank, run_dir)
    if told.exit_code == EXIT_OUR_BUG:
        _keep_traceback(error, rank, run_dir)
    if rank == 0:
        print(told.format(), file=sys.stderr, flush=True)
    elif not (run_dir is not None and _rank_0_said(told.message, run_dir, since)):
        print(f"rank {rank}: {told.format()}", file=sys.stderr, flush=True)
    if os.environ.get("DSLAUNCH_DEBUG"):
        traceback.print_exception(error)
    return told.exit_code


def _record(error: DslaunchError, rank: int, run_dir: Path | None) -> None:
    if run_dir is None:
        return
    try:
        writer = JsonlWriter(RunDir(run_dir).events)
        writer.write("rank_error", rank=rank, exit_code=error.exit_code, message=error.message)
        writer.close()
    except OSError:  # a full disk must not hide the error itself
        pass


def _rank_0_said(message: str, run_dir: Path, since: str) -> bool:
    deadline = time.monotonic() + 1.0
    while True:
        if any(e.get("rank") == 0 and e.get("message") == message for e in _rank_errors(run_dir, since)):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def _rank_errors(run_dir: Path, since: str) -> list[dict[str, object]]:
    try:
        events = list(read_lines(RunDir(run_dir).events))
    except OSError:
        return []
    return [e for e in events if e.get("kind") == "rank_error" and str(e.get("time", "")) >= since]


def _keep_traceback(error: Exception, rank: int, run_dir: Path | None) -> None:
    if run_dir is None:
        return
    try:
        path = RunDir(run_dir).logs / f"rank-{rank}.traceback"
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"{utc_now()}\n{''.join(traceback.format_exception(error))}\n")
    except OSError:
        pass
