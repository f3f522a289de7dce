"""What of a rank's states and weights lies on an NVMe disk at stage 3, and what its host keeps all the same.

Read in DeepSpeed 0.19.8 (zero/stage3.py, swap_tensor/) and measured by ``benchmarks/memory.py --nvme``.
"""

from __future__ import annotations

from collections.abc import Sequence

from dslaunch.config.memory.items import CONVERT, ON_DISK, UPDATE, Item
from dslaunch.config.memory.setup import Setup, shard
from dslaunch.config.memory.states import sub_groups

_SMALLEST = 2**20  # bytes; swap_tensor/utils.py MIN_AIO_BYTES: what is smaller stays in the host


def states_on_nvme(setup: Setup, states: Sequence[Item]) -> list[Item]:
    """Host items for the optimizer's ``states`` of a rank, sub-group by sub-group.

    The host keeps the accumulated gradients and a pool of buffers that each hold one state of the largest
    sub-group.
    """
    groups = sub_groups(setup)
    sizes = [sum(group) for group in groups]
    own, large = sum(sizes), [i for i, size in enumerate(sizes) if 4 * size >= _SMALLEST]
    swapped = sum(sizes[i] for i in large)
    found = [
        Item("buffers for states on nvme", 4 * setup.zero.optimizer_buffer_count * max(sizes, default=0))
    ]
    for item in states:
        gone = item.size * swapped // max(own, 1) if item.name != "gradients" else 0
        found += [Item(item.name, item.size - gone), Item(item.name, gone, (ON_DISK,))]
    gradients, temporaries = _highest_update(setup, [sizes[i] for i in large])
    return [
        *found,
        Item("fp32 gradients in passing", gradients, (CONVERT, UPDATE)),
        Item("optimizer's temporaries", temporaries, (UPDATE,)),
        Item("fp32 gradients", 4 * (own - swapped)),
        Item("fp32 gradients", 4 * swapped, (ON_DISK,)),
    ]


def _highest_update(setup: Setup, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes of (fp32 gradients, temporaries) while that sub-group is updated which needs most of both.

    Gradients that were not summed in fp32 are there in fp32, besides the copy on the disk, until the
    update of their sub-group.
    """
    copied = 4 if setup.accum_bytes < 4 else 0
    both = [(copied * sum(sizes[i:]), setup.optimizer.temporary * size) for i, size in enumerate(sizes)]
    return max(both, key=sum, default=(0, 0))


def weights_on_nvme(setup: Setup) -> list[Item]:
    """Host items for a rank's weights.

    ``max_in_cpu`` elements have a place in the host, filled by whole sub-groups. Where one is left over,
    DeepSpeed reserves room for the *undivided* tensors of the largest. Small tensors never leave the host.
    """
    e, zero, groups = setup.bytes_each, setup.zero, sub_groups(setup)
    room = min(zero.max_in_cpu, sum(map(sum, groups)))
    out = _beyond(room, [sum(group) for group in groups])
    parts = [e * numel for i in out for numel in groups[i]]
    frozen = [shard(part.elements, setup.world_size) * part.element_bytes for part in setup.frozen]
    replicated = sum(part.replicated for part in setup.frozen)
    return [
        Item("buffers for weights on nvme", e * zero.param_buffer_count * zero.param_buffer_size),
        Item("weights (max_in_cpu)", e * room),
        Item("room for the largest sub-group", e * _largest_undivided(setup) if out else 0),
        Item("small weights", sum(size for size in parts if size < _SMALLEST)),
        Item("frozen weights", sum(size for size in frozen if size < _SMALLEST) + replicated),
        Item("weights", sum(size for size in parts if size >= _SMALLEST), (ON_DISK,)),
        Item("frozen weights", sum(size for size in frozen if size >= _SMALLEST), (ON_DISK,)),
    ]


def least_param_buffer(setup: Setup) -> int:
    """Elements that ``offload_param.buffer_size`` must have: the largest share of a tensor that is swapped.

    DeepSpeed stops at start where it is smaller (partitioned_param_swapper.py, get_buffer; run).
    """
    if setup.zero_stage != 3 or setup.zero.offload_param != "nvme":
        return 0
    shares = [(shard(t.numel, setup.world_size), setup.bytes_each) for t in setup.trainable]
    shares += [(shard(part.elements, setup.world_size), part.element_bytes) for part in setup.frozen]
    return max((numel for numel, size in shares if numel * size >= _SMALLEST), default=0)


def _beyond(room: int, sizes: Sequence[int]) -> list[int]:
    """Numbers of the sub-groups that do not end within ``room`` elements (stage3.py, flat_offset)."""
    found, offset = [], 0
    for number, size in enumerate(sizes):
        offset += size
        if offset > room:
            found.append(number)
    return found


def _largest_undivided(setup: Setup) -> int:
    """Elements of the tensors, whole, of the largest sub-group (reserve_partitioned_swap_space)."""
    groups = sub_groups(setup)
    largest = max(range(len(groups)), key=lambda number: sum(groups[number]), default=None)
    if largest is None:
        return 0
    first = sum(map(len, groups[:largest]))
    return sum(tensor.numel for tensor in setup.trainable[first : first + len(groups[largest])])
