"""fp32_modules in the memory plan."""

from __future__ import annotations

import pytest

from dslaunch.config.memory.planner import MemoryPlan, plan_memory
from dslaunch.config.memory.tensors import ModelFacts, total
from dslaunch.config.memory.wide import matched_modules, with_fp32_modules
from dslaunch.core.errors import ConfigError
from tests.config.memory.models import LLAMA_3_8B, SMOLLM2_135M, facts, setup


def size(plan: MemoryPlan, name: str) -> int:
    return sum(item.size for item in plan.items if item.name == name)


def head(model: ModelFacts) -> int:
    return next(tensor.numel for tensor in model.tensors if tensor.name == "lm_head.weight")


def test_below_stage_3_they_take_two_bytes_more_for_each_weight() -> None:
    wide = with_fp32_modules(setup(LLAMA_3_8B, zero_stage=2), ["*norm*", "lm_head"])
    plan = plan_memory(wide)
    norms = sum(t.numel for t in wide.model.tensors if len(t.shape) == 1)
    assert norms == 65 * 4096
    assert size(plan, "fp32_modules: weights") == 2 * (norms + head(wide.model))
    assert size(plan, "fp32_modules: gradients") == 2 * head(wide.model)  # one at a time
    plain = plan_memory(setup(LLAMA_3_8B, zero_stage=2))
    assert plan.checkpoint_bytes - plain.checkpoint_bytes == 2 * (norms + head(wide.model))
    assert plan.rest_bytes - plain.rest_bytes == 2 * (norms + head(wide.model))


def test_at_stage_3_the_ranks_share_them() -> None:
    plain = setup(LLAMA_3_8B, zero_stage=3, world_size=4)
    wide = with_fp32_modules(plain, ["lm_head"])
    assert plan_memory(wide).rest_bytes - plan_memory(plain).rest_bytes == 2 * head(wide.model) // 4
    assert size(plan_memory(wide), "fp32_modules: gathered") == 2 * head(wide.model)


def test_a_tied_head_means_the_embedding_and_logits_in_fp32() -> None:
    model = facts(SMOLLM2_135M)
    assert matched_modules(model, ["lm_head"]) == {"lm_head": ("lm_head",)}
    wide = with_fp32_modules(setup(SMOLLM2_135M), ["lm_head"])
    assert [tensor.name for tensor in wide.fp32_trained] == ["model.embed_tokens.weight"]
    assert wide.fp32_head


def test_of_an_adapter_the_frozen_ones_are_wider() -> None:
    wide = with_fp32_modules(setup(LLAMA_3_8B, "lora", zero_stage=2), ["*norm*"])
    assert not wide.fp32_trained
    assert size(plan_memory(wide), "fp32_modules: weights") == 2 * total(wide.fp32_frozen) > 0


def test_in_fp32_they_change_nothing_and_a_pattern_must_mean_something() -> None:
    plain = setup(LLAMA_3_8B, precision="fp32", zero_stage=2)
    assert with_fp32_modules(plain, ["*norm*"]) == plain
    with pytest.raises(ConfigError, match="matches no module"):
        with_fp32_modules(setup(LLAMA_3_8B), ["*nrom*"])
