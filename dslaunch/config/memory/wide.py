"""What modules that stay in fp32 take beyond their 16-bit share, which the other items count.

DeepSpeed keeps a master copy beside an fp32 parameter as well. What rests was measured at stages 1 to 3 on
two ranks: 2.000 bytes more for each weight, divided by the ranks at stage 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dslaunch.config.memory.items import BACKWARD, FORWARD, LAYERS, LOSS, PASSES, Item
from dslaunch.config.memory.rows import HEADS
from dslaunch.config.memory.setup import Setup, shard
from dslaunch.config.memory.tensors import ModelFacts, Tensor, total
from dslaunch.core.module_patterns import match_modules, modules_of, outermost

_MORE = 2  # bytes of an fp32 number beyond those of a 16-bit one
NAME = "fp32_modules"
_EMBEDDINGS = ("model.embed_tokens.", "transformer.wte.", "gpt_neox.embed_in.")


def matched_modules(facts: ModelFacts, patterns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """pattern -> the modules of ``facts`` that it means, also a head without a tensor of its own (tied).

    Raises ConfigError, with the nearest names, where one matches nothing.
    """
    modules = modules_of(tensor.name for tensor in facts.tensors)
    heads = () if set(modules).intersection(HEADS) else HEADS[:1]
    return match_modules([*modules, *heads], patterns, NAME)


def with_fp32_modules(setup: Setup, patterns: Sequence[str]) -> Setup:
    """``setup`` with the modules that ``patterns`` mean in fp32. Raises ConfigError as above."""
    if not patterns or setup.precision == "fp32":
        return setup
    matched = outermost(n for names in matched_modules(setup.model, patterns).values() for n in names)
    head = next((name for name in matched if name in HEADS), None)
    tied = head is not None and not any(t.name == f"{head}.weight" for t in setup.model.tensors)
    inside = (*(f"{name}." for name in matched), *(_EMBEDDINGS if tied else ()))
    trained = tuple(t for t in setup.trainable if t.name.startswith(inside))
    full = setup.method == "full"
    frozen = () if full else tuple(t for t in setup.model.tensors if t.name.startswith(inside))
    return replace(setup, fp32_trained=trained, fp32_frozen=frozen, fp32_head=head is not None)


def wide_items(setup: Setup) -> list[Item]:
    """The items of one rank; none without such modules."""
    trained, frozen = setup.fp32_trained, setup.fp32_frozen
    tensors = (*trained, *frozen)
    if not tensors:
        return []
    items = [
        Item(f"{NAME}: activations", _activations(setup, tensors), (FORWARD, LOSS, LAYERS)),
        Item(f"{NAME}: gradients", _gradients(setup), PASSES if _waits(setup) else (LAYERS, BACKWARD)),
    ]
    if setup.zero_stage < 3:
        return [Item(f"{NAME}: weights", _MORE * total(tensors)), *items]
    limit = setup.zero.stage3_param_persistence_threshold
    whole = sum(t.numel for t in tensors if t.numel <= limit) if setup.world_size > 1 else 0
    return [
        Item(f"{NAME}: weights", _MORE * sum(shard(t.numel, setup.world_size) for t in tensors)),
        Item(f"{NAME}: gathered", _MORE * (whole + max(t.numel for t in tensors)), PASSES),
        *items,
    ]


def _waits(setup: Setup) -> bool:
    return setup.zero_stage < 2 and setup.accumulation > 1


def _gradients(setup: Setup) -> int:
    """Whole ones at stage 1, one at a time above: DeepSpeed reduces them in 16 bit."""
    if setup.zero_stage < 2:
        return _MORE * total(setup.fp32_trained)
    return _MORE * max((tensor.numel for tensor in setup.fp32_trained), default=0)


def _activations(setup: Setup, tensors: tuple[Tensor, ...]) -> int:
    """Inputs that are kept in fp32 as well: of a norm (a vector) its own, of a linear layer a copy."""
    layers = setup.model.dims.layers if setup.gradient_checkpointing else 1  # of which one at a time
    vectors = sum(t.numel for t in tensors if len(t.shape) == 1 and t.name.endswith(".weight")) // layers
    matrices = sum(t.shape[1] for t in tensors if len(t.shape) == 2 and not t.name.startswith(_EMBEDDINGS))
    return setup.tokens * (2 * vectors + 4 * matrices)
