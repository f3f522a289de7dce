"""The reason and source of every value of a plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.config.report import Report
from dslaunch.config.zero import OFFLOADS
from dslaunch.core.plan import Origin, RunPlan

# Plan keys whose run-file key has another name.
_RENAMED = {
    "zero_stage": "zero_optimization.stage",
    "torch_autocast": "torch_autocast.enabled",
    "optimizer.params.lr": "optimizer.lr",
    "batch.train_batch_size": "train_batch_size",
    "batch.train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "batch.gradient_accumulation_steps": "gradient_accumulation_steps",
    "launch.master_addr": "cluster.master_addr",
    "launch.master_port": "cluster.master_port",
    "launch.run_dir": "output.run_dir",
    "launch.argv": "launch.python",
}
_WITHOUT_ORIGIN = ("ds_config", "origins", "schema_version")
_DERIVED = {
    "launch.argv": "the worker of each rank",
    "launch.run_dir": "runs/<name>-<time> under $DSLAUNCH_RUNS or the current directory",
    "launch.cwd": "where the command was typed",
    "launch.master_addr": "this machine, for a local launch",
    "launch.master_port": "a free port is found at the start",
    "name": "the run file's name",
}


def build_origins(plan: RunPlan, report: Report) -> RunPlan:
    """``plan`` with an origin for each value, keyed by its path in the plan."""
    origins = {key: _origin(key, value, report) for key, value in plan_values(plan)}
    return dataclasses.replace(plan, origins=origins)


def plan_values(plan: RunPlan) -> Iterator[tuple[str, Any]]:
    """Key path and value of everything in a plan but the origins; of ds_config zero_optimization alone.

    Lists of sections are walked (``data.train[0].path``); other lists, the
    topology and ``launch.env`` are one value each.
    """
    for f in dataclasses.fields(plan):
        if f.name not in _WITHOUT_ORIGIN:
            yield from _walk(f.name, getattr(plan, f.name))
        if f.name == "zero_stage" and plan.engine == "deepspeed":
            yield from _zero_values(plan.ds_config["zero_optimization"])


def run_file_key(key: str) -> str:
    """What a key of the plan is called in the run file, where it is written there at all."""
    return _RENAMED.get(key, key)


def is_default(key: str, value: Any, origin: Origin) -> bool:
    """Whether nobody wrote the value, and nothing that was written or found decided it."""
    plain = origin.source == "derived" and (key in _DERIVED or key.endswith(".kind"))
    return value is None or origin.source == "default" or plain


def _zero_values(block: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The rest of the block as rendered; None for an offload that it has not."""
    whole = {**dict.fromkeys(OFFLOADS), **block}
    for key in whole:
        if key != "stage":
            yield from _walk(f"zero_optimization.{key}", whole[key])


def _walk(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and key != "launch.topology":
        for f in dataclasses.fields(value):
            yield from _walk(f"{key}.{f.name}", getattr(value, f.name))
    elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        for i, item in enumerate(value):
            yield from _walk(f"{key}[{i}]", item)
    elif isinstance(value, Mapping) and key != "launch.env":
        for name, item in value.items():
            yield from _walk(f"{key}.{name}", item)
    else:
        yield key, value


def _origin(key: str, value: Any, report: Report) -> Origin:
    if key in report.reasons:
        return report.reasons[key]
    written = _RENAMED.get(key, key)
    for name in _spellings(written):
        if name in report.loaded.positions:
            return Origin(reason="as written", source=report.loaded.positions[name])
    if key in _DERIVED:
        return Origin(reason=_DERIVED[key], source="derived")
    if key.endswith(".kind"):
        return Origin(reason="by looking at the path", source="derived")
    return Origin(reason="not set" if value is None else "default", source="default")


def _spellings(key: str) -> Iterator[str]:
    """The key as it may stand in the file: ``model: X`` for model.path, ``train: {..}`` for train[0]."""
    yield key
    yield key.replace("[0]", "")
    if key.endswith(".path"):
        yield re.sub(r"\.path$", "", key)
        yield re.sub(r"\[0\]\.path$", "", key)
    if key.startswith("zero_optimization."):
        yield key.removesuffix(".device")
        yield f"deepspeed.{key}"
