"""The DeepSpeed JSON: whole files compared, no key that is ignored, nothing that contradicts the plan."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.config import render
from dslaunch.config.zero import ACTING_STAGES
from dslaunch.core.errors import ConfigError, ConfigErrors
from tests.config.build import SMALL, engine_of, gpus

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "ds_config"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu-fp32-stage2": ("cluster: {num_gpus_per_node: 2}\nadapter: {}\n", {}),
    "v100-fp16-stage1": ("zero_optimization: {stage: 1}\n", {"inventory": gpus("v100", "v100")}),
    "fp16-static-scale-stage0": (
        "precision: fp16\nfp16: {loss_scale: 1024}\nzero_optimization: {stage: 0}\n",
        {"inventory": gpus("a100")},
    ),
    "a100-bf16-accumulation-stage3": (
        "gradient_accumulation_steps: 4\nzero_optimization:\n  stage: 3\n  sub_group_size: 1e9\n"
        "  stage3_prefetch_bucket_size: 5e7\n  offload_optimizer: {device: cpu, pin_memory: true}\n"
        "  offload_param: {device: nvme, nvme_path: /nvme}\n",
        {"inventory": gpus("a100")},
    ),
    "bf16-accumulation-stage0": (
        "gradient_accumulation_steps: 4\nzero_optimization: {stage: 0}\n",
        {"inventory": gpus("h100")},
    ),
    "sgd-stage2-no-clipping": (
        "gradient_clipping: 0\noptimizer: {type: SGD, lr: 1, params: {momentum: 0.9, nesterov: true}}\n",
        {"inventory": gpus("a100")},
    ),
    "adam-is-not-adamw": (
        "optimizer: {type: Adam, params: {weight_decay: 0.01}}\n",
        {"inventory": gpus("a100")},
    ),
    "overrides-merged-last": (
        "deepspeed:\n  wall_clock_breakdown: true\n  zero_optimization: {ignore_unused_parameters: false}\n"
        "  activation_checkpointing: {partition_activations: true}\n  flops_profiler: {detailed: false}\n",
        {"inventory": gpus("a100")},
    ),
}


def config_of(name: str) -> dict[str, Any]:
    text, facts = CASES[name]
    if "nvme" in text:
        from dslaunch.config.facts import PathFact

        facts = {
            **facts,
            "paths": {"zero_optimization.offload_param.nvme_path": PathFact("directory", "/nvme")},
        }
    return engine_of(SMALL + text, **facts)[1]


@pytest.mark.parametrize("name", CASES)
def test_the_whole_json(name: str) -> None:
    expected = (GOLDEN / f"{name}.json").read_text(encoding="utf-8")
    assert render.to_text(config_of(name)) == expected


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_what_every_json_has(name: str) -> None:
    config = config_of(name)
    for size in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert type(config[size]) is int
    assert type(config["gradient_clipping"]) is float
    assert config["fp16"]["enabled"] in (True, False)
    assert not (config["fp16"]["enabled"] and config["bf16"]["enabled"])
    for block in ("fp16", "bf16"):
        if not config[block]["enabled"]:
            assert config[block] == {"enabled": False}
    assert '"auto"' not in json.dumps(config)
    assert "scheduler" not in config
    stage = config["zero_optimization"]["stage"]
    assert all(stage in ACTING_STAGES[k] for k in config["zero_optimization"] if k in ACTING_STAGES)


@pytest.mark.parametrize(
    ("written", "message", "hint"),
    [
        (
            "deepspeed: {train_batch_size: 16}",
            "train_batch_size: 16 contradicts 8",
            "set train_batch_size in",
        ),
        (
            "deepspeed: {gradient_clippping: 1}",
            "no key of DeepSpeed; did you mean gradient_clipping?",
            "gradient",
        ),
        (
            "deepspeed: {gradient_clipping: auto}",
            "auto is a word of the Hugging Face Trainer",
            "value itself",
        ),
        ("deepspeed: {bf16: {enabled: true}}", "bf16.enabled: True contradicts False", "set precision in"),
        (
            "deepspeed: {zero_optimization: {stage: 3}}",
            "stage: 3 contradicts 2",
            "set zero_optimization.stage",
        ),
        ("deepspeed: {zero_optimization: 3}", "zero_optimization: 3 contradicts", "set zero_optimization in"),
        ("deepspeed: {optimizer: {params: {lr: 3}}}", "lr: 3 contradicts 2e-05", "set optimizer.lr in"),
        ("deepspeed: {optimizer: {type: Lamb}}", "contradicts 'AdamW'", "set optimizer.type in"),
        ("deepspeed: {scheduler: {type: WarmupLR}}", "the run file has its own key for it", "use scheduler:"),
        ("deepspeed: {bfloat16: {enabled: true}}", "the run file has its own key for it", "precision: bf16"),
        (
            "deepspeed: {zero_optimization: {stage3_max_live_parameters: 5}}",
            "has no effect at zero_optimization.stage 2",
            "remove stage3_max_live_parameters",
        ),
        ("deepspeed: {fp16: {}}", "deepspeed.fp16: {} contradicts", "set precision in"),
        ("deepspeed: {bf16: 1}", "bf16: 1 contradicts", "set precision in"),
        ("deepspeed: {qqq_qqq: 1}", "deepspeed.qqq_qqq is no key of DeepSpeed", "ignore it silently"),
    ],
)
def test_overrides_cannot_contradict_the_run_file(written: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_of(SMALL + written + "\n")
    assert caught.value.message.startswith("run.yaml:4: ")
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("written", "problem", "hint"),
    [
        (
            "zero_optimization: {overlap_com: true}",
            "zero_optimization.overlap_com is no key of DeepSpeed; did you mean overlap_comm?",
            "write overlap_comm",
        ),
        (
            "zero_optimization: {stage3_max_live_paramters: 3}",
            "zero_optimization.stage3_max_live_paramters is no key of DeepSpeed; did you mean"
            " stage3_max_live_parameters?",
            None,
        ),
        (
            "zero_optimization: {offload_optimizer: {device: cpu, pin_memry: true}}",
            "zero_optimization.offload_optimizer.pin_memry is no key of DeepSpeed; did you mean pin_memory?",
            None,
        ),
        ("zero_optimization: {cpu_offload: true}", "zero_optimization.cpu_offload is an old name", None),
        (
            'zero_optimization: {overlap_comm: "true"}',
            'zero_optimization.overlap_comm: "true" is text, where true or false is meant',
            "write true or false, without quotes",
        ),
        ("zero_optimization: {reduce_bucket_size: true}", "size: true is not a whole number", None),
        ("zero_optimization: {reduce_bucket_size: 1.5}", "size: 1.5 is not a whole number", None),
        ("zero_optimization: {offload_optimizer: cpu}", '"cpu" is text, where a mapping is meant', None),
        (
            "zero_optimization: {stage3_module_granularity_threshold: 1}",
            "stage3_module_granularity_threshold has no effect at zero_optimization.stage 2",
            None,
        ),
        ('flops_profiler: {enabled: "true"}', 'flops_profiler.enabled: "true" is text, where true or', None),
        ('tensorboard: {enabled: "false"}', 'tensorboard.enabled: "false" is text, where', None),
        ("activation_checkpointing: {partition_activation: true}", "mean partition_activations?", None),
        ('wall_clock_breakdown: "no"', 'wall_clock_breakdown: "no" is text, where true or false', None),
        ("steps_per_print: ten", 'steps_per_print: "ten" is text, where a whole number is meant', None),
        (
            "optimizer: {params: {foo: 1}}",
            "optimizer.params.foo: optimizer.params is decided by the run file itself",
            "remove it; the run file has optimizer.params",
        ),
        ("optimizer: {params: {momentum: 0.9}}", "params.momentum: ", "write optimizer.params.momentum in"),
        ("optimizer: {legacy_fusion: true}", "optimizer.legacy_fusion: optimizer is decided", None),
        ("fp16: {loss_scale: 128}", "fp16.loss_scale: fp16 is decided", "write fp16.loss_scale in the"),
        ("bf16: {immediate_grad_update: true}", "bf16.immediate_grad_update: bf16 is decided", None),
        (
            "torch_autocast: {enabled: true, dtype: bfloat16}",
            "torch_autocast: the run file",
            "use precision:",
        ),
        ("data_types: {grad_accum_dtype: fp16}", "'fp16' does not go with precision fp32", "write fp32, or"),
        ("data_types: {param_dtype: bf16}", "'bf16' does not go with precision fp32", None),
    ],
)
def test_a_key_that_deepspeed_would_ignore_or_misread_is_one_problem(
    written: str, problem: str, hint: str | None
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        engine_of(f"{SMALL}deepspeed: {{{written}}}\n")
    (found,) = caught.value.problems
    assert found.message.startswith("run.yaml:4: deepspeed.")
    assert problem in found.message
    assert hint is None or hint in (found.hint or "")


def test_two_types_of_gradients_at_stage_0_are_refused() -> None:
    text = SMALL + "zero_optimization: {stage: 0}\ndeepspeed: {data_types: {grad_accum_dtype: fp32}}\n"
    with pytest.raises(ConfigError, match="'fp32' does not go with precision bf16 at stage 0"):
        engine_of(text, inventory=gpus("a100"))


def test_known_keys_of_the_right_type_pass() -> None:
    text = (
        "{zero_optimization: {zero_quantized_weights: false, leaf_module: {names: [a]},"
        " offload_optimizer: {device: cpu, ratio: 1}}, flops_profiler: {enabled: true, output_file: p.txt},"
        " gradient_clipping: 1, optimizer: {params: {betas: [0.9, 0.999]}}, aio: {single_submit: true},"
        " zero_allow_untested_optimizer: true, data_types: {grad_accum_dtype: fp32}}"
    )
    config = engine_of(f"{SMALL}deepspeed: {text}\n")[1]
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "ratio": 1}


def test_what_is_only_usual_may_be_overridden() -> None:
    text = SMALL + "gradient_accumulation_steps: 2\ndeepspeed: {data_types: {grad_accum_dtype: bf16}}\n"
    assert engine_of(text, inventory=gpus("a100"))[1]["data_types"] == {"grad_accum_dtype": "bf16"}


def test_an_override_that_repeats_the_run_file_is_let_be() -> None:
    config = engine_of(SMALL + "deepspeed: {train_batch_size: 8, zero_optimization: {stage: 2}}\n")[1]
    assert config["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda c: c.pop("gradient_clipping"), "gradient_clipping is missing"),
        (lambda c: c.update(train_batch_size=9), "train_batch_size is 9; the plan says 8"),
        (lambda c: c.update(train_batch_size=8.0), "train_batch_size is 8.0; the plan says 8"),
        (lambda c: c["bf16"].update(enabled=True), "bf16.enabled is True; the plan says False"),
        (lambda c: c["bf16"].update(enabled=0), "bf16.enabled is 0; the plan says False"),
        (lambda c: c["optimizer"]["params"].update(lr="2e-05"), "optimizer.params.lr is '2e-05'"),
        (lambda c: c["zero_optimization"].update(reduce_bucket_size="auto"), 'reduce_bucket_size is "auto"'),
        (lambda c: c["fp16"].update(loss_scale=0), "fp16 has keys besides enabled"),
    ],
)
def test_rendered_text_is_compared_with_the_plan(change: Any, part: str) -> None:
    engine, config, _ = engine_of(SMALL)
    render.check_against_plan(config, engine, "t.j2")
    wrong = copy.deepcopy(config)
    change(wrong)
    with pytest.raises(ConfigError) as caught:
        render.check_against_plan(wrong, engine, "t.j2")
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a": 1,}', "does not give JSON"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[]", "gives no JSON object"),
        ("", "does not give JSON"),
        ("// x\n{}", "does not give JSON"),
    ],
)
def test_rendered_text_must_be_strict_json(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render.parse_rendered(text, "t.j2")
    assert part in caught.value.message
