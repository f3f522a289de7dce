"""The DeepSpeed JSON: whole files compared, no key that is ignored, nothing that contradicts the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslaunch.config import render
from dslaunch.config.nested import leaves
from dslaunch.config.zero import ACTING_STAGES
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.plan import RunPlan, from_json, to_json
from dslaunch.core.templating import TemplateFile, template_root
from tests.config.build import SMALL, engine_of, gpus, plan_of

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
    assert {type(config[block]["enabled"]) for block in ("fp16", "bf16")} == {bool}
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
            "train_batch_size: 16 contradicts 8 of train_batch_size (run.yaml:3)",
            "set train_batch_size in",
        ),
        (
            "deepspeed: {gradient_clippping: 1}",
            "no key of DeepSpeed; DeepSpeed ignores it without a word",
            "did you mean gradient_clipping?",
        ),
        (
            "deepspeed: {gradient_clipping: auto}",
            "auto is a word of the Hugging Face Trainer",
            "remove it",
        ),
        ("deepspeed: {bf16: {enabled: true}}", "bf16.enabled: true contradicts false", "set precision in"),
        (
            "deepspeed: {zero_optimization: {stage: 3}}",
            "stage: 3 contradicts 2",
            "set zero_optimization.stage",
        ),
        ("deepspeed: {zero_optimization: 3}", "zero_optimization: 3 contradicts", "set zero_optimization in"),
        ("deepspeed: {optimizer: {params: {lr: 3}}}", "lr: 3 contradicts 2e-05 of the run", "set optimizer"),
        ("deepspeed: {optimizer: {type: Lamb}}", "type: Lamb contradicts AdamW of", "set optimizer.type in"),
        ("deepspeed: {scheduler: {type: WarmupLR}}", "dslaunch has its own key for it", "set scheduler in"),
        ("deepspeed: {bfloat16: {enabled: true}}", "dslaunch has its own key for it", "precision: bf16"),
        (
            "deepspeed: {zero_optimization: {stage3_max_live_parameters: 5}}",
            "acts at stage 3 only; the stage is 2",
            "remove it, or set zero_optimization.stage to 3",
        ),
        ("deepspeed: {bf16: 1}", "bf16: 1 contradicts", "set precision in"),
        ("deepspeed: {bf16: null}", "bf16: null contradicts", "set precision in"),
        ("deepspeed: {optimizer: []}", "optimizer: [] contradicts", "set optimizer in"),
        ("deepspeed: {qqq_qqq: 1}", "deepspeed.qqq_qqq: is no key of DeepSpeed", "explain --list"),
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
            "zero_optimization.overlap_com: is no key of zero_optimization; DeepSpeed refuses the config",
            "did you mean zero_optimization.overlap_comm?",
        ),
        (
            "zero_optimization: {offload_optimizer: {device: cpu, pin_memry: true}}",
            "zero_optimization.offload_optimizer.pin_memry: is no key of",
            "did you mean zero_optimization.offload_optimizer.pin_memory?",
        ),
        ("zero_optimization: {cpu_offload: true}", "zero_optimization.cpu_offload: is deprecated", "offload"),
        (
            'zero_optimization: {overlap_comm: "true"}',
            'overlap_comm: "true" is a text, but true or false is expected',
            "write true",
        ),
        (
            "zero_optimization: {reduce_bucket_size: true}",
            "size: true is true or false, but a whole number is expected",
            None,
        ),
        ("zero_optimization: {reduce_bucket_size: 1.5}", "size: 1.5 has a fraction", "write 2"),
        ("zero_optimization: {reduce_bucket_size: 0}", "size: 0 is out of range", None),
        ("zero_optimization: {offload_optimizer: cpu}", '"cpu" is a text, but a section in braces', None),
        (
            "zero_optimization: {offload_optimizer: {device: cpu, ratio: 0.5}}",
            "ratio: 0.5 needs stage 3: DeepSpeed refuses it below",
            None,
        ),
        ("zero_optimization: {stage3_module_granularity_threshold: 1}", "acts at stage 3 only", "remove it"),
        ('flops_profiler: {enabled: "true"}', 'flops_profiler.enabled: "true" is a text', "write true"),
        ('tensorboard: {enabled: "false"}', 'tensorboard.enabled: "false" is a text', "write false"),
        ("tensorboard: {job_nme: x}", "tensorboard.job_nme: is no key of", "tensorboard.job_name?"),
        ("activation_checkpointing: {partition_activation: true}", "is no key of", "partition_activations?"),
        ('wall_clock_breakdown: "no"', 'wall_clock_breakdown: "no" is a text', "write false"),
        ("steps_per_print: ten", 'steps_per_print: "ten" is a text, but a whole number', None),
        ("steps_per_print: auto", '"auto" means nothing to DeepSpeed', "write the value itself"),
        ("prescale_gradients: true", "is refused at stage 2 while", "remove it"),
        ("gradient_allreduce_op: summ", '"summ" is not one of mean, sum', "did you mean sum?"),
        ("curriculum_learning: {enabled: true}", "was removed from DeepSpeed", None),
        ("comet: {api_key: abc}", "a key stands in the file", "COMET_API_KEY"),
        ("sequence_parallel_size: 3", "does not divide the world size 1", None),
        (
            "optimizer: {params: {foo: 1}}",
            "optimizer.params.foo: is no argument of AdamW, which stops at start",
            "arguments: adam_w_mode, amsgrad, betas",
        ),
        ("optimizer: {params: {momentum: 0.9}}", "params.momentum: ", "set optimizer.params.momentum in"),
        ("optimizer: {params: {beta: [0.9, 0.99]}}", "params.beta: ", "set optimizer.params.betas in"),
        ("optimizer: {params: {set_grad_none: true}}", "is no argument of torch's AdamW", "without"),
        ("optimizer: {lr: 1}", "optimizer.lr: optimizer is decided by", "set optimizer.lr in the run file"),
        (
            "optimizer: {legacy_fusion: true}",
            "optimizer.legacy_fusion: acts in fp16 and bf16 at stage 0 with the fused Adam only",
            "remove it",
        ),
        ("fp16: {auto_cast: true}", "fp16 is off, so auto_cast does nothing", "remove"),
        ("fp16: {loss_scale: 128}", "fp16.loss_scale: fp16 is decided", "set fp16.loss_scale in the"),
        (
            "bf16: {immediate_grad_update: true}",
            "bf16.immediate_grad_update: acts at stage 1 with",
            "remove it",
        ),
        ("bf16: {loss_scale: 1}", "bf16.loss_scale: is no key of bf16; DeepSpeed refuses", None),
        (
            "torch_autocast: {enabled: true, dtype: bfloat16}",
            "torch_autocast: dslaunch has its own",
            "set torch_autocast in",
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
    config = engine_of(f"{SMALL}zero_optimization: {{stage: 3}}\ndeepspeed: {text}\n")[1]
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "ratio": 1}


@pytest.mark.parametrize(
    ("written", "raw", "device"),
    [
        ("stage: 1", "bf16: {immediate_grad_update: true}", "a100"),
        ("stage: 2, offload_optimizer: cpu", "bf16: {bf16_master_weights_and_grads: true}", "a100"),
        ("stage: 2", "bf16: {bf16_master_weights_and_grads: true, bf16_optimizer_states: true}", "a100"),
        ("stage: 2", "bf16: {check_grad_overflow: true}", "a100"),
        ("stage: 2", "fp16: {auto_cast: true}", "v100"),
        ("stage: 2", "optimizer: {params: {bias_correction: false}}", "a100"),
        ("stage: 2", "optimizer: {params: {torch_adam: true, amsgrad: true}}", "cpu"),
    ],
)
def test_what_the_run_file_has_no_key_for_is_merged(written: str, raw: str, device: str) -> None:
    text = f"{SMALL}gradient_accumulation_steps: 2\nzero_optimization: {{{written}}}\ndeepspeed: {{{raw}}}\n"
    facts: dict[str, Any] = {} if device == "cpu" else {"inventory": gpus(device)}
    config = engine_of(text, **facts)[1]
    for path, value in leaves(yaml.safe_load(raw)):
        at: Any = config
        for part in path:
            at = at[part]
        assert at == value


@pytest.mark.parametrize(
    ("stage", "raw"),
    [
        ("stage: 2", "bf16: {bf16_master_weights_and_grads: true, bf16_optimizer_states: true}"),
        ("stage: 2, offload_optimizer: cpu", "bf16: {bf16_master_weights_and_grads: true}"),
        ("stage: 2, offload_optimizer: cpu", "optimizer: {params: {fp32_optimizer_states: false}}"),
    ],
)
def test_the_worker_keeps_its_masters_and_states_in_fp32(stage: str, raw: str) -> None:
    text = f"{SMALL}precision: bf16\nzero_optimization: {{{stage}}}\ndeepspeed: {{{raw}}}\n"
    engine_of(text, inventory=gpus("a100"))  # gen-config writes it
    with pytest.raises(ConfigErrors) as caught:
        plan_of(text, inventory=gpus("a100"))
    for problem in caught.value.problems:
        assert problem.message.startswith("run.yaml:") and ": deepspeed." in problem.message
        assert "dslaunch's worker keeps master weights and optimizer states in fp32" in problem.message


def test_masters_in_fp16_want_an_eps_that_is_not_0_there() -> None:
    text = f"{SMALL}precision: fp16\nzero_optimization: {{stage: 2, offload_optimizer: cpu}}\n"
    text += "deepspeed: {fp16: {fp16_master_weights_and_grads: true}}\n"
    with pytest.raises(ConfigErrors, match="eps below 6e-8 is 0 in fp16, so Adam divides by 0"):
        engine_of(text, inventory=gpus("a100"))
    text += "optimizer: {type: AdamW, params: {eps: 1.0e-6}}\n"
    engine_of(text, inventory=gpus("a100"))
    with pytest.raises(ConfigErrors, match="keeps master weights and optimizer states in fp32"):
        plan_of(text, inventory=gpus("a100"))


def test_raw_offload_is_held_against_the_optimizer() -> None:
    raw = "deepspeed: {zero_optimization: {offload_optimizer: {device: nvme, nvme_path: /n}}}"
    with pytest.raises(ConfigError, match="AdEMAMix: DeepSpeed keeps on NVMe what its own optimizers have"):
        plan_of(f"{SMALL}optimizer: {{type: AdEMAMix}}\nzero_optimization: {{stage: 3}}\n{raw}\n")


def test_the_workers_own_optimizer_reads_no_section() -> None:
    with pytest.raises(ConfigErrors) as caught:
        engine_of(f"{SMALL}optimizer: {{type: AdEMAMix}}\ndeepspeed: {{optimizer: {{params: {{eps: 1}}}}}}\n")
    assert "dslaunch's worker makes the optimizer itself" in caught.value.problems[0].message


def test_what_is_only_usual_may_be_overridden() -> None:
    text = SMALL + "gradient_accumulation_steps: 2\ndeepspeed: {data_types: {grad_accum_dtype: bf16}}\n"
    assert engine_of(text, inventory=gpus("a100"))[1]["data_types"] == {"grad_accum_dtype": "bf16"}


def test_an_override_that_repeats_the_run_file_is_let_be() -> None:
    config = engine_of(SMALL + "deepspeed: {train_batch_size: 8, zero_optimization: {stage: 2}}\n")[1]
    assert config["train_batch_size"] == 8


OURS = (template_root() / "deepspeed" / "ds_config.json.j2").read_text(encoding="utf-8")


def render_own(text: str, run_file: str = SMALL, **facts: Any) -> dict[str, Any]:
    """The JSON from a user's template my.j2 with this text."""
    return engine_of(run_file, template=TemplateFile("my.j2", text), **facts)[1]


