"""The other models of a task: reference, critic and reward model, as sums of the same parts.

A reference beside LoRA is the policy with its adapter off, and takes nothing. A frozen model of its own is
a plain module at stages 0 to 2, and sharded by itself at stage 3, without optimizer, bucket or tensors kept
whole (measured). A critic is trained like the policy, by an engine of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from dslaunch.config.memory.activations import activation_items
from dslaunch.config.memory.flat import worst_rank
from dslaunch.config.memory.items import (
    ALWAYS,
    EXPERIENCE,
    FORWARD,
    GENERATE,
    NO_MOMENTS,
    PASSES,
    REFERENCE,
    REST,
    Item,
)
from dslaunch.config.memory.offload import rank_items
from dslaunch.config.memory.setup import Setup, adapted, shard, with_value_head
from dslaunch.config.memory.tensors import ModelFacts

_REPEATED = 4  # tensors gathered at once beyond those that are kept for reuse


def critics(setup: Setup) -> tuple[Setup, ...]:
    """The setups of what is trained beside the policy: the critic of PPO, of the policy's size."""
    if setup.task != "ppo":
        return ()
    model = with_value_head(setup.model)
    trained, frozen = adapted(
        model, setup.method, r=setup.lora_r, bytes_each=setup.bytes_each, value_head=True
    )
    return (
        dataclasses.replace(
            setup, model=model, trainable=trained, frozen=frozen, task="sft", value_head=True
        ),
    )


def with_other_models(setup: Setup, device: list[Item], host: list[Item]) -> tuple[list[Item], list[Item]]:
    """(device items, host items) of all models of the task; ``device`` and ``host`` are the policy's."""
    frozen_device, frozen_host = _frozen_models(setup)
    device, host = [*device, *frozen_device], [*host, *frozen_host]
    if setup.task == "ppo":
        device += _generation(setup)
    for critic in critics(setup):
        rank = worst_rank(critic)
        own, own_host = rank_items(critic, rank)
        own += [item for item in activation_items(critic) if item.size]
        device = _in_turn(device, [_named("critic", item) for item in own])
        host = [*host, *(_named("critic", item) for item in own_host)]
    return device, host


def frozen_model_bytes(setup: Setup, model: ModelFacts) -> int:
    """Bytes on one rank of a model that only runs forward."""
    if setup.zero_stage < 3:
        return setup.bytes_each * model.numel
    return setup.bytes_each * sum(shard(tensor.numel, setup.world_size) for tensor in model.tensors)


def _frozen_models(setup: Setup) -> tuple[list[Item], list[Item]]:
    found = []
    moment = EXPERIENCE if setup.task == "ppo" else REFERENCE
    if setup.method == "full" and (setup.runs_reference or setup.task == "ppo"):
        found.append(("reference", setup.model))
    if setup.task == "ppo":
        found.append(("reward model", with_value_head(setup.model)))
    weights = [Item(name, frozen_model_bytes(setup, model)) for name, model in found]
    if setup.zero_stage < 3:
        return weights, []
    gathered = [
        Item(f"{name}: gathered weights", _gathered(setup, model), (moment,)) for name, model in found
    ]
    if setup.zero.offload_param:
        return gathered, weights
    return [*weights, *gathered], []


def _gathered(setup: Setup, model: ModelFacts) -> int:
    most = setup.zero.stage3_max_reuse_distance // 2 + _REPEATED * setup.largest
    return setup.bytes_each * min(model.numel, most)


def _generation(setup: Setup) -> list[Item]:
    """Keys and values of whole sequences; at stage 3 all weights, which are gathered for it."""
    dims, e = setup.model.dims, setup.bytes_each
    cache = 2 * dims.layers * dims.kv_heads * dims.head_dim * e * setup.tokens
    items = [Item("KV cache", cache, (GENERATE,))]
    if setup.zero_stage == 3 and setup.world_size > 1:
        items.append(Item("weights gathered to generate", e * setup.model.numel, (GENERATE,)))
    return items


def _named(role: str, item: Item) -> Item:
    """The item of another model; its moments are its own, because the models work in turn."""
    when = tuple(moment if moment in NO_MOMENTS else f"{role}: {moment}" for moment in item.when)
    return Item(f"{role}: {item.name}", item.size, when)


def _in_turn(one: list[Item], other: list[Item]) -> list[Item]:
    """Both models' items: what one holds between its passes is there while the other works."""
    return [*_resting(one, other), *_resting(other, one)]


def _resting(items: Iterable[Item], others: Iterable[Item]) -> list[Item]:
    theirs = tuple(dict.fromkeys(m for item in others for m in item.when if m not in NO_MOMENTS))
    return [dataclasses.replace(item, when=(*item.when, *theirs)) if _waits(item) else item for item in items]


def _waits(item: Item) -> bool:
    """Whether it is there between a model's passes, but not always: gradients that add up, small weights."""
    if ALWAYS in item.when:
        return False
    named = {moment.removeprefix("critic: ") for moment in item.when}
    return REST in named or ("gradients" in item.name and set(PASSES) <= named and FORWARD in named)
