"""Specs and plans from text, with facts given by hand: no file is read, no machine is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.engine_plan import EnginePlan, resolve_engine
from dslaunch.config.facts import Facts, ModelAttention, PathFact, written_paths
from dslaunch.config.load import LoadedSpec, load_run_file
from dslaunch.config.render import render_ds_config
from dslaunch.config.report import Report
from dslaunch.config.resolve import resolve
from dslaunch.config.spec import RunSpec
from dslaunch.core.devices import Accelerator, Inventory, lookup_device
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.plan import RunPlan
from dslaunch.core.templating import TemplateFile
from dslaunch.core.topology import Host

SMALL = "model: org/model\ndata: {train: org/data}\ntrain_batch_size: 8\n"
CPU = Inventory((), lookup_device("cpu"))


def gpus(*names: str) -> Inventory:
    """A machine with these devices."""
    devices = tuple(Accelerator(str(i), lookup_device(name)) for i, name in enumerate(names))
    return Inventory(devices, lookup_device("cpu"))


def load(text: str, *overrides: str) -> LoadedSpec[RunSpec]:
    """A run file called run.yaml with this text."""
    return load_run_file(Path("run.yaml"), overrides, text=text)


def problems(text: str, *overrides: str) -> list[tuple[str, str | None]]:
    """Message and hint of everything that is wrong with a run file's text."""
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    assert caught.value.exit_code == 2
    found = caught.value.problems if isinstance(caught.value, ConfigErrors) else [caught.value]
    return [(problem.message, problem.hint) for problem in found]


def only(text: str, *overrides: str) -> tuple[str, str | None]:
    """Message and hint, where one thing alone is wrong."""
    (problem,) = problems(text, *overrides)
    return problem


def facts_of(
    loaded: LoadedSpec[Any],
    *,
    inventory: Inventory = CPU,
    hosts: tuple[Host, ...] | None = None,
    paths: dict[str, PathFact] | None = None,
    model_dtype: str | None = None,
    model_quantization: dict[str, Any] | None = None,
    hostfile_problem: ConfigError | None = None,
    template: TemplateFile | None = None,
    template_problem: ConfigError | None = None,
    model_attention: ModelAttention | None = None,
    flash_attn: bool = False,
) -> Facts:
    """Facts in which no path exists but those of ``paths``."""
    missing = {key: PathFact("missing", f"/base/{text}") for key, text in written_paths(loaded.spec)}
    return Facts(
        inventory,
        hosts=hosts,
        paths={**missing, **(paths or {})},
        model_dtype=model_dtype,
        model_quantization=model_quantization,
        hostfile_problem=hostfile_problem,
        template=template,
        template_problem=template_problem,
        model_attention=model_attention or ModelAttention(),
        flash_attn=flash_attn,
    )


def resolved(text: str, *overrides: str, **facts: Any) -> tuple[RunPlan, tuple[str, ...]]:
    """The plan of a run file's text, and the notes."""
    loaded = load(text, *overrides)
    return resolve(
        loaded,
        facts=facts_of(loaded, **facts),
        run_dir=Path("/runs/r"),
        cwd=Path("/work dir"),
        python="/py/bin/python",
        default_name="run",
    )


def plan_of(text: str, *overrides: str, **facts: Any) -> RunPlan:
    """The plan of a run file's text."""
    return resolved(text, *overrides, **facts)[0]


def engine_of(text: str, *overrides: str, **facts: Any) -> tuple[EnginePlan, dict[str, Any], list[str]]:
    """Engine plan, DeepSpeed JSON and notes. Raises the problems as the commands do."""
    loaded = load(text, *overrides)
    report = Report(loaded)
    known = facts_of(loaded, **facts)
    engine = resolve_engine(report, known)
    config = render_ds_config(engine[0], report, known, engine[1].devices) if engine else {}
    report.raise_if_any()
    assert engine is not None
    return engine[0], config, report.notes
