"""ZeRO: keys that do nothing at the stage, offload, what is saved, and the rest that contradicts itself."""

from __future__ import annotations

from typing import Any

from dslaunch.config.check.context import PARENT, Checker
from dslaunch.config.check.keys import parse_version
from dslaunch.config.check.nvme import check_nvme
from dslaunch.config.check.zenflow import check_compute_norm, check_zenflow
from dslaunch.config.check.zeropp import check_zeropp
from dslaunch.config.schema import Key, find_key, section_keys
from dslaunch.core.finding import Edit, KeyPath

_GATHER = "stage3_gather_16bit_weights_on_model_save"
_UNSAVED = {
    "raw": "save_16bit_model and save_model write no weights",
    "hf-trainer": "save_model writes DeepSpeed's checkpoint in place of the weights",
    "accelerate": "get_state_dict and save_model stop, after the training",
}
_NVME_KEYS = (
    "nvme_path",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
)


def check_zero(checker: Checker) -> None:
    """Every rule about stages, offload and saving."""
    _check_stages(checker)
    for name in ("offload_optimizer", "offload_param"):
        _check_offload(checker, name)
    check_nvme(checker)
    _check_ratio(checker)
    check_zeropp(checker)
    _check_requirements(checker)
    _check_saving(checker)
    _check_reduction(checker)
    _check_overlap(checker)
    check_zenflow(checker)
    check_compute_norm(checker)
    _check_names(checker)


def _check_stages(checker: Checker) -> None:
    """Keys that DeepSpeed reads and then never uses at this stage."""
    stage = checker.stage
    if stage is None:
        return
    for name, value in checker.block(PARENT).items():
        key = section_keys(PARENT).get(name)
        if key is None or not key.stages or stage in key.stages or key.removed:
            continue
        if _harmless(key, value):
            continue
        _report_ignored(checker, (PARENT, name), key, stage)
    if checker.precision == "fp16" and stage == 0:
        for name in ("hysteresis", "consecutive_hysteresis"):
            if checker.has("fp16", name):
                checker.report(
                    "ignored-at-stage", "warning", ("fp16", name), "is ignored at stage 0", "use stage 1"
                )


def _harmless(key: Key, value: Any) -> bool:
    """Written, but as what happens anyway: false, none."""
    if isinstance(value, dict):
        return value.get("device") == "none"
    return (value is False and key.default in ("false", "null")) or value is None


def _report_ignored(checker: Checker, path: KeyPath, key: Key, stage: int) -> None:
    where = "stage 3 only" if key.stages == (3,) else f"stages {', '.join(map(str, key.stages))} only"
    checker.report_to_remove(
        "ignored-at-stage",
        "warning",
        path,
        f"acts at {where}; the stage is {stage}, where DeepSpeed ignores it",
        f"remove it, or set zero_optimization.stage to {key.stages[-1]}",
    )


def _check_offload(checker: Checker, name: str) -> None:
    block = checker.block(PARENT, name)
    if not block:
        return
    path = (PARENT, name)
    device = block.get("device", "none")
    others = [key for key in block if key != "device" and find_key(f"{PARENT}.{name}.{key}") is not None]
    verb = "does" if len(others) == 1 else "do"
    if device == "none" and others:
        checker.report(
            "offload-off",
            "warning",
            (*path, others[0]),
            f"device is none, so nothing is offloaded and {', '.join(others)} {verb} nothing",
            f"remove {name}, or set its device to cpu",
            fix=f"remove {name}",
            edits=(Edit("delete", path),),
        )
    elif device == "nvme" and not block.get("nvme_path"):
        checker.report(
            "needs",
            "error",
            (*path, "device"),
            "nvme needs nvme_path: a directory on the NVMe",
            "set nvme_path",
        )
    elif device == "cpu" and (idle := [key for key in _NVME_KEYS if key in block and not _off(block[key])]):
        acts, remove = ("acts", "remove it") if len(idle) == 1 else ("act", "remove them")
        checker.report(
            "ignored",
            "warning" if "nvme_path" in idle else "info",
            (*path, idle[0]),
            f"{', '.join(idle)} {acts} with device nvme only; the device is cpu",
            remove,
            fix=remove,
            edits=tuple(Edit("delete", (*path, key)) for key in idle),
        )
    if device == "nvme" and name == "offload_optimizer" and checker.stage in (1, 2):
        checker.report(
            "ignored-at-stage",
            "warning",
            (*path, "device"),
            f"nvme needs stage 3; at stage {checker.stage} the states stay in CPU memory",
            "set device to cpu, or the stage to 3",
        )
    ratio = checker.get(*path, "ratio")
    if isinstance(ratio, (int, float)) and ratio < 1 and checker.stage in (0, 1, 2):
        checker.report(
            "stage",
            "error",
            (*path, "ratio"),
            f"{ratio} needs stage 3: DeepSpeed refuses it below",
            "use 1.0",
        )


def _off(value: Any) -> bool:
    return value is False or value is None


