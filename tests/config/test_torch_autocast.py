"""torch_autocast in a run file: what the JSON and the plan say of it, and what is refused."""

from __future__ import annotations

import pytest

from dslaunch.cli.plan import dtypes_of
from dslaunch.config.memory.of_run import setup_of_run
from dslaunch.config.memory.planner import plan_memory
from tests.config.build import SMALL, engine_of, gpus, plan_of
from tests.config.test_without_deepspeed import MODEL, refusals

TEXT = SMALL + "precision: bf16\ntorch_autocast: {enabled: true}\n"
GPUS = {"inventory": gpus("a100", "a100")}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_block_is_there_at_every_stage_and_the_weights_are_fp32(stage: int) -> None:
    plan = plan_of(TEXT, f"zero_optimization.stage={stage}", "gradient_accumulation_steps=2", **GPUS)
    assert plan.ds_config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert (plan.ds_config["bf16"], plan.ds_config["fp16"]) == ({"enabled": False}, {"enabled": False})
    assert "data_types" not in plan.ds_config  # sums of fp32 gradients are fp32
    assert (plan.precision, plan.torch_autocast, plan.trained_in_fp32) == ("bf16", (), True)
    found = dtypes_of(plan)
    assert (found["model"], found["autocast"], found["communication"]) == ("fp32", "bf16", "bf16")


def test_modules_are_passed_on_as_they_are_written() -> None:
    names = ["torch.nn.Linear", "transformers.pytorch_utils.Conv1D"]
    _, config, _ = engine_of(TEXT, f"torch_autocast.lower_precision_safe_modules={names}", **GPUS)
    assert config["torch_autocast"]["lower_precision_safe_modules"] == names


def test_without_it_nothing_changes() -> None:
    _, config, _ = engine_of(SMALL + "precision: bf16\n", **GPUS)
    assert "torch_autocast" not in config and config["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("precision=fp16",), "skips every step after the first overflow"),
        (("precision=fp16", "zero_optimization.stage=0"), "leaves the fp16 section unread"),
        (("precision=fp32",), "casts nothing"),
        (("precision=bf16", "engine=torch"), "engine torch computes by autocast anyway"),
        (("precision=bf16", "fp32_modules=lm_head"), "autocast chooses"),
        (("torch_autocast.enabled=false", "torch_autocast.lower_precision_safe_modules=a.B"), "no effect"),
        (("deepspeed.torch_autocast.dtype=float16",), "its own key"),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], says: str) -> None:
    assert any(says in said and "torch_autocast" in said for said in refusals(TEXT, *overrides))


def test_the_memory_plan_counts_fp32_weights_and_the_copies_of_autocast() -> None:
    plain = setup_of_run(plan_of(TEXT, "precision=bf16", "zero_optimization.stage=2", **GPUS), MODEL)
    assert (plain.bytes_each, plain.autocast, plain.zero_stage) == (4, True, 2)
    plan = plan_memory(plain, 80.0)
    sizes = {item.name: item.size for item in plan.items}
    assert sizes["weights"] == 4 * plain.numel
    assert 1.5 * plain.numel < sizes["16-bit copies of the weights (autocast)"] < 2 * plain.numel
