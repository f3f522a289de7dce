"""Setup -> MemoryPlan: all items, the moment that takes most, and whether device and host can hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dslaunch.config.memory.activations import activation_items
from dslaunch.config.memory.flat import worst_rank
from dslaunch.config.memory.host import HOST_PHASES, LOAD, TRAIN, checkpoint_bytes, host_items
from dslaunch.config.memory.items import (
    ALWAYS,
    CONVERT,
    ON_DISK,
    OUTSIDE,
    UPDATE,
    Estimate,
    Item,
    peak_phase,
    rest_size,
    size_at,
)
from dslaunch.config.memory.offload import rank_items
from dslaunch.config.memory.roles import critics, with_other_models
from dslaunch.config.memory.setup import Setup
from dslaunch.config.memory.states import while_loading
from dslaunch.config.memory.wide import wide_items
from dslaunch.config.memory.zeropp import quantised_travel, uncounted_keys

GIB = 2**30
# Beside torch's allocator. Experience, not measured here (docs/memory.md); none of it on a CPU.
CONTEXT_BYTES, CONTEXT_RANGE = 600_000_000, (300_000_000, 600_000_000)
NCCL_BYTES, NCCL_RANGE = 400_000_000, (50_000_000, 400_000_000)
WORKSPACE_BYTES, WORKSPACE_RANGE = 64 << 20, (8 << 20, 64 << 20)
FRAGMENTATION, FRAGMENTATION_RANGE = 0.05, (0.01, 0.10)
TIGHT = 0.05  # of what there is


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the fullest rank's device, of the fullest host and of a checkpoint.

    ``outside`` holds CUDA's context, libraries and fragmentation, which are in neither
    ``rest_bytes`` nor ``peak_bytes``. The capacities: None where the device, or the host, is not known.
    """

    items: tuple[Item, ...]
    outside: tuple[Estimate, ...]
    host: tuple[Item, ...]
    checkpoint_bytes: int
    capacity_bytes: int | None
    host_capacity_bytes: int | None = None
    on_cpu: bool = False
    overcounted: tuple[str, ...] = ()  # keys that save what is in here all the same
    uncounted: tuple[str, ...] = ()  # keys that take memory which is not in here: what seems to fit may not

    @property
    def rest_bytes(self) -> int:
        return rest_size(self.items)

    @property
    def peak_bytes(self) -> int:
        return size_at(self.items, self.phase)

    @property
    def step_bytes(self) -> int:
        """At the highest point of the optimizer's step."""
        return max(size_at(self.items, phase) for phase in (CONVERT, UPDATE))

    @property
    def phase(self) -> str:
        """The moment that takes most."""
        return peak_phase(self.items)

    @property
    def total_bytes(self) -> int:
        return self.peak_bytes + sum(item.size for item in self.outside)

    @property
    def total_range(self) -> tuple[int, int]:
        """``total_bytes`` with the least and the most that its estimates usually come to."""
        least, most = (sum(getattr(item, side) for item in self.outside) for side in ("least", "most"))
        return self.peak_bytes + least, self.peak_bytes + most

    @property
    def device_fits(self) -> bool | None:
        if self.capacity_bytes is None:
            return None
        fits = self.total_bytes <= self.capacity_bytes
        return None if (self.uncounted if fits else self.overcounted) else fits

    @property
    def host_fits(self) -> bool | None:
        if self.host_capacity_bytes is None:
            return None
        fits = self.host_peak_bytes <= self.host_capacity_bytes
        return None if self.overcounted and not fits else fits

    @property
    def fits(self) -> bool | None:
        """Whether device and host can hold it. An unknown host does not make what fits a device unknown."""
        if self.device_fits is False or self.host_fits is False:
            return False
        if self.on_cpu or (self.host_capacity_bytes is not None and self.host_fits is None):
            return self.host_fits
        return self.device_fits

    @property
    def trains(self) -> bool | None:
        """The same, where it need not be resumed on these hosts."""
        if self.fits is not False or self.device_fits is False or self.host_capacity_bytes is None:
            return self.fits
        return size_at(self.host, self.running_phase) <= self.host_capacity_bytes

    @property
    def running_phase(self) -> str:
        """The moment that takes most of the host in a run that is not resumed."""
        return peak_phase(self.host, (LOAD, TRAIN))

    @property
    def tight(self) -> bool:
        """Whether it fits by less than a twentieth, which estimates may be wrong by."""
        return self.fits is True and any(is_tight(need, size) for need, size in self._used())

    @property
    def needed_bytes(self) -> int:
        """Of a device, or on CPUs of a host."""
        return self.host_peak_bytes if self.on_cpu else self.total_bytes

    @property
    def fullness(self) -> float:
        """The largest share of what a device or a host has; 0 where neither is known."""
        return max((need / size for need, size in self._used()), default=0.0)

    def _used(self) -> list[tuple[int, int]]:
        used = [(self.total_bytes, self.capacity_bytes), (self.host_peak_bytes, self.host_capacity_bytes)]
        return [(need, size) for need, size in used if size]

    @property
    def binds(self) -> str:
        """The largest item of the moment that takes most."""
        return _largest_at(self.items, self.phase)

    @property
    def host_phase(self) -> str:
        """The moment that takes most of the host."""
        return peak_phase(self.host, HOST_PHASES)

    @property
    def host_peak_bytes(self) -> int:
        return size_at(self.host, self.host_phase)

    @property
    def host_binds(self) -> str:
        """The largest item of that moment."""
        return self.host_binds_at(self.host_phase)

    def host_binds_at(self, phase: str) -> str:
        """The largest item of a moment of the host."""
        return _largest_at(self.host, phase)

    def to_json(self) -> dict[str, Any]:
        """The ``memory`` object of ``dslaunch plan --json``."""
        return {
            "per_gpu": {
                "rest_bytes": self.rest_bytes,
                "step_bytes": self.step_bytes,
                "peak_bytes": self.peak_bytes,
                "peak_when": self.phase,
                "outside_bytes": sum(item.size for item in self.outside),
                "total_bytes": self.total_bytes,
                "total_range_bytes": list(self.total_range),
                "capacity_bytes": self.capacity_bytes,
                "fits": self.device_fits,
                "items": [item.to_json() for item in (*self.items, *self.outside)],
            },
            "per_host": {
                "peak_bytes": self.host_peak_bytes,
                "peak_when": self.host_phase,
                "capacity_bytes": self.host_capacity_bytes,
                "fits": self.host_fits,
                "items": [item.to_json() for item in self.host],
            },
            "checkpoint_bytes": self.checkpoint_bytes,
        }