def wrong_lines(text: str, run_file: str = SMALL, **facts: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        render_own(text, run_file, **facts)
    assert caught.value.exit_code == 2
    problems = caught.value.problems if isinstance(caught.value, ConfigErrors) else [caught.value]
    return [problem.message for problem in problems]


def with_line(old: str, new: str) -> str:
    """Our template with one line written otherwise."""
    (line,) = [line for line in OURS.split("\n") if old in line]
    return OURS.replace(line, new)


def test_a_copy_of_our_template_gives_the_same() -> None:
    for name in CASES:
        text, facts = CASES[name]
        if "nvme" not in text:
            assert render_own(OURS, SMALL + text, **facts) == config_of(name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"gradient_clipping"', "", "my.j2: gradient_clipping is missing; the plan says 1.0"),
        (
            '"train_batch_size"',
            '"train_batch_size": 9,',
            "my.j2:5: train_batch_size is 9; the plan says 8",
        ),
        (
            '"train_batch_size"',
            '"train_batch_size": 8.0,',
            "my.j2:5: train_batch_size is 8.0; the plan says 8",
        ),
        (
            '"train_batch_size"',
            '"train_batch_size": "{{ batch.train_batch_size }}",',
            'my.j2:5: train_batch_size is "8"; the plan says 8',
        ),
        (
            'include "deepspeed/precision',
            '"fp16": {"enabled": false},\n  "bf16": {"enabled": true},',
            "my.j2:11: bf16.enabled is true; the plan says false",
        ),
        (
            'include "deepspeed/precision',
            '"fp16": {"enabled": false},\n  "bf16": {"enabled": 0},',
            "my.j2:11: bf16.enabled is 0; the plan says false",
        ),
        (
            'include "deepspeed/precision',
            '"fp16": {"enabled": false, "loss_scale": 0},\n  "bf16": {"enabled": false},',
            "my.j2:10: fp16.loss_scale: fp16 is decided by the run file",
        ),
        (
            'include "deepspeed/zero',
            '"zero_optimization": {\n    "stage": 2,\n    "reduce_bucket_size": "auto"\n  },',
            'my.j2:13: zero_optimization.reduce_bucket_size: "auto" means nothing to DeepSpeed',
        ),
        (
            'include "deepspeed/zero',
            '"zero_optimization": {\n    "stage": 2,\n    "sub_group_size": 5\n  },',
            "my.j2:13: zero_optimization.sub_group_size: acts at stage 3 only; the stage is 2",
        ),
        (
            '"gradient_clipping"',
            '"gradient_clipping": 1.0,\n  "gradient_cliping": 2.0,',
            "my.j2:10: gradient_cliping: is no key of DeepSpeed",
        ),
        (
            '"gradient_clipping"',
            '"gradient_clipping": 1.0,\n  "scheduler": {},',
            "my.j2:10: scheduler: dslaunch has its own key for it",
        ),
    ],
)
def test_rendered_text_is_compared_with_the_plan_and_checked(old: str, new: str, message: str) -> None:
    (found,) = wrong_lines(with_line(old, new))
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n"a": 1,}', "my.j2:2: the rendered text is not JSON: "),
        ('{\n"a": 1,\n"b": 1, "a": 2}', "my.j2:3: the rendered text is not JSON: the key 'a' is there twice"),
        ('{\n\n"a": NaN}', "my.j2:3: the rendered text is not JSON: NaN is not a JSON number"),
        ("[]", "my.j2:1: the rendered text is JSON, but no object"),
        ("", "my.j2: the rendered text is not JSON: Expecting value"),
        ("{# a #}\n// x\n{}", "my.j2:2: the rendered text is not JSON: Expecting value near '// x'"),
        ('{\n{% for i in [1, 2] %}\n"a": {{ i }}\n{% endfor %}\n}', "my.j2:3: the rendered text is not JSON"),
        ("{\n  {{ optimizer.typ }}", "my.j2:2: "),
        ("{\n{% if %}", "my.j2:2: "),
    ],
)
def test_rendered_text_must_be_strict_json(text: str, message: str) -> None:
    (found,) = wrong_lines(text)
    assert found.startswith(message)


