"""What people do not expect, said where it matters and nowhere else; test_measured has what it saves."""

from __future__ import annotations

import dataclasses

import pytest

from dslaunch.config.memory.larger_changes import larger_changes
from dslaunch.config.memory.planner import plan_memory
from dslaunch.config.memory.setup import Setup
from dslaunch.config.memory.surprises import Surprise, surprises
from tests.config.memory.models import LLAMA_3_70B, SMOLLM2_135M, setup


def of(run: Setup) -> list[Surprise]:
    return surprises(run, plan_memory(run, 80))


def test_the_bucket_of_a_small_adapter_is_worth_a_word_and_a_value() -> None:
    run = setup(SMOLLM2_135M, "lora", world_size=2, ranks_per_host=2, max_length=512)
    (bucket,) = (found for found in of(run) if found.setting)
    assert bucket.setting == ("zero_optimization.reduce_bucket_size", run.numel)
    zero = dataclasses.replace(run.zero, reduce_bucket_size=run.numel)
    assert not any(found.setting for found in of(dataclasses.replace(run, zero=zero)))
    assert 900_000_000 > bucket.saves > 600_000_000  # the rest was hidden below the peak of the logits


def test_a_bucket_that_is_gone_at_the_peak_is_told_all_the_same() -> None:
    run = setup(method="lora")
    (bucket,) = (found for found in of(run) if found.setting)
    assert "0.93 GiB, which are not there at the peak (backward: start)" in bucket.text
    assert bucket.setting == ("zero_optimization.reduce_bucket_size", run.numel)
    assert bucket.saves == 0


def test_the_step_of_stage_2_takes_more_than_its_rest() -> None:
    """Of 8 billion parameters on 8 devices: G, a flat copy and fp32 gradients, wherever the peak is."""
    plan = plan_memory(setup(), 80)
    assert plan.phase not in ("step: convert", "step: update")
    gradients = next(item.size for item in plan.items if item.name == "gradients")
    assert plan.step_bytes == plan.rest_bytes + gradients + (2 + 4) * setup().numel // 8


def test_a_bucket_that_the_model_fills_is_not_mentioned() -> None:
    assert not any(found.setting for found in of(setup()))


def test_the_step_is_mentioned_only_where_it_is_the_peak() -> None:
    one = setup(world_size=1, ranks_per_host=1)
    assert sum("optimizer's step takes 59.83 GiB more" in found.text for found in of(one)) == 1
    assert not any("optimizer's step" in found.text for found in of(setup()))


def test_a_step_in_fp32_is_not_said_to_have_16_bit_gradients() -> None:
    one = setup(world_size=1, ranks_per_host=1)
    (low,) = (found.text for found in of(one) if "optimizer's step" in found.text)
    fp32 = dataclasses.replace(one, precision="fp32")
    (full,) = (found.text for found in of(fp32) if "optimizer's step" in found.text)
    assert "fp32 gradients" in low
    assert "16 bit" not in full


@pytest.mark.parametrize(("family", "words"), [("llama", "learned nothing"), ("gpt2", "stops the run")])
def test_samples_beyond_the_model_s_context_are_told_of(family: str, words: str) -> None:
    run = setup(max_length=4096)
    for positions, told in ((4095, True), (4096, False), (None, False)):
        dims = dataclasses.replace(run.model.dims, positions=positions, family=family)
        texts = [
            found.text
            for found in of(dataclasses.replace(run, model=dataclasses.replace(run.model, dims=dims)))
        ]
        assert any(words in t and "max_length 4096 is more than the 4095" in t for t in texts) == told


def test_logits_are_mentioned_where_they_are_a_quarter_of_the_peak() -> None:
    small = setup(SMOLLM2_135M, gradient_checkpointing=True)
    assert any("logits take" in found.text for found in of(small))
    assert not any("logits take" in found.text for found in of(setup()))


def test_weights_that_stage_3_keeps_whole_are_mentioned() -> None:
    run = setup(zero_stage=3, gradient_checkpointing=True)
    assert any("stage3_max_reuse_distance" in found.text for found in of(run))
    assert not any("stage3_max_reuse_distance" in found.text for found in of(setup()))


def test_what_would_fit_a_large_adapter_run_on_one_small_device() -> None:
    """QLoRA of 70 billion parameters and 2048 tokens on 48 GB: shorter, or two devices."""
    run = setup(LLAMA_3_70B, "qlora", world_size=1, ranks_per_host=1, max_length=2048,
                gradient_checkpointing=True)  # fmt: skip
    flags = [change.changes[0] for change in larger_changes(run, 44.16, None)]
    assert flags == ["--max-length 1024", "--num-gpus-per-node 2"]