def plan_memory(
    setup: Setup, capacity_gib: float | None = None, *, host_gib: float | None = None
) -> MemoryPlan:
    """The plan of the rank that needs most. ``capacity_gib`` is of one device, ``host_gib`` of one host."""
    rank = worst_rank(setup)
    states, offloaded = rank_items(setup, rank)
    passing = (*activation_items(setup), *wide_items(setup), *quantised_travel(setup))
    items = [*states, *(item for item in passing if item.size)]
    items += while_loading(setup, items)
    items, offloaded = with_other_models(setup, items, offloaded)
    peak = size_at(items, peak_phase(items))
    return MemoryPlan(
        items=tuple(items),
        outside=tuple(_outside(setup, peak)),
        host=tuple(host_items(setup, offloaded, peak)),
        checkpoint_bytes=sum(checkpoint_bytes(trained) for trained in (setup, *critics(setup))),
        capacity_bytes=None if capacity_gib is None else int(capacity_gib * GIB),
        host_capacity_bytes=None if host_gib is None else int(host_gib * GIB),
        on_cpu=setup.device_type == "cpu",
        overcounted=setup.zero.overcounted,
        uncounted=uncounted_keys(setup),
    )


def is_tight(needed: int, capacity: int) -> bool:
    """Whether less than a twentieth is left, which estimates may be wrong by."""
    return needed > (1 - TIGHT) * capacity


def resting_on_host(setup: Setup) -> int:
    """Bytes of one host between two steps that are no estimate: what is offloaded, and a CPU's own states."""
    device, host = rank_items(setup, 0)
    here = [item for item in host if ON_DISK not in item.when]
    if setup.device_type == "cpu":
        here += device
    return rest_size(here) * setup.ranks_per_host


def _outside(setup: Setup, peak: int) -> list[Estimate]:
    if setup.device_type == "cpu":
        return []
    low, high = FRAGMENTATION_RANGE
    items = [
        Estimate("CUDA context and kernels", CONTEXT_BYTES, (OUTSIDE,), *CONTEXT_RANGE),
        Estimate("cuBLAS workspaces", WORKSPACE_BYTES, (OUTSIDE,), *WORKSPACE_RANGE),
        Estimate(
            "fragmentation (5 %)", int(FRAGMENTATION * peak), (OUTSIDE,), int(low * peak), int(high * peak)
        ),
    ]
    if setup.world_size > 1:
        items.append(Estimate("NCCL buffers", NCCL_BYTES, (OUTSIDE,), *NCCL_RANGE))
    return items


def _largest_at(items: tuple[Item, ...], phase: str) -> str:
    there = [item for item in items if ALWAYS in item.when or phase in item.when]
    return max(there, key=lambda item: item.size).name
