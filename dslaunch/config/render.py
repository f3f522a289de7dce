"""EnginePlan -> the DeepSpeed JSON, rendered from templates, parsed back and compared with the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dslaunch.config.engine_plan import EnginePlan
from dslaunch.config.passthrough import Path, check_overrides, leaves
from dslaunch.config.report import Report
from dslaunch.core.errors import ConfigError
from dslaunch.core.templating import render_template

TEMPLATE = "deepspeed/ds_config.json.j2"


def render_ds_config(engine: EnginePlan, report: Report) -> dict[str, Any]:
    """The DeepSpeed JSON of ``engine`` with the run file's ``deepspeed:`` keys merged last.

    Raises ConfigError where the rendered text is no JSON or says something else
    than the plan; overrides that contradict the run file go to ``report``.
    """
    config = parse_rendered(render_template(TEMPLATE, engine.context()), TEMPLATE)
    check_against_plan(config, engine, TEMPLATE)
    overrides = report.loaded.spec.deepspeed
    if overrides:
        check_overrides(overrides, engine.precision, planned_values(engine), report)
        config = _merge(config, overrides)
    return config


def to_text(config: Mapping[str, Any]) -> str:
    """The JSON as it is printed and saved."""
    return json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def parse_rendered(text: str, name: str) -> dict[str, Any]:
    """Parse rendered text strictly: no comments, no duplicate keys, no NaN."""
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if text.splitlines() else ""
        raise ConfigError(f"template {name} does not give JSON: {error.msg} near {line!r}") from None
    except ValueError as error:
        raise ConfigError(f"template {name} does not give JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"template {name} gives no JSON object")
    return value


def planned_values(engine: EnginePlan) -> dict[Path, Any]:
    """Every key of the JSON that the plan decides, with its value."""
    values: dict[Path, Any] = {
        ("train_batch_size",): engine.batch.train_batch_size,
        ("train_micro_batch_size_per_gpu",): engine.batch.train_micro_batch_size_per_gpu,
        ("gradient_accumulation_steps",): engine.batch.gradient_accumulation_steps,
        ("gradient_clipping",): engine.gradient_clipping,
        ("fp16", "enabled"): engine.precision == "fp16",
        ("bf16", "enabled"): engine.precision == "bf16",
        ("zero_optimization", "stage"): engine.zero_stage,
        ("optimizer", "type"): engine.optimizer.type,
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
    values |= {("zero_optimization", *path): v for path, v in leaves(engine.zero_options)}
    values |= {("optimizer", "params", *path): v for path, v in leaves(engine.optimizer.params)}
    return values


def check_against_plan(config: Mapping[str, Any], engine: EnginePlan, name: str) -> None:
    """Raise ConfigError at the first key that is missing, differs in value or type, or is ``auto``."""
    found = dict(leaves(config))
    for path, value in planned_values(engine).items():
        key = ".".join(path)
        if path not in found:
            raise ConfigError(f"template {name}: {key} is missing; the plan says {value!r}")
        if type(found[path]) is not type(value) or found[path] != value:
            raise ConfigError(f"template {name}: {key} is {found[path]!r}; the plan says {value!r}")
    for path, value in found.items():
        if value == "auto":
            raise ConfigError(
                f'template {name}: {".".join(path)} is "auto", which DeepSpeed itself cannot read'
            )
    if engine.precision != "fp16" and set(config["fp16"]) != {"enabled"}:
        raise ConfigError(
            f"template {name}: fp16 has keys besides enabled, but precision is {engine.precision}"
        )


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(below, value) if both else _listed(value)  # type: ignore[arg-type]
    return merged


def _listed(value: Any) -> Any:
    """The run file's tuples as lists, which is what JSON has."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
