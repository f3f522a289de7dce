"""Joining the other ranks, and the few collectives that the training code uses by name.

Everything here goes through ``torch.distributed`` after DeepSpeed has set it up, and
must be called by every rank: a collective that one rank leaves out stops them all.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from dslaunch.core.errors import EXIT_HOST_LOST, ConfigError, EnvironmentNotReady, LaunchFailed, one_line
from dslaunch.core.verbosity import VERBOSE, verbosity
from dslaunch.train.interface import choose_interface

DEFAULT_TIMEOUT_S = 1800.0
_timeout_s = DEFAULT_TIMEOUT_S  # of the process group that this process has joined

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process among the others. ``device`` is where its tensors live."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def read_rank_environment() -> tuple[int, int, int]:
    """(rank, world_size, local_rank) from the environment that a launcher sets.

    Raises EnvironmentNotReady where a variable is missing, ConfigError where one is no number.
    """
    missing = [name for name in RANK_VARIABLES if not os.environ.get(name)]
    if missing:
        raise EnvironmentNotReady(
            f"this process was not started by a launcher: {', '.join(missing)} not set",
            hint="start it with `dslaunch launch`, `deepspeed` or `torchrun`",
        )
    numbers = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = os.environ[name]
        if not text.isdecimal():
            raise ConfigError(f"environment variable {name} is {text!r}, not a number")
        numbers.append(int(text))
    return numbers[0], numbers[1], numbers[2]


def check_device(wanted: str) -> None:
    """See that DeepSpeed runs on ``wanted`` ("cpu" or "cuda") here; before the ranks wait for each other.

    It falls back to the CPU without an error. Raises EnvironmentNotReady naming both devices.
    """
    with hold_deepspeeds_prints():
        from deepspeed.accelerator import get_accelerator

        found = get_accelerator().device_name()
    if found == wanted:
        return
    facts = (
        f"torch {torch.__version__} {'with' if torch.version.cuda or torch.version.hip else 'without'} CUDA, "
        f"{torch.cuda.device_count()} GPUs seen, DS_ACCELERATOR {os.environ.get('DS_ACCELERATOR', 'not set')}"
    )
    hint = "set DS_ACCELERATOR=cpu, as dslaunch launch does"
    if wanted == "cuda":
        hint = "install torch with CUDA, see that nvidia-smi works on this host, and unset DS_ACCELERATOR"
    raise EnvironmentNotReady(
        f"the plan is for device {wanted}, but DeepSpeed would run on {found} here ({facts})", hint=hint
    )


def init_world(*, timeout_s: float | None = None) -> World:
    """Join the process group (gloo on a CPU, NCCL on GPUs). Safe to call again.

    ``timeout_s`` bounds the rendezvous, each later collective and :func:`barrier`; by default it is what an
    earlier call gave, else half an hour. What DeepSpeed prints while it joins is held back: stdout is for
    data.
    Raises EnvironmentNotReady where the other ranks cannot be reached or the
    communication op of DeepSpeed cannot be built.
    """
    global _timeout_s
    _timeout_s = timeout_s = _timeout_s if timeout_s is None else timeout_s
    set_timeout_of_groups(timeout_s)
    rank, world_size, local_rank = read_rank_environment()
    choose_interface()
    tell_deepspeed_the_local_size()
    from dslaunch.train.jit_ops import prepare_communication

    with hold_deepspeeds_prints():
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        if not torch.distributed.is_initialized():
            prepare_communication()
            try:
                deepspeed.init_distributed(
                    auto_mpi_discovery=False, timeout=datetime.timedelta(seconds=timeout_s), verbose=False
                )
            except RuntimeError as error:  # DistNetworkError, DistStoreError and their kin
                address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                raise EnvironmentNotReady(
                    f"rank {rank} could not join {world_size} ranks at {address}: {one_line(error)}",
                    hint="see that every rank started and that the address is reachable from all hosts",
                ) from error
    if get_accelerator().device_name() == "cpu":
        unlink_deepspeeds_shared_memory(rank)
    accelerator = get_accelerator()
    device = torch.device("cpu")
    if accelerator.device_name() != "cpu":
        index = find_device(local_rank, accelerator.device_count())
        device = torch.device(accelerator.device_name(index))
        accelerator.set_device(index)
    return World(rank=rank, world_size=world_size, local_rank=local_rank, device=device)


def set_timeout_of_groups(timeout_s: float) -> None:
    """Let process groups that are made from now on have this time-out too.

    DeepSpeed makes its own ones, in which it trains, and gives them none: torch then takes its default,
    10 or 30 minutes, whatever the first group has. Source: deepspeed/utils/groups.py, ``new_group``.
    """
    distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=timeout_s)
    distributed_c10d.default_pg_nccl_timeout = datetime.timedelta(seconds=timeout_s)


def find_device(local_rank: int, num_visible: int) -> int:
    """The index of a rank's device: its local rank, or 0 where a scheduler shows each rank its own one.

    Raises EnvironmentNotReady where there are too few for that.
    """
    if local_rank < num_visible:
        return local_rank
    if num_visible == 1:  # srun --gpus-per-task=1
        return 0
    raise EnvironmentNotReady(
        f"local rank {local_rank} has no device: {num_visible} are visible to it",
        hint="start one rank for each visible device, or make more of them visible",
    )


def unlink_deepspeeds_shared_memory(rank: int, shm: Path = Path("/dev/shm")) -> None:
    """F15: take the name off this rank's buffer in shared memory. Collective; right after joining.

    DeepSpeed's CPU backend makes a buffer of 66 MiB for each rank and never removes it, so
    every run takes memory until the machine is started again. All ranks of a host have it
    mapped once they have joined; without its name it goes when the last of them ends.
    Source: ops/csrc/cpu/comm/shm.cpp ``shm_initialize``.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    torch.distributed.barrier()
    (shm / f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)


