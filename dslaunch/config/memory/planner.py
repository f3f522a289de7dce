"""Setup -> MemoryPlan: all items, the moment that takes most, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dslaunch.config.memory.activations import activation_items
from dslaunch.config.memory.host import HOST_PHASES, checkpoint_bytes, host_items
from dslaunch.config.memory.items import OUTSIDE, PHASES, Item, peak_phase, rest_size, size_at
from dslaunch.config.memory.offload import offload_items
from dslaunch.config.memory.setup import Setup, worst_rank
from dslaunch.config.memory.states import state_items

GIB = 2**30
# Beside torch's allocator. Experience, not measured here (docs/memory.md); none of it on a CPU.
CONTEXT_BYTES = 600_000_000
NCCL_BYTES = 400_000_000
WORKSPACE_BYTES = 64 << 20
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the fullest rank's device, of the fullest host and of a checkpoint.

    ``outside`` holds CUDA's context, libraries and fragmentation, which are in neither
    ``rest_bytes`` nor ``peak_bytes``. ``capacity_bytes`` and ``fits``: None where the device is unknown.
    """

    items: tuple[Item, ...]
    outside: tuple[Item, ...]
    host: tuple[Item, ...]
    checkpoint_bytes: int
    capacity_bytes: int | None

    @property
    def rest_bytes(self) -> int:
        return rest_size(self.items)

    @property
    def peak_bytes(self) -> int:
        return size_at(self.items, self.phase)

    @property
    def phase(self) -> str:
        """The moment that takes most."""
        return peak_phase(self.items)

    @property
    def total_bytes(self) -> int:
        return self.peak_bytes + sum(item.size for item in self.outside)

    @property
    def fits(self) -> bool | None:
        return None if self.capacity_bytes is None else self.total_bytes <= self.capacity_bytes

    @property
    def binds(self) -> str:
        """The largest item of the moment that takes most."""
        there = [item for item in self.items if item.when == ("always",) or self.phase in item.when]
        return max(there, key=lambda item: item.size).name

    @property
    def host_peak_bytes(self) -> int:
        return size_at(self.host, peak_phase(self.host, HOST_PHASES))

    def to_json(self) -> dict[str, Any]:
        """The ``memory`` object of ``dslaunch plan --json``."""
        return {
            "per_gpu": {
                "rest_bytes": self.rest_bytes,
                "peak_bytes": self.peak_bytes,
                "peak_when": self.phase,
                "outside_bytes": sum(item.size for item in self.outside),
                "total_bytes": self.total_bytes,
                "capacity_bytes": self.capacity_bytes,
                "fits": self.fits,
                "items": [item.to_json() for item in (*self.items, *self.outside)],
            },
            "per_host": {
                "peak_bytes": self.host_peak_bytes,
                "items": [item.to_json() for item in self.host],
            },
            "checkpoint_bytes": self.checkpoint_bytes,
        }


def plan_memory(setup: Setup, capacity_gib: float | None = None) -> MemoryPlan:
    """The plan of the rank that needs most. ``capacity_gib``: what one device offers."""
    rank = worst_rank(setup.trainable, setup.world_size) if setup.trainable else 0
    states, offloaded = rank_items(setup, rank)
    items = [*states, *(item for item in activation_items(setup) if item.size)]
    peak = max(size_at(items, phase) for phase in PHASES)
    return MemoryPlan(
        items=tuple(items),
        outside=tuple(_outside(setup, peak)),
        host=tuple(host_items(setup, offloaded, peak)),
        checkpoint_bytes=checkpoint_bytes(setup),
        capacity_bytes=None if capacity_gib is None else int(capacity_gib * GIB),
    )


def rank_items(setup: Setup, rank: int) -> tuple[list[Item], list[Item]]:
    """(device items, host items) of the model's states on ``rank``, without activations."""
    if setup.zero.offload_optimizer or setup.zero.offload_param:
        return offload_items(setup, rank)
    return state_items(setup, rank), []


def _outside(setup: Setup, peak: int) -> list[Item]:
    if setup.device_type == "cpu":
        return []
    items = [
        Item("CUDA context and kernels", CONTEXT_BYTES, (OUTSIDE,)),
        Item("cuBLAS workspaces", WORKSPACE_BYTES, (OUTSIDE,)),
        Item("fragmentation (5 %)", int(FRAGMENTATION * peak), (OUTSIDE,)),
    ]
    if setup.world_size > 1:
        items.append(Item("NCCL buffers", NCCL_BYTES, (OUTSIDE,)))
    return items
