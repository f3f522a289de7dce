"""What a launch doubts of hosts that can start its ranks: told once, before they start. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

GIB = 2**30
_SHM_PER_RANK = GIB
_MOST_SKEW_S = 5.0
_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class ReadyHost:
    """What an agent said when it was ready. ``skew_s``: how far its clock is ahead of ours.

    ``versions``: of torch and DeepSpeed, where they are installed beside the program that ranks run;
    ``gpus``: the models of NVIDIA's, where ranks use them.
    """

    name: str
    num_ranks: int
    shm_bytes: int | None = None
    skew_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()


def ready_host(name: str, num_ranks: int, said: Mapping[str, Any], now: float) -> ReadyHost:
    """Parse the agent's ``ready`` event, heard at ``now`` (seconds since 1970)."""
    return ReadyHost(
        name=name,
        num_ranks=num_ranks,
        shm_bytes=said["shm_bytes"],
        skew_s=said["time"] - now,
        versions=said["versions"],
        gpus=tuple(sorted(set(said["gpus"]))),
    )


def find_doubts(hosts: Sequence[ReadyHost]) -> list[str]:
    """A sentence for each: unequal torch, DeepSpeed or GPUs, a small /dev/shm, a wrong clock."""
    doubts = []
    for package in ("torch", "deepspeed"):
        versions = {host.name: host.versions[package] for host in hosts if package in host.versions}
        doubts += _unequal(package, versions, "ranks may hang or compute something else")
    gpus = {host.name: ", ".join(host.gpus) for host in hosts if host.gpus}
    doubts += _unequal("the GPU", gpus, "the others wait for the slowest, and fit what the smallest fits")
    small: dict[tuple[str, str], list[str]] = {}
    for host in hosts:
        if (problem := shm_problem(host.shm_bytes, host.num_ranks)) is not None:
            small.setdefault((problem, shm_hint(host.num_ranks)), []).append(host.name)
    doubts += [f"{_names(names)}: {problem}; {hint}" for (problem, hint), names in small.items()]
    middle = median(host.skew_s for host in hosts)
    for host in hosts:
        if (problem := clock_problem(host.skew_s - middle)) is not None:
            doubts.append(f"{host.name}: {problem}")
    return doubts


def _unequal(what: str, value_of: Mapping[str, str], so: str) -> list[str]:
    """A sentence for each value that most hosts have not; ``value_of`` is by host."""
    hosts_of: dict[str, list[str]] = {}
    for name, value in value_of.items():
        hosts_of.setdefault(value, []).append(name)
    (usual, _), *others = sorted(hosts_of.items(), key=lambda item: -len(item[1])) or [("", [])]
    return [
        f"{what} is {value} on {_names(names)}, but {usual} on the others: {so};"
        f" --exclude {'@'.join(names)} leaves that out"
        for value, names in others
    ]


def shm_problem(total_bytes: int | None, num_ranks: int) -> str | None:
    """Why a /dev/shm of this size is too small; None where it is not, or not known."""
    if total_bytes is None or total_bytes >= num_ranks * _SHM_PER_RANK:
        return None
    size = f"{gib(total_bytes)} for {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    return f"/dev/shm is {size}: NCCL and data loaders die of a bus error where it is full"


def shm_hint(num_ranks: int) -> str:
    """How to make it larger."""
    size = f"{max(8, 2 * num_ranks)}g"
    return f"docker run --shm-size={size} (or --ipc=host); on a host: mount -o remount,size={size} /dev/shm"


def clock_problem(skew_s: float) -> str | None:
    """That a clock is wrong, which is so far ahead of the others'; None where it is not."""
    if abs(skew_s) <= _MOST_SKEW_S:
        return None
    return f"its clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the others'"


def gib(size: int) -> str:
    """Bytes in words."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - _NAMED
    return ", ".join(hosts[:_NAMED]) + (f" and {more} more" if more > 0 else "")
