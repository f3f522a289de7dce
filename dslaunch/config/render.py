"""EnginePlan -> the DeepSpeed JSON, rendered from templates, parsed back and compared with the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dslaunch.config.engine_plan import EnginePlan
from dslaunch.config.facts import Facts
from dslaunch.config.nested import Path, leaves, merge
from dslaunch.config.rendered import in_order, parse_rendered, place_of
from dslaunch.config.report import Report
from dslaunch.config.torch_autocast import autocast_block
from dslaunch.core.devices import Device
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.plan import Fp16Plan
from dslaunch.core.templating import Rendered, render_template

TEMPLATE = "deepspeed/ds_config.json.j2"


def render_ds_config(
    engine: EnginePlan,
    report: Report,
    facts: Facts,
    devices: Sequence[Device] | None,
) -> dict[str, Any]:
    """The DeepSpeed JSON of ``engine`` with the run file's ``deepspeed:`` keys merged last.

    Rendered from the user's template where ``facts`` has one. ``devices``: of all hosts,
    where known. What is wrong with that template or those keys goes to ``report``. Raises
    ConfigError(s) where our own template gives no JSON or says something else than the plan.
    """
    ours = render_template(TEMPLATE, engine.context())
    planned = parse_rendered(ours)
    if wrong := compare_with_plan(planned, engine, ours):
        raise ConfigErrors(list(wrong.values()))
    rendered, config = _render_own(engine, report, facts) or (None, planned)
    if rendered is not None:
        wrong = compare_with_plan(config, engine, rendered)
    final = merge(config, report.loaded.spec.deepspeed)
    if final != planned or _may_be_risky(engine):
        # Not imported for nothing: a thirtieth of a second, a tenth of the whole command.
        from dslaunch.config.passthrough import Additions, check_additions

        additions = Additions(planned, planned_values(engine), engine.precision, rendered, config, wrong)
        check_additions(additions, final, report, world_size=engine.batch.world_size, devices=devices)
    if rendered is not None:
        for problem in in_order(rendered, wrong.values()):
            report.add("deepspeed_template", problem)
    return final


def _render_own(engine: EnginePlan, report: Report, facts: Facts) -> tuple[Rendered, dict[str, Any]] | None:
    """The user's template rendered and parsed; None where there is none, or none that gives JSON."""
    try:
        if facts.template_problem is not None:
            raise facts.template_problem
        if facts.template is None:
            return None
        rendered = render_template(facts.template, engine.context())
        return rendered, parse_rendered(rendered)
    except ConfigError as error:
        report.add("deepspeed_template", error)
        return None


def to_text(config: Mapping[str, Any]) -> str:
    """The JSON as it is printed and saved."""
    return json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def planned_values(engine: EnginePlan) -> dict[Path, Any]:
    """Every key of the JSON that the plan decides, with its value."""
    values: dict[Path, Any] = {
        ("train_batch_size",): engine.batch.train_batch_size,
        ("train_micro_batch_size_per_gpu",): engine.batch.train_micro_batch_size_per_gpu,
        ("gradient_accumulation_steps",): engine.batch.gradient_accumulation_steps,
        ("gradient_clipping",): engine.gradient_clipping,
        ("fp16", "enabled"): engine.precision == "fp16",
        ("bf16", "enabled"): engine.weights == "bf16",
        ("zero_optimization", "stage"): engine.zero_stage,
    }
    if engine.fp16 is not None:
        block = dict(vars(engine.fp16))
        block["loss_scale"] = 0 if block["loss_scale"] == "dynamic" else block["loss_scale"]
        values |= {("fp16", key): value for key, value in block.items()}
    if engine.grad_accum_dtype is not None:
        values["data_types", "grad_accum_dtype"] = engine.grad_accum_dtype
    if engine.communication_data_type is not None:
        values[("communication_data_type",)] = engine.communication_data_type
    if engine.zero_allow_untested_optimizer:
        values[("zero_allow_untested_optimizer",)] = True
    autocast = autocast_block(engine.torch_autocast) or {}
    values |= {("torch_autocast", *path): value for path, value in leaves(autocast)}
    values |= {("zero_optimization", *path): v for path, v in leaves(engine.zero_options)}
    values |= {("scheduler", *path): v for path, v in leaves(engine.scheduler or {})}
    if engine.optimizer.made_by == "deepspeed":
        values[("optimizer", "type")] = engine.optimizer.type
        values |= {("optimizer", "params", *path): v for path, v in leaves(engine.optimizer.params)}
    else:
        values[("zero_force_ds_cpu_optimizer",)] = False
    return values


def compare_with_plan(
    config: Mapping[str, Any], engine: EnginePlan, rendered: Rendered
) -> dict[Path, ConfigError]:
    """What is wrong with every planned key that is missing or differs in value or type."""
    found = dict(leaves(config))
    problems = {}
    for path, value in planned_values(engine).items():
        key, write = ".".join(path), _expression(path)
        if path not in found:
            message = f"{place_of(rendered, path)}: {key} is missing; the plan says {json.dumps(value)}"
            problems[path] = ConfigError(message, hint=f'write "{path[-1]}": {write}')
        elif type(found[path]) is not type(value) or found[path] != value:
            there = json.dumps(found[path], ensure_ascii=False)
            message = f"{place_of(rendered, path)}: {key} is {there}; the plan says {json.dumps(value)}"
            problems[path] = ConfigError(
                message, hint=f"write {write} here; the value comes from the run file or a flag"
            )
    return problems


def _expression(path: Path) -> str:
    """What a template writes for a planned value."""
    if path[0] in ("fp16", "bf16") and path[1] == "enabled":
        return f'{{{{ (precision == "{path[0]}") | json }}}}'
    if path == ("fp16", "loss_scale"):
        return '{{ (0 if fp16.loss_scale == "dynamic" else fp16.loss_scale) | json }}'
    if path == ("zero_optimization", "stage"):
        return "{{ zero_stage | json }}"
    renamed = {"zero_optimization": ("zero_options",), "data_types": ()}
    name = (*renamed.get(path[0], path[:1]), *path[1:])
    in_batch = path[0].startswith(("train_", "gradient_accumulation"))
    return f"{{{{ {'batch.' if in_batch else ''}{'.'.join(name)} | json }}}}"


def _may_be_risky(engine: EnginePlan) -> bool:
    """Whether the plan itself may hold something that ``check`` warns of."""
    saves = engine.zero_options.get("stage3_gather_16bit_weights_on_model_save", True)
    scaling = engine.fp16 not in (None, Fp16Plan())
    return scaling or "offload_optimizer" in engine.zero_options or not saves