def tell_deepspeed_the_local_size() -> None:
    """F13: keep DeepSpeed's CPU backend from starting ``numactl`` again and again.

    Where LOCAL_SIZE is not set it counts devices by a child process, at stage 3 in every
    reduction of gradients; and it dies there where PATH names a directory that may not
    be read. ``deepspeed`` and ``dslaunch launch`` set the variable, torchrun does not.
    Source: accelerator/cpu_accelerator.py ``device_count``, utils/numa.py ``get_numa_cores``.
    """
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    os.environ.setdefault("LOCAL_SIZE", local_size if local_size.isdecimal() else "1")


@contextlib.contextmanager
def hold_deepspeeds_prints() -> Iterator[None]:
    """Keep what DeepSpeed prints off stdout, which is for data.

    It is dropped when all goes well and shown on stderr when not; with
    ``-v`` (``DSLAUNCH_VERBOSE=1``) it goes to stderr at once.
    """
    if verbosity() == VERBOSE:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held):
            yield
    except BaseException:
        sys.stderr.write(held.getvalue())
        raise


def barrier(what: str, *, timeout_s: float | None = None) -> None:
    """Wait until every rank has come to ``what``.

    With gloo a rank that does not come within ``timeout_s`` (default: that of
    :func:`init_world`) is named in a LaunchFailed; other backends have only the time-out
    of the process group.
    """
    timeout_s = _timeout_s if timeout_s is None else timeout_s
    if torch.distributed.get_backend() != "gloo":
        torch.distributed.barrier()
        return
    try:
        torch.distributed.monitored_barrier(
            timeout=datetime.timedelta(seconds=timeout_s), wait_all_ranks=True
        )
    except RuntimeError as error:
        raise LaunchFailed(
            f"not every rank reached {what} within {timeout_s:g} s: {one_line(error)}",
            exit_code=EXIT_HOST_LOST,
            hint="see the logs of the missing ranks; launch.ddp_timeout_s is how long others wait",
        ) from error


def all_reduce_sum(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise sum of ``values`` over all ranks, in float64. Waits for the result."""
    vector = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(vector)
    return [float(value) for value in vector.tolist()]


def peak_device_memory(device: torch.device) -> int | None:
    """The most bytes that tensors have taken on this rank's device so far; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def gather_objects(value: Any) -> list[Any]:
    """``value`` of every rank, in rank order, on every rank. For small Python objects."""
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def shutdown() -> None:
    """Leave the process group, if there is one. Collective, and only where all is well.

    The ranks meet first: a rank that leaves while another still talks to it would look like a failure.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
