"""Weights, gradients, optimizer states and ZeRO's buffers of one rank, without offload.

Every formula was fitted to DeepSpeed 0.19.8 by walking all live storages (benchmarks/memory.py does
it again); docs/memory.md explains them. Symbols: P trained elements, F the flat buffer of stages 1
and 2, S a rank's share of it, S3 a rank's share at stage 3, e bytes of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

from dslaunch.config.memory.flat import (
    Update,
    flat_elements,
    flat_states,
    flat_update,
    largest_flat,
    stage_3_share,
    stage_3_states,
    tensor_states,
    tensor_update,
    touched,
)
from dslaunch.config.memory.items import (
    BACKWARD,
    CONVERT,
    FORWARD,
    LAYERS,
    LOADING,
    LOSS,
    PASSES,
    REDUCE,
    REST,
    UPDATE,
    Item,
    size_at,
)
from dslaunch.config.memory.setup import Frozen, Group, Setup, shard
from dslaunch.config.memory.tensors import Tensor

REBUILD = "second forward: start"  # DDP knows the order of the gradients only after the first step
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe")
GATHERED = "gathered weights (stage3_max_reuse_distance)"
SECOND_COPY = "second copy of the weights (hpZ)"
_STAGE_0_FLAT = 500_000_000  # engine.allreduce_bucket: a constant, whatever reduce_bucket_size says


def state_items(setup: Setup, rank: int) -> list[Item]:
    """The items of ``rank``; zero-sized ones are left out."""
    if setup.engine == "torch":
        items = _torch(setup)
    elif setup.zero_stage == 0:
        items = _stage_0(setup)
    elif setup.zero_stage == 3:
        items = _stage_3(setup)
    elif setup.zero_stage == 1 and setup.precision == "bf16" and setup.accum_fp32:
        items = _bf16_optimizer(setup)
    else:
        items = _stage_1_2(setup, rank)
    if setup.autocast:  # it keeps what it has cast until backward is through
        items.append(Item("16-bit copies of the weights (autocast)", 2 * _cast_elements(setup), PASSES))
    return [item for item in items if item.size]


def frozen_bytes(setup: Setup) -> int:
    """Bytes of what is not trained on one rank."""
    if setup.zero_stage < 3:
        return sum(part.nbytes for part in setup.frozen)
    share = [shard(part.elements, setup.world_size) * part.element_bytes for part in setup.frozen]
    return sum(share) + sum(part.replicated for part in setup.frozen)


def while_loading(setup: Setup, items: Iterable[Item]) -> list[Item]:
    """Stage 3: transformers reads a quantised model whole onto each device, and DeepSpeed partitions it then.

    ``items``: of the same rank; what rests of them is in the place of what is freed.
    """
    if setup.zero_stage != 3 or setup.method != "qlora":
        return []
    whole = sum(part.nbytes for part in setup.frozen) + setup.bytes_each * setup.numel
    more = whole - size_at(items, LOADING)
    return [Item("quantised model, whole: beyond what stays", more, (LOADING,))] if more > 0 else []


def gradient_phases(setup: Setup) -> tuple[str, ...]:
    """While gradients wait for the step: with accumulation through the next passes as well."""
    return PASSES if setup.accumulation > 1 else (BACKWARD,)


def _cast_elements(setup: Setup) -> int:
    """Trained elements of matrix products. An embedding is looked up, but where it is the head too."""
    tied = not any(tensor.name in ("lm_head.weight", "embed_out.weight") for tensor in setup.model.tensors)
    found = 0
    for tensor in setup.trainable:
        part = tensor.name.split(".")[-2] if "." in tensor.name else ""
        looked_up = part in _EMBEDDINGS and not (tied and part != "wpe")
        found += tensor.numel if len(tensor.shape) > 1 and not looked_up else 0
    return found


def _torch(setup: Setup) -> list[Item]:
    """DistributedDataParallel: its buckets are the gradients, and are made anew in the second step."""
    numel = setup.numel
    return [
        Item("frozen weights", frozen_bytes(setup)),
        Item("weights", 4 * numel),
        Item("gradients", 4 * numel),
        Item("optimizer states", tensor_states(setup)),
        Item("DDP's first buckets", 4 * numel if setup.world_size > 1 else 0, (REBUILD,)),
        Item("optimizer's temporaries", tensor_update(setup), (UPDATE,)),
    ]


def _stage_0(setup: Setup) -> list[Item]:
    numel, e = setup.numel, setup.bytes_each
    low = setup.precision != "fp32"
    waiting = (*gradient_phases(setup), REDUCE, CONVERT, UPDATE)
    fp32 = 8 if setup.optimizer.fused else 4  # FP16_Optimizer also lays them end to end
    return [
        Item("frozen weights", frozen_bytes(setup)),
        Item("weights", e * numel),
        Item("fp32 master weights", 4 * numel if low else 0),
        Item("optimizer states", tensor_states(setup)),
        Item("gradients", e * numel, waiting),
        Item("all-reduce buffer", e * min(numel, _STAGE_0_FLAT), (REDUCE,)),
        Item("fp32 gradients", fp32 * numel if low else 0, (CONVERT, UPDATE)),
        Item("optimizer's temporaries", tensor_update(setup), (UPDATE,)),
    ]


def _flat_states(setup: Setup) -> list[Item]:
    flat = flat_elements(setup)
    share = flat // setup.world_size
    return [
        Item("frozen weights", frozen_bytes(setup)),
        Item("weights", setup.bytes_each * flat),
        Item("fp32 master weights", 4 * share),
        Item("optimizer states", flat_states(setup)),
    ]


def _stage_1_2(setup: Setup, rank: int) -> list[Item]:
    e = setup.bytes_each
    share = flat_elements(setup) // setup.world_size
    waiting = gradient_phases(setup)
    kept = 4 * share if setup.accum_fp32 else e * touched(setup, rank)
    largest = max((tensor.numel for tensor in setup.trainable), default=0)
    items = _flat_states(setup)
    if setup.zero_stage == 1:
        # Whole gradients until the last micro-batch is reduced; only then the rank's own part.
        items.append(Item("gradients of the whole model", setup.accum_bytes * setup.numel, waiting))
        items.append(Item("gradients", kept, (BACKWARD, CONVERT)))
    else:
        items.append(Item("gradients", kept, (*waiting, CONVERT)))
        items.append(Item("one whole gradient", e * largest, (BACKWARD,)))
    items += bucket_items(setup)
    # In fp32 the flat copy is what the optimizer gets; so it is where gradients were summed in fp32.
    most, update = largest_flat(setup), flat_update(setup, kept)
    return [
        *items,
        Item("gradients of later groups", update.kept, (UPDATE,)),
        Item("flat copy of the gradients", e * most if e == 2 and not setup.accum_fp32 else 0, (CONVERT,)),
        *_fp32_gradients(0 if setup.accum_fp32 else most, update),
    ]


def _fp32_gradients(converted: int, update: Update) -> list[Item]:
    """Those of the group that is updated, in one item where one group is the largest in both moments."""
    name, temporaries = "fp32 gradients", Item("optimizer's temporaries", update.passing, (UPDATE,))
    if converted == update.numel:
        return [Item(name, 4 * converted, (CONVERT, UPDATE)), temporaries]
    return [Item(name, 4 * converted, (CONVERT,)), Item(name, 4 * update.numel, (UPDATE,)), temporaries]


def bucket_items(setup: Setup) -> list[Item]:
    """The buffer of stages 1 and 2 in which gradients are reduced: whole, however little is trained.

    It is made when the first gradient is ready, and so after the loss's own (setup_buckets).
    """
    size = setup.zero.reduce_bucket_size * setup.bytes_each
    kept = (FORWARD, LOSS) if setup.zero_stage == 1 and setup.accumulation > 1 else ()
    when = (*kept, LAYERS, BACKWARD)
    items = [Item("reduce bucket", size, when)]
    if setup.zero.overlap_comm:
        items.append(Item("second reduce bucket (overlap_comm)", size, when))
    return items


def _bf16_optimizer(setup: Setup) -> list[Item]:
    """Stage 1 in bf16 with fp32 accumulation is another class of DeepSpeed: BF16_Optimizer."""
    flat = flat_elements(setup)
    waiting = (*gradient_phases(setup), REDUCE, CONVERT, UPDATE)
    return [
        *_flat_states(setup),
        Item("fp32 gradients of the whole model", 4 * flat),
        Item("gradients", setup.bytes_each * setup.numel, waiting),
        Item("optimizer's temporaries", flat_update(setup).passing, (UPDATE,)),
    ]


def _stage_3(setup: Setup) -> list[Item]:
    own = stage_3_share(setup)
    group = largest_sub_group(setup)
    return [
        Item("frozen weights", frozen_bytes(setup)),
        Item("weights", setup.bytes_each * own),
        *secondary_copies(setup),
        Item("fp32 master weights", 4 * own),
        Item("optimizer states", stage_3_states(setup)),
        Item("gradients", setup.accum_bytes * own),
        *stage_3_buffers(setup),
        *_fp32_gradients(group, stage_3_update(setup, 2 if setup.bytes_each == 2 else 0)),
    ]


def update_bytes(setup: Setup, passing: int) -> int:
    """The optimizer's temporaries; where it needs next to none, what the step around it has in passing."""
    cost = setup.optimizer
    return cost.temporary if cost.fused else max(cost.temporary, passing)


