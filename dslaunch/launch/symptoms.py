"""What a failed rank's last lines of stderr say, recognised: one sentence and one thing to do. Pure.

Only texts that torch, Python and the kernel are known to write are matched, and of exceptions only
that which ended the program, or led to it: a wrong guess costs more than none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_Say = Callable[["re.Match[str]", Sequence[str]], str]

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")  # torch puts it before each line of a traceback
_EXCEPTION = re.compile(r"^([A-Za-z_]\w*\.)*[A-Za-z_]\w*(Error|Exception)(: |$)")
_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
    "Exception ignored in",
)
_COLLECTIVE = re.compile(r'distributed_c10d\.py", line \d+, in ([a-z]\w*)')


def is_time_out(lines: Sequence[str]) -> bool:
    """Whether the last lines of a rank say that it waited in vain for another one."""
    return any(pattern.search(line) for pattern in _TIME_OUTS for line in lines)


def waited_in(lines: Sequence[str]) -> str | None:
    """The collective in which a rank waited in vain, by its last lines; None where they do not say it."""
    for line in lines:
        if (match := _WATCHDOG.search(line)) or (match := _OWN_TIME_OUT.search(line)):
            return match["collective"]
    names = [found[1] for line in lines if (found := _COLLECTIVE.search(line))]
    return names[-1] if names and is_time_out(lines) else None


def recognise(lines: Sequence[str]) -> str | None:
    """What the last lines of a rank that failed look like, and what to do; None where they are not known."""
    plain = [_RANK_PREFIX.sub("", line) for line in lines]
    for pattern, say in _LOGGED:
        for line in plain:
            if (match := pattern.search(line)) is not None:
                return say(match, plain)
    for line in _exceptions(plain):
        for pattern, say in _RAISED:
            if (match := pattern.search(line)) is not None:
                return say(match, plain)
    return None


def _exceptions(lines: Sequence[str]) -> list[str]:
    """The first lines of the exception that came last and of those that led to it, the last first."""
    found: list[str] = []
    linked = True
    for line in reversed(lines):
        if line.startswith(_CHAINED):
            linked = True
        elif _EXCEPTION.match(line):
            if not linked:
                break
            found.append(line)
            linked = False
    return found


def _seconds(milliseconds: str) -> str:
    return f"{int(milliseconds) / 1000:g} s"


def _nccl_timeout(match: re.Match[str], lines: Sequence[str]) -> str:
    return (
        f"an NCCL time-out: rank {match['rank']} waited {_seconds(match['ms'])} in {match['collective']} "
        f"(its number {match['number']}) for ranks that did not come"
    )


def _gloo_timeout(match: re.Match[str], lines: Sequence[str]) -> str:
    collective = waited_in(lines)
    where = "" if collective is None else f" in {collective}"
    return f"a gloo time-out: it waited {_seconds(match[1])}{where} for a rank that did not come"


def _port_taken(match: re.Match[str], lines: Sequence[str]) -> str:
    port = re.search(r"port: (\d+)|]:(\d+) \(errno", match.string)
    which = f"port {port[1] or port[2]}" if port else "a port that it wanted to listen on"
    return (
        f"{which} is taken by another process; for MASTER_PORT leave --master-port out, "
        "and a free one is found"
    )


def _out_of_device_memory(match: re.Match[str], lines: Sequence[str]) -> str:
    size = re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", match.string)
    more = f", {size[1]} more did not fit" if size else ""
    return (
        f"the GPU's memory is full{more}; use a smaller train_micro_batch_size_per_gpu, "
        "or a higher zero_optimization.stage"
    )


def _no_space(match: re.Match[str], lines: Sequence[str]) -> str:
    path = re.search(r"No space left on device: '(.+?)'", match.string)
    return f"the disk{f' of {path[1]}' if path else ''} is full; free space there, or write elsewhere"


def _fixed(text: str) -> _Say:
    """``text`` with {1}, {2} for the groups of the match."""
    return lambda match, lines: text.format(match[0], *match.groups())


_WATCHDOG = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<collective>\w+),.*\bTimeout\(ms\)=(?P<ms>\d+)\)"
)
_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier in (\d+) ms")
_GLOO_TIME_OUT = re.compile(
    r"gloo/transport/\S+ Timed out waiting (\d+)ms for (?:recv|send) operation to complete"
)
# Our own worker's: see dslaunch.train.failures.
_OWN_TIME_OUT = re.compile(
    r"a time-out: rank \d+ waited \S+ s in (?P<collective>.+) for a rank that did not come"
)
_TIME_OUTS = (_WATCHDOG, _BARRIER, _GLOO_TIME_OUT, _OWN_TIME_OUT)
# Lines that native code logs, whatever exception follows.
_LOGGED: tuple[tuple[re.Pattern[str], _Say], ...] = (
    (_WATCHDOG, _nccl_timeout),
    (_BARRIER, _fixed("a time-out: rank {1} did not come to the barrier within {2} ms")),
)
# Exceptions.
_RAISED: tuple[tuple[re.Pattern[str], _Say], ...] = (
    (
        re.compile(r"^MemoryError|DefaultCPUAllocator: (?:can't|not enough) .*memory"),
        _fixed("the host's memory is full, or a limit of it (ulimit -v) reached; use less, or more hosts"),
    ),
    (
        re.compile(r"DistBackendError: .*remote process exited or there was a network error"),
        _fixed("a consequence: another rank went away, and NCCL's connection with it; see the others' logs"),
    ),
    (
        re.compile(
            r"OutOfMemoryError: (CUDA|HIP|XPU) out of memory\.|^RuntimeError: (CUDA|HIP) out of memory\."
        ),
        _out_of_device_memory,
    ),
    (
        re.compile(r"^(?:RuntimeError|torch\.AcceleratorError): CUDA error: out of memory"),
        _out_of_device_memory,
    ),
    (_GLOO_TIME_OUT, _gloo_timeout),
    (
        re.compile(r"gloo/transport/\S+ (?:Connection closed by peer|.*Connection reset by peer)"),
        _fixed("a consequence: another rank went away, and the connection with it; see the others' logs"),
    ),
    (
        re.compile(r"The client socket has timed out after \d+ms while trying to connect to \((.+), (\d+)\)"),
        _fixed("rank 0 did not answer at {1} port {2}; see its log, and whether a firewall is in between"),
    ),
    (
        re.compile(
            r"^OSError: \[Errno 98\] Address already in use"
            r"|The server socket has failed to listen on any local network address.*(EADDRINUSE|errno: 98)"
            r"|^RuntimeError: Address already in use"
        ),
        _port_taken,
    ),
    (
        re.compile(r"^ModuleNotFoundError: No module named '([^']+)'"),
        _fixed("the ranks' Python has no module {1}; install the package that has it, on every host"),
    ),
    (
        re.compile(r"^RuntimeError: unable to .*</torch_\S+>.*No space left on device \(28\)"),
        _fixed("/dev/shm is full; in a container raise its size (docker run --shm-size)"),
    ),
    (re.compile(r"\[Errno 28\] No space left on device"), _no_space),
    (
        re.compile(r"^OSError: \[Errno 122\] Disk quota exceeded"),
        _fixed("your disk quota is used up; free space, or write elsewhere"),
    ),
    (
        re.compile(r"^RuntimeError: DataLoader worker \(pid \d+\) is killed by signal: Bus error"),
        _fixed("/dev/shm is full; in a container raise its size (docker run --shm-size)"),
    ),
    (
        re.compile(r"^RuntimeError: DataLoader worker \(pid (\d+)\) is killed by signal: Killed"),
        _fixed("a data loader's process was killed, often for want of host memory; use fewer num_workers"),
    ),
)
