"""engine: torch in a run file: what it resolves to, and every key that acts with DeepSpeed only."""

from __future__ import annotations

import pytest
import torch

from dslaunch.cli.plan import dtypes_of
from dslaunch.config.memory.architectures import dimensions, parameters
from dslaunch.config.memory.of_run import setup_of_run
from dslaunch.config.memory.planner import plan_memory
from dslaunch.config.memory.tensors import ModelFacts
from dslaunch.config.origins import plan_values
from dslaunch.config.spec_optimizer import OPTIMIZER_TYPES
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.plan import Fp16Plan, from_json, to_json
from dslaunch.train.optimizers import build_optimizer
from tests.config.build import SMALL, gpus, plan_of, resolved
from tests.config.test_zero_auto import LLAMA_8B

TORCH = SMALL + "engine: torch\n"
FP16 = TORCH + "precision: fp16\n"
V100 = {"inventory": gpus("v100", "v100")}
MODEL = ModelFacts(parameters(LLAMA_8B) or (), dimensions(LLAMA_8B), "config.json")


def refusals(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(text, *overrides, **V100)
    found = caught.value.problems if isinstance(caught.value, ConfigErrors) else [caught.value]
    return [f"{problem.message} / {problem.hint}" for problem in found]


def test_it_has_no_deepspeed_json_and_shards_nothing() -> None:
    plan = plan_of(TORCH, "precision=bf16", **V100)
    assert (plan.engine, plan.zero_stage, plan.ds_config) == ("torch", 0, {})
    assert plan.trained_in_fp32
    assert plan.origins["zero_stage"].reason == "engine torch shards nothing"
    assert plan.origins["engine"].source == "run.yaml:4"
    assert all(key in plan.origins for key, _ in plan_values(plan))
    assert from_json(type(plan), to_json(plan)) == plan


def test_without_the_key_all_is_as_before() -> None:
    plan = plan_of(SMALL, **V100)
    assert (plan.engine, plan.zero_stage, plan.trained_in_fp32) == ("deepspeed", 2, False)
    assert plan.ds_config["zero_optimization"]["stage"] == 2


def test_it_says_nothing_of_deepspeeds_stage_0() -> None:
    _, notes = resolved(FP16, **V100)
    assert not [note for note in notes if "DeepSpeed" in note]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("zero_optimization.stage", "2", "engine torch shards nothing"),
        ("zero_optimization.stage", "auto", "engine torch shards nothing"),
        ("zero_optimization.offload_optimizer", "cpu", "acts with DeepSpeed only"),
        ("zero_optimization.offload_param", "auto", "acts with DeepSpeed only"),
        ("zero_optimization.reduce_bucket_size", "1000", "acts with DeepSpeed only"),
        ("zero_optimization.overlap_comm", "false", "acts with DeepSpeed only"),
        ("deepspeed.steps_per_print", "10", "is for the DeepSpeed JSON"),
        ("optimizer.params.torch_adam", "false", "asks for DeepSpeed's Adam"),
        ("fp16.hysteresis", "2", "halves the scale at every overflow"),
        ("fp16.consecutive_hysteresis", "true", "halves the scale at every overflow"),
    ],
)
def test_a_key_that_would_do_nothing_is_refused_by_its_name(key: str, value: str, message: str) -> None:
    (said,) = refusals(FP16, f"{key}={value}")
    assert message in said and key.removesuffix(".steps_per_print") in said


def test_each_of_them_is_told_at_its_line() -> None:
    text = FP16 + "zero_optimization:\n  stage: 3\n  offload_param: cpu\nfp16: {hysteresis: 4}\n"
    assert [said.split(": ")[0] for said in refusals(text)] == ["run.yaml:7", "run.yaml:8", "run.yaml:9"]


SAME = (
    "zero_optimization.stage=0",
    "fp16.hysteresis=1",
    "optimizer.params.torch_adam=true",
    "fp16.min_loss_scale=8",
)


@pytest.mark.parametrize("override", SAME)
def test_what_means_the_same_is_taken(override: str) -> None:
    assert plan_of(FP16, override, **V100).engine == "torch"


def test_the_loss_scale_is_gradscalers_and_explained_so() -> None:
    plan = plan_of(FP16, "fp16.loss_scale_window=50", **V100)
    assert plan.fp16 == Fp16Plan(hysteresis=1, loss_scale_window=50)
    assert plan.origins["fp16.loss_scale_window"].reason.startswith("growth_interval: doubles after 50 steps")
    assert "GradScaler has none" in plan.origins["fp16.hysteresis"].reason


@pytest.mark.parametrize("kind", OPTIMIZER_TYPES)
def test_the_worker_makes_every_optimizer(kind: str) -> None:
    plan = plan_of(TORCH, f"optimizer.type={kind}", "optimizer.lr=0.1", **V100)
    model = torch.nn.Linear(1, 1, bias=False)
    factory = build_optimizer(plan.optimizer, model)
    assert factory is not None
    made = factory(list(model.parameters()))
    assert type(made).__name__ == {"Muon": "MatrixMomentum"}.get(kind, kind)
    assert made.param_groups[0]["lr"] == plan.optimizer.lr
    assert not [key for key in plan.origins if key.endswith(("torch_adam", "adam_w_mode"))]


def test_dtypes_are_fp32_but_for_what_autocast_computes_in() -> None:
    plan = plan_of(TORCH, "precision=bf16", **V100)
    assert dtypes_of(plan) == {
        "model": "fp32", "autocast": "bf16", "master_weights": "fp32", "gradient_accumulation": "fp32",
        "communication": "fp32", "norms": "fp32", "head": "fp32", "rotary_tables": "fp32", "loss": "fp32",
    }  # fmt: skip
    adapted = dtypes_of(plan_of(TORCH, "precision=bf16", "adapter.type=lora", **V100))
    assert (adapted["model"], adapted["adapter"]) == ("bf16", "fp32")


def test_each_rank_holds_16_bytes_a_parameter_whatever_the_precision() -> None:
    for precision in ("bf16", "fp16", "fp32"):
        setup = setup_of_run(plan_of(TORCH, f"precision={precision}", **V100), MODEL)
        plan = plan_memory(setup, 32.0)
        assert plan.rest_bytes == 16 * setup.numel
        copies = sum(item.size for item in plan.items if "autocast" in item.name)
        looked_up = {"model.embed_tokens.weight"}
        cast = sum(t.numel for t in MODEL.tensors if len(t.shape) > 1 and t.name not in looked_up)
        assert copies == (0 if precision == "fp32" else 2 * cast)


def test_an_adapter_leaves_its_base_in_16_bits() -> None:
    setup = setup_of_run(plan_of(TORCH, "precision=bf16", "adapter.type=lora", **V100), MODEL)
    rest = plan_memory(setup, 32.0).rest_bytes
    assert rest == 2 * MODEL.numel + 16 * setup.numel