def secondary_copies(setup: Setup) -> list[Item]:
    """hpZ: every group of ranks has all weights once more, divided among them (_partition_param_sec).

    The step's end drops that of what it has changed, and the next forward pass makes it anew. Of small
    tensors it is there only while the step has let go of the whole ones.
    """
    ranks = min(setup.zero.hpz_partition_size, setup.world_size)
    if ranks <= 1:
        return []
    e, limit = setup.bytes_each, setup.zero.stage3_param_persistence_threshold
    copies = [
        (t.numel, shard(t.numel, setup.world_size) * setup.world_size // ranks) for t in setup.trainable
    ]
    frozen = sum(
        part.element_bytes * (shard(part.elements, setup.world_size) * setup.world_size // ranks)
        for part in setup.frozen
    )
    large = e * sum(copy for numel, copy in copies if numel > limit)
    small = e * sum(copy for numel, copy in copies if numel <= limit)
    return [
        Item("second copy of frozen weights (hpZ)", frozen),
        Item(SECOND_COPY, large, (*PASSES, CONVERT, UPDATE)),
        Item("second copy of small weights (hpZ)", small, (CONVERT, UPDATE)),
    ]


def stage_3_buffers(setup: Setup) -> list[Item]:
    """The bucket and the small tensors that stay whole (both for good), and what is gathered in passing."""
    e, zero, persistent = setup.bytes_each, setup.zero, _persistent(setup)
    whole = e * persistent + sum(part.elements * part.element_bytes for part in _small_packed(setup))
    rest = setup.model.numel + (setup.numel if setup.method != "full" else 0) - persistent
    kept = min(rest, zero.stage3_max_reuse_distance // 2 + 4 * setup.largest)
    return [
        Item("reduce bucket", zero.reduce_bucket_size * e),
        # The step lets go of them and gathers them again at its end.
        Item("small weights kept whole", whole if setup.world_size > 1 else 0, (REST, *PASSES)),
        Item(GATHERED, _gathered_bytes(setup, kept), PASSES),
        Item("prefetched weights", e * min(zero.stage3_prefetch_bucket_size, rest), (FORWARD, LAYERS)),
    ]


def _gathered_bytes(setup: Setup, elements: int) -> int:
    """Quantised weights are gathered as they are packed."""
    if setup.method != "qlora":
        return setup.bytes_each * elements
    packed = sum(part.elements * part.element_bytes for part in setup.frozen)
    return min(setup.bytes_each * elements, packed + setup.bytes_each * setup.numel)


def _persistent(setup: Setup) -> int:
    sizes = [tensor.numel for tensor in setup.trainable]
    if setup.method != "full":
        sizes += [part.elements for part in setup.frozen if not part.packed]
    return sum(n for n in sizes if n <= setup.zero.stage3_param_persistence_threshold)


def _small_packed(setup: Setup) -> list[Frozen]:
    """Quantised weights that are kept whole: DeepSpeed counts the elements that they are packed in."""
    limit = setup.zero.stage3_param_persistence_threshold
    return [part for part in setup.frozen if part.packed and part.elements <= limit]


def largest_sub_group(setup: Setup) -> int:
    """Elements of the largest group that is updated at once."""
    return max(map(sum, sub_groups(setup)), default=0)


def sub_groups(setup: Setup) -> list[list[int]]:
    """A rank's elements of each tensor, in the groups that are updated at once."""
    return [[shard(t.numel, setup.world_size) for t in group.tensors] for group in _sub_groups(setup)]


def stage_3_update(setup: Setup, passing: int = 0) -> Update:
    """That of stage 3, by sub-groups; ``passing``: see update_bytes."""
    found = [Update(0, 0, 0)]
    for group in _sub_groups(setup):
        numel = sum(shard(tensor.numel, setup.world_size) for tensor in group.tensors)
        own = group.cost.in_passing(group.tensors, numel, shared=setup.world_size > 1)
        found.append(Update(numel, max(own, 0 if group.cost.fused else passing * numel), 0))
    return max(found, key=lambda update: update.size)


def _sub_groups(setup: Setup) -> list[Group]:
    """A group is closed by the tensor with which it reaches sub_group_size, or by the end of the
    optimizer's own (stage3.py, _create_fp16_sub_groups)."""
    found: list[Group] = []
    for group in setup.groups:
        tensors: list[Tensor] = []
        current = 0
        for tensor in group.tensors:
            if tensors and current >= setup.zero.sub_group_size:
                found.append(Group(tuple(tensors), group.cost))
                tensors, current = [], 0
            tensors.append(tensor)
            current += shard(tensor.numel, setup.world_size)
        found.append(Group(tuple(tensors), group.cost))
    return found
