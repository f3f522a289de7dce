"""dslaunch plan: every resolved value with its reason and source, and what it takes in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dslaunch.cli import options

if TYPE_CHECKING:
    from dslaunch.config.length import RunLength
    from dslaunch.core.plan import RunPlan

SCHEMA_VERSION = 1


@click.command("plan", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_file", required=False, metavar="[RUN.yaml]")
@options.cluster_options
@options.master_options
@options.memory_options
@options.set_option
@options.run_dir_option
@options.json_option
@click.option("--changed", is_flag=True, help="Leave out the values that are defaults.")
def command(
    run_file: str | None,
    set_: tuple[str, ...],
    run_dir: str | None,
    as_json: bool,
    changed: bool,
    **flags: Any,
) -> None:
    """Show every resolved value of RUN.yaml (-: stdin), why it is so, and what it takes in memory.

    Without RUN.yaml: what a script of your own takes, from --model and flags alone.

    Exit code 0 also for what does not fit, which the first lines and `fits` of --json say; 2 where
    `auto` was to find what fits and nothing does.
    """
    from dataclasses import asdict

    from dslaunch.cli import plan_memory
    from dslaunch.cli.disk_space import disk_line, disk_of_run, disk_warning
    from dslaunch.cli.plan_verdict import length_line, verdict_lines
    from dslaunch.cli.talk import note
    from dslaunch.config.length import length_of_run

    if changed and (as_json or run_file is None):
        raise click.UsageError("--changed is for the table of a run file's values")
    if run_file is None:
        report, lines = plan_memory.plan_flags(set_, flags)
    else:
        plan, loaded = options.load_and_resolve_with_spec(
            run_file, set_=set_, run_dir=run_dir, **options.run_file_flags(flags)
        )
        length = length_of_run(plan)
        memory, disk = plan_memory.memory_of_run(plan, loaded), disk_of_run(plan)
        report = {**plan_report(plan), "length": asdict(length), **plan_memory.memory_report(memory)}
        report["fp32_modules"] = memory.matched if memory else None
        matches = plan_memory.matches(plan, memory, loaded) if memory else None
        report["matches"] = matches
        report["disk"] = None if disk is None else disk.to_json()
        lines = verdict_lines(
            plan.precision,
            plan.ds_config.get("zero_optimization"),
            plan.batch,
            memory,
            autocast=plan.torch_autocast is not None,
        )
        lines.insert(2, length_line(length))
        lines += ["", *plan_lines(plan, changed=changed), *length_lines(length)]
        lines += fp32_lines(memory.matched) if memory else []
        lines += match_lines(matches) if matches else []
        lines += ["", *plan_memory.memory_lines(memory)] if memory else []
        if disk is not None:
            lines.append(disk_line(disk))
            if warning := disk_warning(disk):
                note(warning)
    if as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        click.echo("\n".join(lines))


def plan_report(plan: RunPlan) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    from dslaunch.core.plan import to_json

    batch = to_json(plan.batch)
    world_size = batch.pop("world_size")
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": world_size,
        "precision": {"value": plan.precision, "reason": plan.origins["precision"].reason},
        "zero_stage": plan.zero_stage,
        "batch": batch,
        "dtypes": dtypes_of(plan),
        "plan": to_json(plan),
    }


def plan_lines(plan: RunPlan, *, changed: bool = False) -> list[str]:
    """One line a value: key as in the run file, value, reason, source; ``changed``: without defaults."""
    from dslaunch.config.origins import is_default, plan_values

    lines = []
    for key, value in plan_values(plan):
        origin = plan.origins[key]
        if key == "optimizer.params.lr" or (changed and is_default(key, value, origin)):
            continue
        why = origin.source if origin.reason == "as written" else f"{origin.reason}"
        if origin.source not in ("default", "derived") and origin.reason != "as written":
            why += f" ({origin.source})"
        lines.append(f"{_called(key):<40} {_shown(value):<24}  {why}")
    return [*lines, *dtype_lines(dtypes_of(plan))]


def _called(key: str) -> str:
    """A key of the plan as it is called in the run file; the worker's command is no key of it."""
    from dslaunch.config.origins import run_file_key

    return key if key == "launch.argv" else run_file_key(key)


