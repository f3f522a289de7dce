"""zero_optimization: section -> the keys that act at the chosen stage."""

from __future__ import annotations

from typing import Any

from dslaunch.config.facts import Facts
from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.config.spec_engine import EngineSpec, OffloadSpec, ZeroSpec
from dslaunch.config.without_deepspeed import uses_torch

# Stages at which DeepSpeed 0.19.8 reads each key (runtime/engine.py, _configure_zero_optimizer,
# and the constructors it calls).
ACTING_STAGES: dict[str, tuple[int, ...]] = {
    "overlap_comm": (1, 2, 3),
    "contiguous_gradients": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "reduce_bucket_size": (1, 2, 3),
    "allgather_bucket_size": (1, 2),
    "round_robin_gradients": (1, 2),
    "sub_group_size": (3,),
    "stage3_prefetch_bucket_size": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "stage3_gather_16bit_weights_on_model_save": (3,),
    "offload_optimizer": (1, 2, 3),
    "offload_param": (3,),
}

_GATHER = "stage3_gather_16bit_weights_on_model_save"
CHECKPOINTING = "model.gradient_checkpointing"
OFFLOADS = ("offload_optimizer", "offload_param")


def auto_keys(spec: EngineSpec) -> list[str]:
    """The keys of the run file that leave their value to the memory plan; of ZeRO none without DeepSpeed."""
    recompute = isinstance(spec, RunSpec) and spec.model.gradient_checkpointing == "auto"
    return [*auto_zero_keys(spec), *([CHECKPOINTING] if recompute else [])]


def auto_zero_keys(spec: EngineSpec) -> list[str]:
    """Those of them that the DeepSpeed JSON depends on."""
    if uses_torch(spec):
        return []
    zero = spec.zero_optimization
    keys = ["zero_optimization.stage"] if zero.stage == "auto" else []
    return keys + [f"zero_optimization.{name}" for name in OFFLOADS if offload_device(zero, name) == "auto"]


def offload_device(zero: ZeroSpec, name: str) -> str | None:
    """``auto``, ``cpu`` or ``nvme`` of one of OFFLOADS; None where nothing is offloaded."""
    part: OffloadSpec | None = getattr(zero, name)
    return None if part is None else part.device


def resolve_zero(spec: ZeroSpec, facts: Facts, report: Report) -> dict[str, Any]:
    """The block without ``stage``: what was given and acts, and what stage 3 needs.

    Keys that the stage ignores are problems in ``report``. Every ``auto`` must be settled
    (zero_auto.settle_zero).
    """
    assert spec.stage != "auto"
    options: dict[str, Any] = {}
    for key, stages in ACTING_STAGES.items():
        value = getattr(spec, key)
        if value is None:
            continue
        if spec.stage not in stages:
            report.fail(f"zero_optimization.{key}", *_ignored(key, spec.stage, stages))
        options[key] = _offload(key, value, facts, report) if isinstance(value, OffloadSpec) else value
    if spec.stage == 3:
        options.setdefault(_GATHER, True)
        if getattr(spec, _GATHER) is None:
            why = "without it save_16bit_model writes nothing at stage 3"
            report.reason(f"zero_optimization.{_GATHER}", why, "default")
    return options


def _ignored(key: str, stage: int, stages: tuple[int, ...]) -> tuple[str, str]:
    at = "stage 3" if stages == (3,) else f"stages {', '.join(map(str, stages))}"
    message = f"zero_optimization.{key} acts at {at} only; the stage is {stage}, where DeepSpeed ignores it"
    return message, f"remove {key}, or set zero_optimization.stage to {stages[-1]}"


def _offload(key: str, spec: OffloadSpec, facts: Facts, report: Report) -> dict[str, Any]:
    where = f"zero_optimization.{key}"
    if spec.device == "nvme" and spec.nvme_path is None:
        report.fail(where, f"{where}.nvme_path is missing: device nvme needs a directory", "set nvme_path")
    if spec.device == "cpu" and spec.nvme_path is not None:
        report.fail(
            f"{where}.nvme_path", f"{where}.nvme_path has no effect with device cpu", "use device nvme"
        )
    block: dict[str, Any] = {"device": spec.device, "pin_memory": spec.pin_memory}
    if spec.nvme_path is not None:
        block["nvme_path"] = facts.paths[f"{where}.nvme_path"].absolute
    return block
