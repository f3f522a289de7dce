"""What ZeRO++ takes when weights and gradients travel in 8 and 4 bits, at stage 3.

Read in DeepSpeed 0.19.8, not measured: its kernels run on GPUs alone, and on a CPU DeepSpeed stops at start.
At rest nothing is kept in 8 bits but what a script has quantised with ``quantize_nontrainable_params``, so
the plan counts frozen weights as they are without it, which is the most that they can take. Left out:
scales (4 bytes for 4,000 to 16,000 elements).
"""

from __future__ import annotations

from dslaunch.config.memory.items import BACKWARD, FORWARD, LAYERS, Item
from dslaunch.config.memory.setup import Frozen, Setup, shard

_LEAST_SHARD, _LEAST_WHOLE = 2048, 500_000  # quantize_nontrainable_params leaves smaller tensors alone


def quantised_travel(setup: Setup) -> list[Item]:
    """The items of stage 3; none on one rank, which gathers nothing."""
    if setup.world_size == 1 or setup.zero_stage != 3:
        return []
    return [
        Item("weights being quantised and restored (read)", _weights(setup), (FORWARD, LAYERS)),
        Item("gradients being quantised and restored (read)", _gradients(setup), (LAYERS, BACKWARD)),
    ]


def uncounted_keys(setup: Setup) -> tuple[str, ...]:
    """The keys whose memory is not known: nobody knows what becomes of codes that are quantised again."""
    if setup.zero_stage != 3 or setup.method != "qlora":
        return ()
    keys = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    return tuple(key for key in keys if getattr(setup.zero, key))


def frozen_in_8_bit(setup: Setup) -> int:
    """Bytes less on a rank where a script has quantised its frozen weights."""
    world, zero = setup.world_size, setup.zero
    if setup.zero_stage != 3 or not zero.zero_quantized_nontrainable_weights or setup.method != "lora":
        return 0
    return sum(
        (part.element_bytes - 1) * shard(part.elements, world)
        for part in setup.frozen
        if _is_quantised(part, world)
    )


def _is_quantised(part: Frozen, world: int) -> bool:
    return shard(part.elements, world) > _LEAST_SHARD and part.elements > _LEAST_WHOLE


def _weights(setup: Setup) -> int:
    """partition_parameters.py, _all_gather_coalesced and AllGatherCoalescedHandle.wait.

    Of what is gathered in one go: own shards end to end, in fp16 and as codes; the codes of all
    ranks; and these in fp16, from which the weights themselves are copied.
    """
    zero = setup.zero
    if not (zero.zero_quantized_weights or (zero.zero_quantized_nontrainable_weights and setup.frozen)):
        return 0
    numel = setup.model.numel + (setup.numel if setup.method != "full" else 0)
    at_once = min(numel, max(setup.largest, zero.stage3_prefetch_bucket_size))
    return (setup.bytes_each + 2 + 1) * shard(at_once, setup.world_size) + (1 + 2) * at_once


def _gradients(setup: Setup) -> int:
    """coalesced_collectives.py, all_to_all_quant_reduce: matrices one by one, between several hosts alone.

    Four bits are sent and received within the host, then their sums between hosts, and these in
    fp16 are averaged.
    """
    local = setup.ranks_per_host
    if not setup.zero.zero_quantized_gradients or setup.world_size <= local:
        return 0
    largest = max((t.numel for t in setup.trainable if len(t.shape) > 1), default=0)
    return largest + 3 * shard(largest, local) + 4 * shard(largest, setup.world_size)
