"""The other models of a task as sums of the same parts; benchmarks/memory.py measures them at rest."""

from __future__ import annotations

import pytest

from dslaunch.config.memory.planner import MemoryPlan, plan_memory
from dslaunch.config.memory.setup import ZeroOptions, with_value_head
from tests.config.memory.models import LLAMA_3_8B, facts, setup

NUMEL = facts(LLAMA_3_8B).numel
HEAD = 128256 * 4096  # of the language head, which a value head replaces by a row of 4096


def sizes(plan: MemoryPlan) -> dict[str, int]:
    return {item.name: item.size for item in plan.items}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_reference_is_whole_below_stage_3_and_sharded_there(stage: int) -> None:
    plan = plan_memory(setup(task="dpo", zero_stage=stage))
    expected = 2 * NUMEL if stage < 3 else 2 * NUMEL // 8
    assert sizes(plan)["reference"] == pytest.approx(expected, rel=1e-6)
    alone = plan_memory(setup(zero_stage=stage))
    assert plan.rest_bytes - alone.rest_bytes == sizes(plan)["reference"]
    assert plan.checkpoint_bytes == alone.checkpoint_bytes


def test_a_reference_follows_the_weights_to_the_host() -> None:
    both = ZeroOptions(offload_optimizer="cpu", offload_param="cpu")
    plan = plan_memory(setup(task="dpo", zero_stage=3, zero=both))
    assert "reference" not in sizes(plan)
    assert any(item.name == "reference (offloaded)" for item in plan.host)


def test_an_adapter_that_is_off_is_the_reference() -> None:
    plan, alone = (plan_memory(setup(method="lora", task=task)) for task in ("dpo", "sft"))
    assert "reference" not in sizes(plan)
    assert plan.rest_bytes == alone.rest_bytes
    assert sizes(plan)["logits of the reference"] > 0


def test_a_pair_is_two_sequences() -> None:
    """Without the reference a pair of 2048 tokens each takes what two samples of 2048 take."""
    pair = plan_memory(setup(task="dpo", precomputed_reference=True, max_length=2048))
    two = plan_memory(setup(micro_batch=2, max_length=2048))
    assert pair.peak_bytes == two.peak_bytes


def test_a_reward_model_has_no_logits_and_no_language_head() -> None:
    model = with_value_head(facts(LLAMA_3_8B))
    assert model.numel == NUMEL - HEAD + 4096
    plan = plan_memory(setup(task="reward", model=model, trainable=model.tensors, value_head=True))
    assert not any("logits" in name for name in sizes(plan))


def test_ppo_trains_two_models_in_turn() -> None:
    plan, alone = plan_memory(setup(task="ppo")), plan_memory(setup())
    critic = 2 * (NUMEL - HEAD + 4096)
    assert sizes(plan)["critic: weights"] == pytest.approx(critic, rel=1e-6)
    assert sizes(plan)["reward model"] == critic
    assert sizes(plan)["reference"] == 2 * NUMEL
    others = sum(size for name, size in sizes(plan).items() if name in ("reference", "reward model"))
    states = sum(
        sizes(plan)[f"critic: {name}"] for name in ("weights", "fp32 master weights", "optimizer states")
    )
    assert plan.rest_bytes - alone.rest_bytes == others + states
    # Never both models' passes at once: the peak rises by no more than what rests.
    assert plan.phase == "backward: start"
    assert plan.peak_bytes <= alone.peak_bytes + others + states
    assert plan.checkpoint_bytes > 1.8 * alone.checkpoint_bytes


def test_gradients_that_add_up_wait_through_the_other_models_passes() -> None:
    plan = plan_memory(setup(task="ppo", accumulation=4))
    (waiting,) = (item for item in plan.items if item.name == "gradients")
    assert "critic: backward: end" in waiting.when
    (waiting,) = (item for item in plan.items if item.name == "critic: gradients")
    assert "backward: end" in waiting.when


def test_generation_keeps_keys_and_values() -> None:
    plan = plan_memory(setup(task="ppo", zero_stage=3))
    assert sizes(plan)["KV cache"] == 2 * 32 * 8 * 128 * 2 * 4096
    assert sizes(plan)["weights gathered to generate"] == 2 * NUMEL