def test_all_that_is_wrong_with_a_template_is_shown_at_once() -> None:
    text = with_line('"gradient_clipping"', '"step_per_print": 5,').replace(
        '"train_batch_size": {{', '"train_batch_size": 1{{'
    )
    assert [message.split(";")[0] for message in wrong_lines(text)] == [
        "my.j2: gradient_clipping is missing",
        "my.j2:5: train_batch_size is 18",
        "my.j2:9: step_per_print: is no key of DeepSpeed",
    ]


def test_a_template_may_add_what_the_plan_leaves_open() -> None:
    added = '"gradient_clipping": {{ gradient_clipping | json }},\n  "steps_per_print": 100,'
    assert render_own(with_line('"gradient_clipping"', added))["steps_per_print"] == 100


def test_the_plan_records_what_the_template_gave() -> None:
    """launch.sh and --resume go by plan.json, so that a template edited later changes no recorded run."""
    added = '"gradient_clipping": {{ gradient_clipping | json }},\n  "steps_per_print": 100,'
    template = TemplateFile("my.j2", with_line('"gradient_clipping"', added))
    plan = plan_of(SMALL + "deepspeed_template: my.j2\n", template=template)
    again = from_json(RunPlan, to_json(plan))
    assert again.ds_config["steps_per_print"] == 100
    assert again.deepspeed_template == "/base/my.j2"
    assert again.origins["deepspeed_template"].source == "run.yaml:4"


