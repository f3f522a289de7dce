"""The memory plan as arithmetic: sums, moments, adapters, ranking."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dslaunch.config.memory.activations import layer_bytes
from dslaunch.config.memory.adapter import adapter_tensors, nf4_bytes
from dslaunch.config.memory.alternatives import nearest_that_fits, rank_alternatives
from dslaunch.config.memory.flat import touched, touching, worst_rank
from dslaunch.config.memory.items import CONVERT, FORWARD, LAYERS, UPDATE, size_at
from dslaunch.config.memory.of_run import optimizer_cost, zero_options
from dslaunch.config.memory.offload import rank_items
from dslaunch.config.memory.planner import MemoryPlan, plan_memory
from dslaunch.config.memory.setup import OptimizerCost, Setup, ZeroOptions, flat_size
from dslaunch.config.memory.states import sub_groups
from dslaunch.config.memory.surprises import surprises
from dslaunch.config.memory.tensors import Tensor
from dslaunch.core.errors import ConfigError
from tests.config.memory.models import LLAMA_3_8B, facts, setup

FACTS = facts(LLAMA_3_8B)


def lora(**changes: Any) -> Setup:
    return setup(LLAMA_3_8B, "lora", **changes)


def size(plan: MemoryPlan, name: str) -> int:
    return sum(item.size for item in plan.items if item.name == name)


def test_the_parameters_of_a_known_model() -> None:
    assert FACTS.numel == 8_030_261_248


@pytest.mark.parametrize(("world_size", "peak"), [(1, 22), (2, 12)])
def test_the_step_of_stage_2_takes_far_more_than_its_rest(world_size: int, peak: int) -> None:
    """One tensor that the ranks halve exactly: 2 + 12/W rest, and the conversion's 2 + 2/W + 2/W + 4/W."""
    whole = (Tensor("a.weight", (2**20,)), Tensor("b.weight", (2**20,)))
    items, _ = rank_items(setup(trainable=whole, world_size=world_size), 0)
    assert size_at(items, CONVERT) == peak * 2**21
    assert size_at(items, UPDATE) == (2 + 16 // world_size) * 2**21


def test_the_peak_is_one_moment_and_the_rest_is_in_all_of_them() -> None:
    plan = plan_memory(setup(), 80)
    at_peak = [item for item in plan.items if item.when == ("always",) or plan.phase in item.when]
    assert plan.peak_bytes == sum(item.size for item in at_peak)
    assert plan.rest_bytes == sum(item.size for item in plan.items if item.when == ("always",))
    assert plan.total_bytes == plan.peak_bytes + sum(item.size for item in plan.outside)
    assert plan.capacity_bytes == 80 * 2**30
    assert plan.fits is (plan.total_bytes <= 80 * 2**30)


def test_lora_pays_for_the_whole_bucket_unless_it_is_made_to_fit() -> None:
    plan = plan_memory(lora(), None)
    assert size(plan, "reduce bucket") == 1_000_000_000
    assert size(plan, "frozen weights") == 2 * FACTS.numel
    ranked = rank_alternatives(lora(), 80)
    trained = lora().numel
    assert any(a.setup.zero.reduce_bucket_size == trained for a in ranked)
    assert plan.fits is None


def test_dropping_the_frozen_weights_from_checkpoints() -> None:
    small = plan_memory(lora(), None).checkpoint_bytes
    whole = plan_memory(dataclasses.replace(lora(), exclude_frozen=False), None).checkpoint_bytes
    assert whole - small == pytest.approx(2 * FACTS.numel, abs=2_000_000)
    assert small == pytest.approx(14 * lora().numel, abs=2_000_000)
    at_3 = plan_memory(setup(zero_stage=3), None).checkpoint_bytes  # masters and states, of all ranks
    assert at_3 == pytest.approx(12 * FACTS.numel, rel=1e-4)


def test_adapter_sizes() -> None:
    """Llama 3 8B with r 16 on all linear layers: 41,943,040 parameters, as peft reports."""
    assert sum(t.numel for t in adapter_tensors(FACTS, r=16)) == 41_943_040
    dora = adapter_tensors(FACTS, r=16, target_modules=("k_proj",), dora=True)
    assert sum(t.numel for t in dora) == 32 * (16 * (4096 + 1024) + 1024)  # a magnitude for each output
    saved = adapter_tensors(FACTS, r=16, target_modules=("q_proj",), modules_to_save=("lm_head",))
    assert saved[-1].numel == 128256 * 4096
    with pytest.raises(ConfigError, match="'q_prj' matches no layer") as caught:
        adapter_tensors(FACTS, r=16, target_modules=("q_prj",))
    assert caught.value.hint == "did you mean q_proj?"


def test_nf4_takes_what_bitsandbytes_allocates() -> None:
    assert sum(nf4_bytes(4096 * 4096, double_quant=False)) == 4096 * 4096 * 9 // 16 + 64
    assert sum(nf4_bytes(4096 * 4096, double_quant=True)) / 4096**2 == pytest.approx(0.5161, abs=2e-4)
    assert nf4_bytes(65, double_quant=False) == (33, 8 + 64)
    assert nf4_bytes(257 * 64, double_quant=True) == (
        257 * 32,
        257 + 2 * 4 + 4 + 1024 + 64,
    )  # two outer blocks


def test_a_rank_keeps_whole_every_tensor_that_reaches_into_its_part() -> None:
    tensors = (Tensor("a", (5,)), Tensor("b", (3,)), Tensor("c", (1,)))
    assert flat_size(9, 2) == 12
    assert [touching(tensors, 2, rank) for rank in (0, 1)] == [8, 3 + 1 + 3]
    assert [touching(tensors, 1, 0)] == [10]
    halves = (Tensor("a", (4,)), Tensor("b", (4,)))  # the one ends where the other's part begins
    assert [touching(halves, 2, rank) for rank in (0, 1)] == [4, 4]
    for world_size in (1, 2, 3, 5):
        ranks = range(world_size)
        alone = setup(trainable=tensors, world_size=world_size)
        assert touched(alone, worst_rank(alone)) == max(touching(tensors, world_size, rank) for rank in ranks)


def test_what_one_rank_alone_does_not_need() -> None:
    for stage, name in ((2, "NCCL buffers"), (3, "small weights kept whole")):
        plans = [plan_memory(setup(zero_stage=stage, world_size=w, ranks_per_host=w), 80) for w in (1, 2)]
        assert [sum(i.size > 0 for i in (*p.items, *p.outside) if i.name == name) for p in plans] == [0, 1]


def test_the_bucket_of_stage_1_stays_through_the_next_passes_of_a_window() -> None:
    for stage, accumulation, stays in ((1, 2, True), (1, 1, False), (2, 2, False)):
        plan = plan_memory(setup(zero_stage=stage, accumulation=accumulation), 80)
        (bucket,) = [item for item in plan.items if item.name == "reduce bucket"]
        assert (FORWARD in bucket.when, LAYERS in bucket.when) == (stays, True)


def test_a_fused_optimizer_at_stage_0_has_the_fp32_gradients_end_to_end_too() -> None:
    for fused, each in ((True, 8), (False, 4)):
        plan = plan_memory(
            setup(zero_stage=0, optimizer=OptimizerCost(state=8, temporary=0, fused=fused)), 80
        )
        assert size(plan, "fp32 gradients") == each * FACTS.numel


def test_a_sub_group_is_closed_by_the_tensor_that_fills_it() -> None:
    tensors = tuple(Tensor(name, (8,)) for name in "abc")
    one = setup(trainable=tensors, zero_stage=3, world_size=1, zero=ZeroOptions(sub_group_size=8))
    assert sub_groups(one) == [[8], [8], [8]]
    nine = dataclasses.replace(one, zero=ZeroOptions(sub_group_size=9))
    assert sub_groups(nine) == [[8, 8], [8]]


@pytest.mark.parametrize("tied", [False, True])
def test_autocast_keeps_16_bit_copies_of_what_is_multiplied(tied: bool) -> None:
    """Of an embedding only where it is the output head too; of no vector."""
    tensors = (
        Tensor("model.embed_tokens.weight", (64, 8)),
        Tensor("a.weight", (8, 4)),
        Tensor("norm.weight", (8,)),
    )
    tensors += () if tied else (Tensor("lm_head.weight", (64, 8)),)
    model = dataclasses.replace(FACTS, tensors=tensors)
    cast = setup(model=model, trainable=tensors, precision="fp32", autocast=True)
    assert size(plan_memory(cast, 80), "16-bit copies of the weights (autocast)") == 2 * (64 * 8 + 8 * 4)


def test_checkpointing_keeps_the_mask_of_padded_rows() -> None:
    name = "layer inputs (gradient checkpointing)"
    plain, masked = (
        plan_memory(setup(gradient_checkpointing=True, mask=mask, micro_batch=3, max_length=512), 80)
        for mask in (False, True)
    )
    assert size(masked, name) - size(plain, name) == 3 * 512 * 512 * 2


def test_checkpointing_and_offload_move_what_they_should() -> None:
    plain, again = plan_memory(setup(), 80), plan_memory(setup(gradient_checkpointing=True), 80)
    assert again.peak_bytes < plain.peak_bytes
    assert again.rest_bytes == plain.rest_bytes
    away = plan_memory(setup(zero=ZeroOptions(offload_optimizer="cpu")), 80)
    assert size(away, "optimizer states") == 0
    assert size(away, "weights") == 2 * FACTS.numel
    share = FACTS.numel // 8
    offloaded = sum(item.size for item in away.host if item.name.endswith("(offloaded)"))
    assert offloaded == pytest.approx(8 * (18 * share + 2 * 128256 * 4096), rel=1e-6)


def test_a_layers_activations() -> None:
    """The measured formula by hand, for one token of Llama 3 8B in bf16."""
    each = 2 * (4 * 14336 + 4 * 4096 + 2 * 4096 + 2 * 1024) + 8 * 4096 + 4 * 32 + 8
    assert layer_bytes(setup(max_length=1)) == each
    masked = layer_bytes(setup(max_length=1, mask=True))
    assert masked - each == 2 * 2 * (4096 - 1024) + 2
    assert layer_bytes(setup(max_length=1, mask=True, attention="flash")) == each


def test_what_fits_comes_first_and_the_nearest_has_the_fewest_changes() -> None:
    ranked = rank_alternatives(setup(max_length=16384), 80)
    verdicts = [alternative.plan.fits for alternative in ranked]
    assert verdicts == sorted(verdicts, reverse=True)
    assert all(alternative.changes for alternative in ranked)
    nearest = nearest_that_fits(ranked)
    assert nearest is not None
    assert nearest.changes == ("--gradient-checkpointing",)
    assert nearest_that_fits(rank_alternatives(setup(), 8)) is None


def test_what_fits_is_ranked_by_time_and_then_by_size() -> None:
    """The rule that is told: offloads cost most, then checkpointing, stage 3, a smaller micro-batch."""
    ranked = [a for a in rank_alternatives(setup(micro_batch=2), 80) if a.plan.fits and not a.plan.tight]
    costs = [
        (
            a.setup.zero.offload_param is not None,
            a.setup.zero.offload_optimizer is not None,
            a.setup.gradient_checkpointing,
            a.setup.zero_stage == 3,
            a.setup.micro_batch == 1,
        )
        for a in ranked
    ]
    assert len(set(costs)) > 8
    assert [c[:2] for c in costs] == sorted(c[:2] for c in costs)
    sizes = [(cost, a.plan.total_bytes) for cost, a in zip(costs, ranked, strict=True)]
    for cost in set(costs):
        same = [size for other, size in sizes if other == cost]
        assert same == sorted(same)


def test_one_that_fits_by_little_is_not_ranked_first() -> None:
    """Of two stages that cost the same, on a device on which the smaller one needs 96 %."""
    free = rank_alternatives(setup(), None)
    plan = next(a.plan for a in free if a.changes == ("--zero-stage 1",))
    ranked = rank_alternatives(setup(), plan.total_bytes / 0.96 / 2**30)
    tight = [a.plan.tight for a in ranked if a.plan.fits]
    assert True in tight
    assert tight == sorted(tight)


def test_a_smaller_micro_batch_keeps_the_global_batch() -> None:
    ranked = rank_alternatives(setup(micro_batch=4, accumulation=2), 80)
    smaller = [a.setup for a in ranked if a.setup.micro_batch == 1]
    assert smaller
    assert {s.accumulation for s in smaller} == {8}
    assert all(s.grad_accum_fp32 for s in smaller)


def test_a_ratio_keeps_the_first_sub_groups_on_the_device() -> None:
    def states(ratio: float, **changes: Any) -> tuple[int, int]:
        zero = ZeroOptions(offload_optimizer="cpu", optimizer_ratio=ratio, sub_group_size=10**8)
        device, host = rank_items(setup(zero_stage=3, zero=zero, **changes), 0)
        return tuple(
            sum(item.size for item in side if item.name in ("fp32 master weights", "optimizer states"))
            for side in (device, host)
        )  # type: ignore[return-value]

    groups = [sum(group) for group in sub_groups(setup(zero_stage=3, zero=ZeroOptions(sub_group_size=10**8)))]
    assert len(groups) > 3
    kept = sum(groups[: int(0.3 * len(groups))])
    assert states(1.0) == (0, 12 * sum(groups))
    assert states(0.7) == (12 * kept, 12 * (sum(groups) - kept))
    assert states(0.0) == (12 * sum(groups), 0)


def test_hpz_has_the_weights_once_more_in_each_group() -> None:
    zero = ZeroOptions(hpz_partition_size=4)
    plan = plan_memory(setup(zero_stage=3, zero=zero), 80)
    assert size(plan, "second copy of the weights (hpZ)") == pytest.approx(2 * FACTS.numel / 4, rel=1e-3)
    assert plan.peak_bytes > plan_memory(setup(zero_stage=3), 80).peak_bytes
    assert size(plan_memory(setup(zero_stage=2, zero=zero), 80), "second copy of the weights (hpZ)") == 0


def test_savings_that_are_not_counted_leave_open_what_seems_too_much() -> None:
    config = {"bf16": {"bf16_master_weights_and_grads": True, "check_grad_overflow": True}}
    less = setup(zero=zero_options(config))
    plan = plan_memory(less, 1000, host_gib=1000)
    assert plan.fits is True
    assert plan_memory(less, 1).fits is None and plan_memory(setup(), 1).fits is False
    assert plan_memory(less, 1000, host_gib=1).fits is None
    assert "what bf16.bf16_master_weights_and_grads saves" in surprises(less, plan)[0].text


def test_amsgrad_keeps_one_state_more() -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    plain = optimizer_cost(config, "cuda")
    config["optimizer"]["params"]["amsgrad"] = True
    assert optimizer_cost(config, "cuda").state == plain.state + 4


WEIGHTS = "weights being quantised and restored (read)"
GRADIENTS = "gradients being quantised and restored (read)"


class TestZeroPlusPlus:
    @staticmethod
    def with_key(key: str, method: str = "full", **changes: Any) -> Setup:
        zero = zero_options({"zero_optimization": {"stage": 3, key: True}})
        return setup(LLAMA_3_8B, method, zero_stage=3, zero=zero, **changes)

    def test_weights_in_8_bits_are_restored_through_fp16(self) -> None:
        plan = plan_memory(self.with_key("zero_quantized_weights"), 1000)
        embedding = 128256 * 4096
        assert size(plan, WEIGHTS) == 3 * embedding + 5 * embedding // 8
        assert plan.rest_bytes == plan_memory(setup(zero_stage=3)).rest_bytes
        assert plan.fits is True

    def test_gradients_in_4_bits_are_there_between_several_hosts_alone(self) -> None:
        key, embedding = "zero_quantized_gradients", 128256 * 4096
        assert size(plan_memory(self.with_key(key)), GRADIENTS) == 0
        plan = plan_memory(self.with_key(key, world_size=16), 1000)
        assert size(plan, GRADIENTS) == embedding + 3 * embedding // 8 + 4 * embedding // 16
        assert plan.fits is True

    def test_frozen_weights_are_counted_in_16_bits_and_what_8_save_is_said(self) -> None:
        key = "zero_quantized_nontrainable_weights"
        quantised, without = self.with_key(key, "lora"), setup(LLAMA_3_8B, "lora", zero_stage=3)
        plan = plan_memory(quantised, 1000)
        assert plan.rest_bytes == plan_memory(without).rest_bytes and plan.fits is True
        assert size(plan, WEIGHTS) > 0 == size(plan_memory(self.with_key(key)), WEIGHTS)
        large = sum(t.numel for t in FACTS.tensors if t.numel > 500_000)
        [said] = [found.text for found in surprises(quantised, plan) if key in found.text]
        assert f"{large / 8 / 2**30:.2f} GiB less" in said

    def test_codes_that_are_quantised_once_more_are_not_counted(self) -> None:
        quantised = self.with_key("zero_quantized_weights", "qlora")
        plan = plan_memory(quantised, 1000)
        assert plan.fits is None and plan_memory(quantised, 1).fits is False
        assert "zero_quantized_weights" in surprises(quantised, plan)[0].text
