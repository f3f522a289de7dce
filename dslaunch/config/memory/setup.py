"""All that a memory plan depends on."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dslaunch.config.memory.adapter import adapter_tensors, quantised_bytes, quantised_weights
from dslaunch.config.memory.tensors import ModelFacts, Tensor, total
from dslaunch.core.muon_matrices import is_muon_matrix
from dslaunch.core.plan import EngineKind, Precision, QuantizationPlan

Method = Literal["full", "lora", "qlora"]
Attention = Literal["sdpa", "flash", "eager"]
Offload = Literal["cpu", "nvme"]
Task = Literal["sft", "dpo", "kto", "reward", "ppo"]


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
    optimizer_ratio: float = 1.0  # stage 3: the part of the sub-groups whose states are offloaded
    pin_memory: bool = False  # of what is offloaded
    optimizer_buffer_count: int = 4  # nvme: buffers in the host for the states of a sub-group
    hpz_partition_size: int = 1  # stage 3: above 1, a second copy of the weights in each group of so many
    param_buffer_count: int = 5
    param_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000  # nvme: parameters that stay in the host all the same
    zero_quantized_weights: bool = False  # stage 3, these three: what is sent is quantised
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    overcounted: tuple[str, ...] = ()  # keys of the config that save what is counted all the same
    written: frozenset[str] = frozenset()  # the keys of the block that the user wrote


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of each trained element: ``state`` for good, ``temporary`` while the update runs.

    ``fused``: a kernel of DeepSpeed's own, for which stage 0 lays all fp32 gradients end to end.
    ``eight_bit``: states in blocks of 256 elements with an fp32 scale each (bitsandbytes; small
    tensors, which only stage 0 has, keep 4 bytes). ``factored``: a row and a column of averages for
    a matrix (Adafactor, at stage 0 alone). ``matrices``: what holds of matrices, which Muon has in groups
    of their own and orthogonalises one after the other (``orthogonal``).
    """

    state: int = 8
    temporary: int = 8
    fused: bool = False
    eight_bit: bool = False
    factored: bool = False
    matrices: OptimizerCost | None = None
    orthogonal: bool = False

    def states(self, numel: int) -> int:
        """Bytes of the states of a flat vector."""
        if not self.eight_bit:
            return self.state * numel
        return 2 * numel + 8 * -(-numel // _BLOCK)

    def states_of(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of the states of tensors that are updated one by one."""
        return sum(self._whole(tensor) for tensor in tensors)

    def in_passing(self, tensors: Sequence[Tensor], numel: int, *, shared: bool = False) -> int:
        """Bytes while ``numel`` elements are updated at once, which are of ``tensors``; ``shared``: others
        have the rest of these, so that a matrix is added up from its pieces first."""
        whole = [_while_orthogonalised(t) + 4 * t.numel * shared for t in tensors] if self.orthogonal else []
        return self.temporary * numel + max(whole, default=0)

    def _whole(self, tensor: Tensor) -> int:
        if self.factored and len(tensor.shape) > 1:
            numel = tensor.numel
            return 4 * (numel // tensor.shape[-1] + numel // tensor.shape[-2])
        small = self.eight_bit and tensor.numel < _WHOLE_BELOW
        return 8 * tensor.numel if small else self.states(tensor.numel)


_BLOCK, _WHOLE_BELOW = 256, 4096  # bitsandbytes.optim


def _while_orthogonalised(tensor: Tensor) -> int:
    """Bytes of Newton-Schulz's own: the matrix three times and its square (by the shorter side) twice, or
    once and four times, beside the iterate. Counted in fp32, as on a CPU; on a GPU most of it is fp16."""
    rows, *rest = tensor.shape if len(tensor.shape) != 3 else tensor.shape[1:]
    short = min(rows, math.prod(rest))
    squares = tensor.numel // max(rows, math.prod(rest)) * short
    return 4 * max(4 * tensor.numel + squares, 2 * tensor.numel + 4 * squares)


@dataclass(frozen=True)
class Group:
    """Tensors that ZeRO lays out as one flat vector, and what the optimizer needs for each element."""

    tensors: tuple[Tensor, ...]
    cost: OptimizerCost

    @functools.cached_property
    def numel(self) -> int:
        return total(self.tensors)


@dataclass(frozen=True)
class Frozen:
    """A tensor that is not trained: ``elements`` of ``element_bytes``, and bytes that are never sharded.

    ``packed``: the elements are not weights, but several codes of bitsandbytes each.
    """

    elements: int
    element_bytes: int
    replicated: int = 0
    packed: bool = False

    @property
    def nbytes(self) -> int:
        return self.elements * self.element_bytes + self.replicated


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to run. ``trainable`` and ``frozen`` are in the order of ``model.parameters()``.

    ``grad_accum_fp32``: data_types.grad_accum_dtype is fp32 under bf16 or fp16. ``mask``: rows are
    padded or packed, so that sdpa gets an explicit mask; ``mask_alone``: at a micro-batch of 1 too.
    ``loss``: whose code computes it, transformers' own or dslaunch's. ``ranks_per_host`` is that of the
    fullest host. ``task``: dpo and reward take two sequences a sample; ``roles`` has the other models of a
    task. ``value_head``: a row of ``hidden`` in place of the lm head. ``precomputed_reference``: its
    log-probs come with the data.
    ``autocast``: what is trained is fp32 and computed with in 16 bits, as ``precision`` fp32 counts it.
    """

    model: ModelFacts
    trainable: tuple[Tensor, ...]
    frozen: tuple[Frozen, ...]
    method: Method = "full"
    engine: EngineKind = "deepspeed"
    autocast: bool = False
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
    mask_alone: bool = False
    lora_r: int = 0
    lora_dropout: float = 0.0
    optimizer: OptimizerCost = field(default_factory=OptimizerCost)
    device_type: Literal["cpu", "cuda"] = "cuda"
    loss: Literal["transformers", "dslaunch"] = "transformers"
    task: Task = "sft"
    value_head: bool = False
    precomputed_reference: bool = False
    exclude_frozen: bool = False  # checkpoints without what is not trained
    fp32_trained: tuple[Tensor, ...] = ()  # of ``trainable``, what stays in fp32 under 16 bit
    fp32_frozen: tuple[Tensor, ...] = ()
    fp32_head: bool = False  # the logits come in fp32

    @property
    def bytes_each(self) -> int:
        """Bytes of one parameter as it is computed with."""
        return 4 if self.precision == "fp32" else 2

    @property
    def in_run_file(self) -> bool:
        """Whether it is the setup of a run file, not of somebody's own script."""
        return self.loss == "dslaunch"

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.micro_batch * self.max_length * (2 if self.task in ("dpo", "reward") else 1)

    @property
    def runs_reference(self) -> bool:
        """Whether a reference, the same model with its adapter off or another one, runs within each pass."""
        return self.task in ("dpo", "kto") and not self.precomputed_reference

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
    def groups(self) -> tuple[Group, ...]:
        """``trainable`` by the optimizer's groups, without empty ones."""
        if self.optimizer.matrices is None:
            return (Group(self.trainable, self.optimizer),) if self.trainable else ()
        matrices = tuple(t for t in self.trainable if is_muon_matrix(t.name, t.shape))
        rest = tuple(t for t in self.trainable if not is_muon_matrix(t.name, t.shape))
        found = (Group(matrices, self.optimizer.matrices), Group(rest, self.optimizer))
        return tuple(group for group in found if group.tensors)

    @functools.cached_property
    def largest(self) -> int:
        """Elements of the largest tensor, trained or not."""
        return max(tensor.numel for tensor in (*self.model.tensors, *self.trainable))


def with_value_head(model: ModelFacts) -> ModelFacts:
    """The same model with one output for each token, as transformers' ForSequenceClassification has it."""
    kept = [tensor for tensor in model.tensors if tensor.name not in ("lm_head.weight", "embed_out.weight")]
    score = Tensor("score.weight", (1, model.dims.hidden))
    return replace(model, tensors=(*kept, score))


def adapted(
    model: ModelFacts, method: Method, *, r: int, bytes_each: int, value_head: bool = False
) -> tuple[tuple[Tensor, ...], tuple[Frozen, ...]]:
    """(trained, frozen): all of it, or an adapter of all linear layers and whole the value head, if any."""
    if method == "full":
        return model.tensors, ()
    saved = ("score",) if value_head else ()
    trained = adapter_tensors(model, r=r, modules_to_save=saved)
    return trained, frozen_tensors(
        model, bytes_each=bytes_each, quantization=(model.on_disk or NF4) if method == "qlora" else None
    )


_STORAGE_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
NF4 = QuantizationPlan(load_in_4bit=True)


def frozen_tensors(
    model: ModelFacts, *, bytes_each: int, quantization: QuantizationPlan | None = None
) -> tuple[Frozen, ...]:
    """The model's own tensors under an adapter; ``quantization``: how its linear layers are kept."""
    packed = quantised_weights(model, quantization) if quantization else set()
    found = []
    for tensor in model.tensors:
        if quantization and tensor.name in packed:
            weights, scales = quantised_bytes(tensor, quantization)
            size = _STORAGE_BYTES[quantization.bnb_4bit_quant_storage]
            found.append(Frozen(-(-weights // size), size, scales, packed=True))
        else:
            found.append(Frozen(tensor.numel, bytes_each))
    return tuple(found)


def shard(numel: int, world_size: int) -> int:
    """Elements of a rank's share of one tensor at stage 3."""
    return -(-numel // world_size)


def flat_size(numel: int, world_size: int) -> int:
    """Elements of the flat buffer of stages 1 and 2: a multiple of twice the ranks."""
    return -(-numel // (2 * world_size)) * 2 * world_size
