"""Last words of ranks, as torch, Python and the kernel write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.launch.symptoms import is_time_out, recognise, waited_in

WATCHDOG = (
    "[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=46, NumelOut=46, Timeout(ms)=600000) "
    "ran for 600067 milliseconds before timing out."
)
OLD_WATCHDOG = (
    "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=469508, OpType=_ALLGATHER_BASE, Timeout(ms)=1800000) ran for 1802212 milliseconds"
)
GLOO = (
    '[rank0]:   File "/v/torch/distributed/distributed_c10d.py", line 3252, in all_reduce',
    "[rank0]:     work.wait()",
    "[rank0]: RuntimeError: [/__w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv "
    "operation to complete",
)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total"],
            "the GPU's memory is full, 2.50 GiB more did not fit; use a smaller train_micro",
        ),
        (["torch.cuda.OutOfMemoryError: HIP out of memory. Tried"], "the GPU's memory is full; use"),
        (["RuntimeError: CUDA error: out of memory"], "the GPU's memory is full; use"),
        ([WATCHDOG], "an NCCL time-out: rank 4 waited 600 s in ALLREDUCE (its number 1580)"),
        ([OLD_WATCHDOG], "an NCCL time-out: rank 1 waited 1800 s in _ALLGATHER_BASE (its number 469508)"),
        ([WATCHDOG, "RuntimeError: something else"], "an NCCL time-out: rank 4"),
        (GLOO, "a gloo time-out: it waited 4 s in all_reduce for a rank that did not come"),
        (
            ["RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
             "allocate memory: you tried to allocate 40000000 bytes. Error code 12 (Cannot allocate memory)"],
            "the host's memory is full",
        ),
        (["MemoryError"], "the host's memory is full"),
        (
            ["torch.distributed.DistBackendError: NCCL error in: /x/ProcessGroupNCCL.cpp:2094, remote "
             "process exited or there was a network error, NCCL version 2.27.5"],
            "a consequence: another rank went away",
        ),
        (["torch.AcceleratorError: CUDA error: out of memory"], "the GPU's memory is full; use"),
        (
            ["RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 4000 ms"],
            "a time-out: rank 1, 3 did not come to the barrier within 4000 ms",
        ),
        (
            ["RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1269."],
            "a consequence: another rank went away",
        ),
        (
            ["torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while "
             "trying to connect to (10.0.0.1, 29500)."],
            "rank 0 did not answer at 10.0.0.1 port 29500",
        ),
        (
            ["torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
             "network address. port: 45261, useIpv6: false, code: -98, name: EADDRINUSE"],
            "port 45261 is taken by another process",
        ),
        (
            ["RuntimeError: The server socket has failed to listen on any local network address. The server "
             "socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."],
            "port 29500 is taken by another process",
        ),
        (["OSError: [Errno 98] Address already in use"], "a port that it wanted to listen on is taken"),
        (["ModuleNotFoundError: No module named 'flash_attn'"], "the ranks' Python has no module flash_attn"),
        (
            ["OSError: [Errno 28] No space left on device: '/data/x.bin'"],
            "the disk of /data/x.bin is full; free space there",
        ),
        (["OSError: [Errno 28] No space left on device"], "the disk is full; free"),
        (["OSError: [Errno 122] Disk quota exceeded: '/home/me/x'"], "your disk quota is used up"),
        (
            ["RuntimeError: unable to write to file </torch_12_34_0>: No space left on device (28)"],
            "/dev/shm is full",
        ),
        (["RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It"], "/dev/shm is full"),
        (["RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "], "a data loader's"),
        (
            [
                "[rank1]: ModuleNotFoundError: No module named 'ds_op'",
                "[rank1]: During handling of the above exception, another exception occurred:",
                "[rank1]: RuntimeError: cannot build the op",
            ],
            "the ranks' Python has no module ds_op",
        ),
        (
            [
                "ModuleNotFoundError: No module named 'ninja'",
                "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x7f>",
                "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",
            ],
            "the ranks' Python has no module ninja",
        ),
    ],
)  # fmt: skip
def test_recognised(lines: list[str], words: str) -> None:
    assert (recognise(lines) or "").startswith(words)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["Killed"],
        ["WARNING: CUDA out of memory is caught and a smaller batch is tried"],
        # Caught and told; what ended the program is another matter.
        ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", "KeyError: 'text'"],
        ["INFO: Address already in use, next port tried", "ValueError: bad config"],
        ["ImportError: cannot import name 'x' from 'y'"],
        ["retry 3: [Errno 28] No space left on device"],
        ["TimeoutError: timed out"],
    ],
)
def test_not_claimed(lines: list[str]) -> None:
    assert recognise(lines) is None


OURS = "rank 1: Error: a time-out: rank 1 waited 4 s in all_reduce for a rank that did not come"


@pytest.mark.parametrize(
    ("lines", "collective"),
    [
        ([WATCHDOG], "ALLREDUCE"),
        (GLOO, "all_reduce"),
        ([OURS], "all_reduce"),
        (["RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 4000 ms"], None),
    ],
)
def test_time_outs(lines: list[str], collective: str | None) -> None:
    assert is_time_out(lines)
    assert waited_in(lines) == collective


def test_other_failures_are_no_time_outs() -> None:
    assert not is_time_out(["TimeoutError: timed out", *GLOO[:2], "KeyError: 'text'"])
    assert waited_in([*GLOO[:2], "KeyError: 'text'"]) is None


def test_what_python_itself_writes(tmp_path: Path) -> None:
    programs = {
        "import no_such_module_here": "the ranks' Python has no module no_such_module_here",
        "print('x' * 99999, file=open('/dev/full', 'w'))": "the disk is full",
        "import socket\na = socket.create_server(('127.0.0.1', 0))\n"
        "b = socket.socket(); b.bind(a.getsockname())": "a port that it wanted to listen on is taken",
    }
    for program, words in programs.items():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (recognise(done.stderr.splitlines()) or "").startswith(words), done.stderr
