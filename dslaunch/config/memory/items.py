"""One line of a memory plan, and the moments at which it counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LOADING = "loading"  # before the first step: the model is read
ALWAYS = "always"  # between two steps: what rests
REST = "at rest"  # between two steps, but not inside one
FORWARD = "forward"  # the end of the forward pass, loss included
LOSS = "backward: start"  # the loss's own gradient, all activations still there
LAYERS = "backward: layers"  # the loss is through; a layer is being recomputed, if that is asked for
BACKWARD = "backward: end"  # the activations gone, the gradients there
REFERENCE = "forward: reference"  # the reference's pass, with the activations of the policy there
GENERATE = "generation"  # PPO: answers are written
EXPERIENCE = "experience"  # PPO: they are scored, without gradients
REDUCE = "all-reduce"  # stage 0: after the last backward pass
CONVERT = "step: convert"  # gradients become fp32
UPDATE = "step: update"  # the optimizer
OUTSIDE = "outside"  # beside what torch's allocator hands out
PAGE_CACHE = "page cache"  # host: the kernel drops it where memory is short
ON_DISK = "on nvme"

PASSES = (FORWARD, LOSS, LAYERS, BACKWARD)
PHASES = (GENERATE, EXPERIENCE, FORWARD, REFERENCE, LOSS, LAYERS, BACKWARD, REDUCE, CONVERT, UPDATE)
NO_MOMENTS = (ALWAYS, REST, OUTSIDE, PAGE_CACHE, ON_DISK)


@dataclass(frozen=True)
class Item:
    """``size`` bytes that are there in the moments ``when``."""

    name: str
    size: int
    when: tuple[str, ...] = (ALWAYS,)

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "bytes": self.size, "when": ", ".join(self.when)}


@dataclass(frozen=True)
class Estimate(Item):
    """An item that experience has between ``least`` and ``most`` bytes."""

    least: int = 0
    most: int = 0


def size_at(items: Iterable[Item], phase: str) -> int:
    """Bytes in one moment: what is always there and what is there then."""
    return sum(item.size for item in items if ALWAYS in item.when or phase in item.when)


def rest_size(items: Iterable[Item]) -> int:
    """Bytes between two steps."""
    return sum(item.size for item in items if ALWAYS in item.when or REST in item.when)


def peak_phase(items: Iterable[Item], phases: Iterable[str] | None = None) -> str:
    """The moment that takes most; without ``phases`` of all that the items name."""
    listed = list(items)
    if phases is None:
        named = dict.fromkeys(moment for item in listed for moment in item.when)
        phases = [*PHASES, *(moment for moment in named if moment not in (*PHASES, *NO_MOMENTS))]
    return max(phases, key=lambda phase: size_at(listed, phase))