def _check_ratio(checker: Checker) -> None:
    """stage3.py: "Hybrid Optimizer Only Supports DeepSpeedCPUAdam"."""
    path = (PARENT, "offload_optimizer", "ratio")
    ratio, kind = checker.number(*path), str(checker.get("optimizer", "type") or "").lower()
    if checker.stage != 3 or checker.offload("offload_optimizer") == "none" or ratio in (None, 1) or not kind:
        return
    if kind not in ("adam", "adamw") or checker.get("optimizer", "params", "torch_adam") is True:
        checker.report(
            "needs",
            "error",
            path,
            "a part on the GPU goes with DeepSpeed's own CPU Adam alone: DeepSpeed stops at start",
            "leave it out, or use AdamW without torch_adam",
            fix="remove it",
            edits=(Edit("delete", path),),
        )


def _check_requirements(checker: Checker) -> None:
    offload = checker.offload("offload_optimizer")
    forced = checker.value("zero_force_ds_cpu_optimizer") is not False
    if offload != "none" and checker.stage and forced and not checker.has("optimizer"):
        name = "offload_optimizer" if checker.has(PARENT, "offload_optimizer") else "cpu_offload"
        checker.report(
            "offload-optimizer",
            "warning",
            (PARENT, name),
            "no optimizer section: DeepSpeed stops unless the script's optimizer is DeepSpeed's CPU Adam",
            "add an optimizer section (AdamW), or zero_force_ds_cpu_optimizer: false",
        )
    if checker.on(PARENT, "legacy_stage1"):
        checker.report(
            "removed-key", "error", (PARENT, "legacy_stage1"), "the old stage 1 is gone", "remove it"
        )
    if checker.get("gradient_allreduce_op") == "sum" and checker.stage == 3:
        checker.report("stage", "error", ("gradient_allreduce_op",), "sum is refused at stage 3", "use mean")
    overlap = checker.get(PARENT, "overlap_comm")
    if checker.get("managed_gradient_accumulation") is False and overlap is True and checker.stage != 2:
        checker.report(
            "contradiction",
            "error",
            ("managed_gradient_accumulation",),
            "false goes with overlap_comm at stage 2 only",
            "set zero_optimization.overlap_comm to false",
        )


def _check_saving(checker: Checker) -> None:
    if checker.stage != 3:
        return
    old = "stage3_gather_fp16_weights_on_model_save"
    if checker.value(PARENT, _GATHER) is not True and not checker.on(PARENT, old):
        written = checker.has(PARENT, _GATHER)
        if written and checker.get(PARENT, _GATHER) is None:
            return  # auto, or wrong: said already
        checker.report(
            "saves-nothing",
            "warning",
            (PARENT, _GATHER) if written else (PARENT, "stage"),
            f"stage 3 without {_GATHER}: {_UNSAVED[checker.target.reader]}",
            f"set {_GATHER} to true",
            fix=f"write {_GATHER}: true",
            edits=(Edit("set", (PARENT, _GATHER), True),),
        )


def _check_reduction(checker: Checker) -> None:
    """Stages 2 and 3 assert on these two while they reduce by scattering, which is the default."""
    scattering = checker.stage in (2, 3) and checker.value(PARENT, "reduce_scatter") is not False
    factor = checker.number("gradient_predivide_factor")
    if checker.on("prescale_gradients") and scattering:
        checker.report(
            "prescale",
            "error",
            ("prescale_gradients",),
            f"is refused at stage {checker.stage} while zero_optimization.reduce_scatter is on",
            "remove it",
            fix="remove it",
            edits=(Edit("delete", ("prescale_gradients",)),),
        )
    elif checker.on("prescale_gradients") and checker.stage:
        checker.report("risky", "warning", ("prescale_gradients",), "is little used with ZeRO", "remove it")
    if factor not in (None, 1) and scattering:
        checker.report(
            "prescale",
            "error",
            ("gradient_predivide_factor",),
            f"{factor} is refused at stage {checker.stage} while zero_optimization.reduce_scatter is on",
            "remove it",
        )


def _check_overlap(checker: Checker) -> None:
    """Races between streams that give nan or constant gradient norms, mended in 0.17."""
    version = parse_version(checker.target.version)
    racing = parse_version("0.12.4") <= version < parse_version("0.17")
    if racing and checker.stage in (1, 2) and checker.on(PARENT, "overlap_comm"):
        checker.report(
            "overlap-race",
            "warning",
            (PARENT, "overlap_comm"),
            f"DeepSpeed {checker.target.version} is known for nan gradient norms with it at stages 1 and 2",
            "set it to false, or use a newer DeepSpeed",
            fix="write false",
            edits=(Edit("set", (PARENT, "overlap_comm"), False),),
        )


def _check_names(checker: Checker) -> None:
    """A key under two names, and a size that stages 1 and 2 take in even numbers only."""
    block = checker.block(PARENT)
    for name, key in section_keys(PARENT).items():
        if name == key.also and {key.name, key.also} <= set(block):
            checker.report_to_remove(
                "old-and-new",
                "error",
                (PARENT, key.also),
                f"is another name of {key.name}, which is there too: DeepSpeed refuses both together",
                "keep one of the two",
            )
    size = checker.number(PARENT, "allgather_bucket_size")
    if size and size % 2 and checker.stage in (1, 2) and not checker.has_own_accumulator:
        checker.report(
            "range",
            "error",
            (PARENT, "allgather_bucket_size"),
            f"{size} is odd, and DeepSpeed takes even numbers alone at stages 1 and 2",
            f"write {size + 1}",
            fix=f"write {size + 1}",
            edits=(Edit("set", (PARENT, "allgather_bucket_size"), size + 1),),
        )
