"""The same with optimizer states or parameters in host memory: what stays on the device, what the host has.

Fitted to DeepSpeed 0.19.8 like ``states``; on a CPU only the sum of the two sides can be measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from dslaunch.config.memory.flat import flat_elements, flat_states, stage_3_share, stage_3_states, touched
from dslaunch.config.memory.items import CONVERT, UPDATE, Item
from dslaunch.config.memory.nvme import states_on_nvme, weights_on_nvme
from dslaunch.config.memory.setup import Setup
from dslaunch.config.memory.states import (
    bucket_items,
    frozen_bytes,
    gradient_phases,
    largest_sub_group,
    secondary_copies,
    stage_3_buffers,
    stage_3_update,
    state_items,
    sub_groups,
    update_bytes,
)

_FOREACH = 4  # bytes of each element in passing: torch's AdamW on a GPU


def rank_items(setup: Setup, rank: int) -> tuple[list[Item], list[Item]]:
    """(device items, host items) of one model's states on ``rank``, without activations."""
    if setup.zero.offload_optimizer or setup.zero.offload_param:
        return _offloaded(setup, rank)
    return state_items(setup, rank), []


def _offloaded(setup: Setup, rank: int) -> tuple[list[Item], list[Item]]:
    device, host = _stage_3(setup) if setup.zero_stage == 3 else _stage_1_2(setup, rank)
    return [item for item in device if item.size], [item for item in host if item.size]


def _stage_1_2(setup: Setup, rank: int) -> tuple[list[Item], list[Item]]:
    e, world = setup.bytes_each, setup.world_size
    flat = flat_elements(setup)
    share, largest = flat // world, max((tensor.numel for tensor in setup.trainable), default=0)
    waiting = gradient_phases(setup)
    several = setup.accumulation > 1
    device = [
        Item("frozen weights", frozen_bytes(setup)),
        Item("weights", e * flat),
        Item("one whole gradient", e * largest),
        *bucket_items(setup),
    ]
    if setup.zero_stage == 1 and several:
        device.append(Item("gradients of the whole model", setup.accum_bytes * setup.numel, waiting))
        if setup.accum_fp32:
            device += _summed_in_fp32(setup, share, largest)
    if setup.zero_stage == 2 and setup.accum_fp32:
        device.append(Item("gradients", 4 * share, (*waiting, CONVERT, UPDATE)))
    host = [
        Item("fp32 master weights", 4 * share),
        Item("fp32 gradients", 4 * share),
        Item("optimizer states", flat_states(setup)),
        Item("16-bit copy of the weights" if e == 2 else "copy of the weights", e * share),
        Item("one whole gradient", e * largest),
        Item("optimizer's temporaries", update_bytes(setup, 4) * share, (UPDATE,)),
    ]
    if setup.zero_stage == 2 and several and not setup.accum_fp32:
        host.append(Item("accumulated gradients", e * touched(setup, rank)))
    return device, host  # these stages take nvme for cpu (stage_1_and_2.py knows no nvme)


def _summed_in_fp32(setup: Setup, share: int, largest: int) -> list[Item]:
    """What stage 1 still holds in the step where it has summed 16-bit gradients in fp32."""
    bucket, in_step = setup.zero.reduce_bucket_size, (CONVERT, UPDATE)
    items = [Item("gradients", 4 * share, in_step), Item("reduce bucket in fp32", 4 * bucket, in_step)]
    if largest > bucket:  # it was reduced by itself
        items.append(Item("largest gradient in fp32", 4 * largest, in_step))
    return items


def _stage_3(setup: Setup) -> tuple[list[Item], list[Item]]:
    e, own, group = setup.bytes_each, stage_3_share(setup), largest_sub_group(setup)
    states = [
        Item("fp32 master weights", 4 * own),
        Item("optimizer states", stage_3_states(setup)),
        Item("gradients", setup.accum_bytes * own),
    ]
    weights = [
        Item("weights", e * own),
        Item("frozen weights", frozen_bytes(setup)),
        *secondary_copies(setup),
    ]
    device = stage_3_buffers(setup)
    host: list[Item] = []
    if setup.zero.offload_optimizer == "nvme":
        host += states_on_nvme(setup, states)
    elif setup.zero.offload_optimizer:
        here, there = _divided_by_ratio(setup)
        device += here
        host += there
    else:
        device += [
            *states,
            Item("fp32 gradients", 4 * group, (CONVERT, UPDATE)),
            Item("optimizer's temporaries", stage_3_update(setup).passing, (UPDATE,)),
        ]
    if setup.zero.offload_param == "nvme":
        host += weights_on_nvme(setup)
    elif setup.zero.offload_param:
        host += weights
    else:
        device += weights
    return device, host


def _divided_by_ratio(setup: Setup) -> tuple[list[Item], list[Item]]:
    """(device items, host items) of the states: with a ratio below 1 the first sub-groups stay on the device.

    torch's AdamW updates those; their 16-bit gradients are in the host all the same (stage3.py,
    subgroup_to_device, measured). Planned for a CPU both are one memory.
    """
    sizes = [sum(group) for group in sub_groups(setup)]
    ratio = setup.zero.optimizer_ratio if setup.device_type != "cpu" else 1.0
    kept = int((1 - ratio) * len(sizes))
    device = _updated(setup, sizes[:kept], _FOREACH) if kept else []
    host = _updated(setup, sizes[kept:], setup.optimizer.temporary)
    return device, [*host, Item("gradients", setup.accum_bytes * sum(sizes))]


def _updated(setup: Setup, sizes: Sequence[int], temporary: int) -> list[Item]:
    own = sum(sizes)
    return [
        Item("fp32 master weights", 4 * own),
        Item("optimizer states", setup.optimizer.states(own)),
        Item("fp32 gradients", 4 * own),
        Item("optimizer's temporaries", temporary * max(sizes, default=0), (UPDATE,)),
    ]