def test_a_template_that_is_not_there_is_named_with_all_else_that_is_wrong() -> None:
    missing = ConfigError("run.yaml:4: deepspeed_template: my.j2 not found")
    text = SMALL + "deepspeed_template: my.j2\ndeepspeed: {steps_per_print: ten}\n"
    with pytest.raises(ConfigErrors) as caught:
        engine_of(text, template_problem=missing)
    assert [problem.message.split(":")[1] for problem in caught.value.problems] == ["4", "5"]


def test_raw_keys_are_merged_over_a_template() -> None:
    added = '"gradient_clipping": {{ gradient_clipping | json }},\n  "steps_per_print": 100,'
    text = with_line('"gradient_clipping"', added)
    config = render_own(text, SMALL + "deepspeed: {steps_per_print: 5}\n")
    assert config["steps_per_print"] == 5
    (found,) = wrong_lines(text, SMALL + "deepspeed: {steps_per_print: -5}\n")
    assert found.startswith("run.yaml:4: deepspeed.steps_per_print: -5 is out of range")


def test_what_check_warns_of_in_the_plan_itself_is_said() -> None:
    text = SMALL + "precision: fp16\nfp16: {initial_scale_power: 32}\n"
    notes = engine_of(text, inventory=gpus("v100"))[2]
    assert any(note.startswith("run.yaml:5: fp16.initial_scale_power: the scale starts at") for note in notes)