def length_lines(length: RunLength) -> list[str]:
    """The number of steps and of warm-up steps as lines of the plan."""
    found = [
        ("length.total_steps", length.total_steps, length.reason),
        ("length.warmup_steps", length.warmup_steps, length.warmup_reason),
    ]
    return [f"{key:<40} {_shown(value):<24}  {reason}" for key, value, reason in found]


def fp32_lines(matched: Mapping[str, Sequence[str]]) -> list[str]:
    """What each pattern of fp32_modules means in this model, as lines of the plan."""
    from dslaunch.core.module_patterns import preview

    return [
        f"{'fp32_modules ' + pattern:<40} {count:<24}  {names}" for pattern, count, names in preview(matched)
    ]


def match_lines(matches: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What each target of the adapter and each pattern of the optimizer means, as lines of the plan."""
    from dslaunch.config.memory.matches import match_rows

    return [f"{key:<40} {count:<24}  {names}" for key, count, names in match_rows(dict(matches))]


def dtypes_of(plan: RunPlan) -> dict[str, str]:
    """The type of everything that has one in the training of dslaunch's own worker."""
    from dslaunch.config.memory.rows import HEADS

    found = _dtypes_of_weights(plan)
    model = found.pop("model")
    norms = head = "as fp32_modules says" if plan.fp32_modules and plan.precision != "fp32" else model
    saved = plan.adapter.modules_to_save if plan.adapter else ()
    if saved and found["adapter"] != norms == model:  # trained whole: fp32 over 16 bit with engine torch
        head = found["adapter"] if {name.rpartition(".")[2] for name in saved}.intersection(HEADS) else head
        norms = "as modules_to_save says" if any("norm" in name for name in saved) else norms
    if saved:
        found = {"modules_to_save": found["adapter"], **found}
    return {"model": model, "norms": norms, "head": head, "rotary_tables": "fp32", "loss": "fp32", **found}


def _dtypes_of_weights(plan: RunPlan) -> dict[str, str]:
    from dslaunch.config.precision import dtypes, dtypes_without_deepspeed

    quantization = plan.model.quantization_config
    method = "full" if plan.adapter is None else "qlora" if quantization else "lora"
    if plan.engine == "torch":
        return dtypes_without_deepspeed(plan.precision, method, quantization)
    if plan.torch_autocast is not None:
        found = dtypes_without_deepspeed(plan.precision, method, quantization)
        return {**dict.fromkeys(found, "fp32"), "autocast": plan.precision, "communication": plan.precision}
    found = dtypes(plan.precision, plan.ds_config, method, quantization)
    if plan.zero_stage == 0 and plan.precision == "bf16" and plan.batch.gradient_accumulation_steps > 1:
        found["gradient_accumulation"] = "fp32"  # the worker runs 16-bit stage 0 as stage 1, which can
    return found


def dtype_lines(found: dict[str, str]) -> list[str]:
    """The same as lines of the plan."""
    return [f"{'dtypes.' + name:<40} {dtype:<24}  {_why(name, dtype)}" for name, dtype in found.items()]


def _why(name: str, dtype: str) -> str:
    if name in ("rotary_tables", "loss", "master_weights"):
        return "in every precision"
    if dtype.startswith("as "):
        return "see what its patterns match"
    return "packed as bytes" if dtype in ("uint8", "int8") else "follows from precision"


def _shown(value: Any) -> str:
    import dataclasses

    if value is None:
        return "-"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hosts = getattr(value, "hosts", ())
        return ", ".join(f"{h.name} slots {','.join(h.slots)}" for h in hosts)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
