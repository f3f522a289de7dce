"""Host memory and disk.

Measured on Linux with transformers 5.24, except what a process itself takes, which is experience
(docs/memory.md).
"""

from __future__ import annotations

from dslaunch.config.memory.flat import (
    flat_elements,
    flat_states,
    stage_3_share,
    stage_3_states,
    tensor_states,
)
from dslaunch.config.memory.items import ALWAYS, ON_DISK, PAGE_CACHE, Item
from dslaunch.config.memory.setup import Setup, shard
from dslaunch.config.memory.states import frozen_bytes
from dslaunch.config.memory.tensors import total

LOAD, TRAIN, RESUME = "loading", "training", "resuming"
HOST_PHASES = (LOAD, TRAIN, RESUME)
PROCESS_BYTES = 2_000_000_000  # 1 to 4 GB with torch, CUDA's libraries and the data loader
_GATHERED_AT_ONCE = 6  # measured with two and four ranks: 5.2 to 5.6 times the largest tensor
_FILES_BYTES, _TENSOR_BYTES = 41_070, 1_500  # of a checkpoint: DeepSpeed's scripts; names and headers


def host_items(setup: Setup, offloaded: list[Item], rank_peak: int) -> list[Item]:
    """The items of the fullest host. ``offloaded``: of one rank; ``rank_peak``: of its device.

    Where the device is the CPU, the ranks' own memory is in the host.
    """
    ranks = setup.ranks_per_host
    items = [Item("processes and libraries", PROCESS_BYTES * ranks, (ALWAYS,))]
    items += _loading(setup)
    for item in offloaded:
        when = (ON_DISK,) if ON_DISK in item.when else (TRAIN, RESUME)
        items.append(Item(f"{item.name} (offloaded)", item.size * ranks, when))
    if setup.zero.pin_memory:
        items.append(
            Item("pinned memory, rounded up (at most)", _rounding(offloaded) * ranks, (TRAIN, RESUME))
        )
    if setup.device_type == "cpu":
        items.append(Item("what the ranks compute with", rank_peak * ranks, (TRAIN,)))
    items.append(Item("checkpoint being read", _largest_part(setup) * ranks, (RESUME,)))
    return [item for item in items if item.size]


def checkpoint_bytes(setup: Setup) -> int:
    """Bytes on disk of one DeepSpeed checkpoint, over all ranks."""
    parts = (0 if setup.exclude_frozen else len(setup.frozen)) + len(setup.trainable)
    overhead = _TENSOR_BYTES * parts + (_FILES_BYTES if setup.engine == "deepspeed" else 0)
    e, numel = setup.bytes_each, setup.numel
    frozen = 0 if setup.exclude_frozen else sum(part.nbytes for part in setup.frozen)
    if setup.zero_stage == 3:
        share = stage_3_share(setup)
        own = 4 * share + stage_3_states(setup) + (0 if setup.exclude_frozen else frozen_bytes(setup))
        return own * setup.world_size + overhead
    if setup.zero_stage == 0:
        masters = 0 if e == 4 else 4 * numel
        return e * numel + frozen + masters + tensor_states(setup) + overhead
    flat = flat_elements(setup)
    weights = e * numel + (4 - e) * total(setup.fp32_trained)
    return weights + frozen + 4 * flat + flat_states(setup, setup.world_size) + overhead


def _loading(setup: Setup) -> list[Item]:
    """from_pretrained: weights of the file's own dtype stay mapped and are shared; others are copies.

    At stage 3 one module after the other is gathered, filled by the first rank and sharded again, where
    the device is: of a host's own memory that takes the shards only where they live there.
    """
    e, ranks = setup.bytes_each, setup.ranks_per_host
    size = e * setup.model.numel
    mapped = Item("weight file, mapped once", setup.model.file_bytes or size, (PAGE_CACHE,))
    if setup.method == "qlora":  # converted and quantised one tensor after the other
        return [mapped]
    if setup.zero_stage == 3:
        on_cpu = setup.device_type == "cpu"
        passing = _GATHERED_AT_ONCE * e * setup.largest if on_cpu else 0
        shards = e * sum(shard(tensor.numel, setup.world_size) for tensor in setup.model.tensors)
        here = on_cpu or setup.zero.offload_param == "cpu"
        return [mapped, Item("weights being sharded", ((shards if here else 0) + passing) * ranks, (LOAD,))]
    same = setup.model.file_dtype in (
        None,
        {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[setup.precision],
    )
    return [mapped] if same else [mapped, Item("converted weights", size * ranks, (LOAD,))]


def _rounding(offloaded: list[Item]) -> int:
    """torch's allocator of pinned memory hands out powers of two."""
    sizes = [item.size for item in offloaded if ON_DISK not in item.when]
    return sum((1 << (size - 1).bit_length()) - size for size in sizes)


def _largest_part(setup: Setup) -> int:
    """load_checkpoint holds one file at a time: a rank's own optimizer states, or the model's."""
    if setup.zero_stage == 3:
        frozen = 0 if setup.exclude_frozen else frozen_bytes(setup)
        return max(4 * stage_3_share(setup) + stage_3_states(setup), frozen)
    frozen = 0 if setup.exclude_frozen else sum(part.nbytes for part in setup.frozen)
    model = setup.bytes_each * setup.numel + frozen
    if setup.zero_stage == 0:
        return model + 4 * setup.numel + tensor_states(setup)
    return max(4 * flat_elements(setup) // setup.world_size + flat_states(setup), model)
