"""How stages 1 to 3 lay out what is trained: one vector for each group of the optimizer, in equal parts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from dslaunch.config.memory.setup import Setup, flat_size, shard
from dslaunch.config.memory.tensors import Tensor, total


def flat_elements(setup: Setup) -> int:
    """Elements of the flat buffers of stages 1 and 2, over all ranks."""
    return sum(flat_size(group.numel, setup.world_size) for group in setup.groups)


def flat_states(setup: Setup, ranks: int = 1) -> int:
    """Bytes of the optimizer's states of ``ranks`` ranks at stages 1 and 2."""
    world = setup.world_size
    sizes = [ranks * flat_size(group.numel, world) // world for group in setup.groups]
    return sum(group.cost.states(size) for group, size in zip(setup.groups, sizes, strict=True))


class Update(NamedTuple):
    """That which needs most of all groups', one after the other: of ``numel`` elements, with ``passing``
    bytes in passing, while later groups wait with ``kept`` bytes of gradients."""

    numel: int
    passing: int
    kept: int

    @property
    def size(self) -> int:
        return 4 * self.numel + self.passing + self.kept


def flat_update(setup: Setup, kept: int = 0) -> Update:
    """That of stages 1 and 2. ``kept``: bytes of a rank's gradients, one storage until the last group."""
    found = [Update(0, 0, 0)]
    for group in setup.groups:
        numel = flat_size(group.numel, setup.world_size) // setup.world_size
        passing = group.cost.in_passing(group.tensors, numel, shared=setup.world_size > 1)
        found.append(Update(numel, passing, 0 if group is setup.groups[-1] else kept))
    return max(found, key=lambda update: update.size)


def largest_flat(setup: Setup) -> int:
    """Elements of a rank's largest group at stages 1 and 2."""
    world = setup.world_size
    return max((flat_size(group.numel, world) // world for group in setup.groups), default=0)


def tensor_states(setup: Setup) -> int:
    """Bytes of the optimizer's states where tensors are whole."""
    return sum(group.cost.states_of(group.tensors) for group in setup.groups)


def tensor_update(setup: Setup) -> int:
    """Bytes in passing where tensors are updated one by one."""
    return max((g.cost.in_passing([t], t.numel) for g in setup.groups for t in g.tensors), default=0)


def stage_3_share(setup: Setup) -> int:
    """Trained elements of one rank at stage 3: each tensor is divided by itself and rounded up."""
    return sum(shard(tensor.numel, setup.world_size) for tensor in setup.trainable)


def stage_3_states(setup: Setup) -> int:
    """Bytes of the optimizer's states of one rank at stage 3."""
    world = setup.world_size
    shares = [sum(shard(tensor.numel, world) for tensor in group.tensors) for group in setup.groups]
    return sum(group.cost.states(share) for group, share in zip(setup.groups, shares, strict=True))


def touched(setup: Setup, rank: int) -> int:
    """Elements of every tensor that reaches into ``rank``'s parts, and of their pads."""
    return sum(touching(group.tensors, setup.world_size, rank) for group in setup.groups)


def touching(tensors: Sequence[Tensor], world_size: int, rank: int) -> int:
    """Elements of every tensor that reaches into ``rank``'s part of the flat buffer, and of its pad.

    DeepSpeed keeps gradients of stages 1 and 2 by whole tensors (stage_1_and_2.py, get_partition_info).
    """
    numel = sum(tensor.numel for tensor in tensors)
    size = flat_size(numel, world_size) // world_size
    begin, end = rank * size, (rank + 1) * size
    found = position = 0
    for tensor in tensors:
        if position < end and position + tensor.numel > begin:
            found += tensor.numel
        position += tensor.numel
    return found + max(0, end - max(numel, begin))


def worst_rank(setup: Setup) -> int:
    """The rank whose parts are touched by most elements."""
    return _worst_rank(tuple(group.tensors for group in setup.groups), setup.world_size)


@functools.lru_cache(maxsize=64)
def _worst_rank(groups: tuple[tuple[Tensor, ...], ...], world_size: int) -> int:
    found = [0] * world_size
    for tensors in groups:
        numel = total(tensors)
        size = flat_size(numel, world_size) // world_size
        position = 0
        for tensor in tensors:
            if tensor.numel:
                for rank in range(position // size, (position + tensor.numel - 1) // size + 1):
                    found[rank] += tensor.numel
            position += tensor.numel
        for rank in range(world_size):
            found[rank] += max(0, (rank + 1) * size - max(numel, rank * size))
    return max(range(world_size), key=found.__getitem__)
