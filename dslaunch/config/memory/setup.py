"""All that a memory plan depends on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dslaunch.config.memory.adapter import linear_weights, nf4_bytes
from dslaunch.config.memory.tensors import ModelFacts, Tensor
from dslaunch.core.plan import Precision

Method = Literal["full", "lora", "qlora"]
Attention = Literal["sdpa", "flash", "eager"]
Offload = Literal["cpu", "nvme"]


@dataclass(frozen=True)
class ZeroOptions:
    """The keys of ``zero_optimization`` that cost memory, with DeepSpeed 0.19.8's defaults, in elements."""

    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool = False  # stages 1 and 2: a second bucket
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_reuse_distance: int = 1_000_000_000
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of each trained element: ``state`` for good, ``temporary`` while the update runs.

    ``whole``: the update runs over everything at once (False: one tensor after the other).
    ``fused``: DeepSpeed's own kernel, for which stage 0 lays all fp32 gradients end to end.
    """

    state: int = 8
    temporary: int = 8
    fused: bool = False


@dataclass(frozen=True)
class Frozen:
    """A tensor that is not trained: ``elements`` of ``element_bytes``, and bytes that are never sharded."""

    elements: int
    element_bytes: int
    replicated: int = 0

    @property
    def nbytes(self) -> int:
        return self.elements * self.element_bytes + self.replicated


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to run. ``trainable`` and ``frozen`` are in the order of ``model.parameters()``.

    ``grad_accum_fp32``: data_types.grad_accum_dtype is fp32 under bf16 or fp16. ``mask``: rows are
    padded or packed, so that sdpa gets an explicit mask. ``loss``: whose code computes it,
    transformers' own or dslaunch's. ``ranks_per_host`` is that of the fullest host.
    """

    model: ModelFacts
    trainable: tuple[Tensor, ...]
    frozen: tuple[Frozen, ...]
    method: Method = "full"
    precision: Precision
    zero_stage: int
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    world_size: int
    ranks_per_host: int
    micro_batch: int
    accumulation: int
    max_length: int
    grad_accum_fp32: bool = False
    gradient_checkpointing: bool = False
    attention: Attention = "sdpa"
    mask: bool = False
    lora_r: int = 0
    lora_dropout: float = 0.0
    optimizer: OptimizerCost = field(default_factory=OptimizerCost)
    device_type: Literal["cpu", "cuda"] = "cuda"
    loss: Literal["transformers", "dslaunch"] = "transformers"
    exclude_frozen: bool = False  # checkpoints without what is not trained

    @property
    def bytes_each(self) -> int:
        """Bytes of one parameter as it is computed with."""
        return 4 if self.precision == "fp32" else 2

    @property
    def accum_bytes(self) -> int:
        """Bytes of one accumulated gradient."""
        return 4 if self.grad_accum_fp32 else self.bytes_each

    @property
    def accum_fp32(self) -> bool:
        """Whether gradients are summed in a wider type than the weights have."""
        return self.grad_accum_fp32 and self.bytes_each == 2

    @functools.cached_property
    def numel(self) -> int:
        """Trained elements."""
        return sum(tensor.numel for tensor in self.trainable)

    @functools.cached_property
    def largest(self) -> int:
        """Elements of the largest tensor, trained or not."""
        return max(tensor.numel for tensor in (*self.model.tensors, *self.trainable))


def frozen_tensors(
    model: ModelFacts, *, bytes_each: int, quantised: bool = False, double_quant: bool = True
) -> tuple[Frozen, ...]:
    """The model's own tensors under an adapter; ``quantised``: its linear layers in NF4."""
    packed = {tensor.name for tensor in linear_weights(model)} if quantised else set()
    found = []
    for tensor in model.tensors:
        if tensor.name in packed:
            weights, scales = nf4_bytes(tensor.numel, double_quant=double_quant)
            found.append(Frozen(weights, 1, scales))
        else:
            found.append(Frozen(tensor.numel, bytes_each))
    return tuple(found)


def shard(numel: int, world_size: int) -> int:
    """Elements of a rank's share of one tensor at stage 3."""
    return -(-numel // world_size)


def flat_size(numel: int, world_size: int) -> int:
    """Elements of the flat buffer of stages 1 and 2: a multiple of twice the ranks."""
    return -(-numel // (2 * world_size)) * 2 * world_size


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


@functools.lru_cache(maxsize=64)
def worst_rank(tensors: tuple[Tensor, ...], world_size: int) -> int:
    """The rank whose part of the flat buffer is touched by most elements: see :func:`touching`."""
    size = flat_size(sum(tensor.numel for tensor in tensors), world_size) // world_size
    found = [0] * world_size
    position = 0
    for tensor in tensors:
        if tensor.numel:
            for rank in range(position // size, (position + tensor.numel - 1) // size + 1):
                found[rank] += tensor.numel
        position += tensor.numel
    return max(
        range(world_size),
        key=lambda rank: found[rank] + max(0, (rank + 1) * size - max(position, rank * size)),
    )
