"""The DeepSpeed config that a run is given, and the one that is right to run.

Pure: dict in, dict and notes out. Refuses what DeepSpeed accepts and then does wrong.
Names F1, F3, ... are explained in docs/upstream.md.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dslaunch.core.errors import ConfigError

# ZeRO flattens the parameters of a rank into one vector. These treat each element by
# itself, so flattening changes nothing; names as torch, DeepSpeed and apex spell them.
ELEMENTWISE_OPTIMIZERS = frozenset({
    "adadelta", "adagrad", "adam", "adamax", "adamw", "ademamix", "asgd", "cpuadam", "deepspeedcpuadagrad",
    "deepspeedcpuadam", "deepspeedcpulion", "fusedadam", "fusedlion", "lion", "nadam", "radam",
    "rmsprop", "rprop", "sgd", "zenflowcpuadam",
})  # fmt: skip

# Of these, those that ZeRO takes without a word (zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS), as a class's name
# or as ``optimizer.type``. DeepSpeed's own Lion is among them, a Lion of someone else's is not.
_TESTED_WITH_ZERO = frozenset({
    "adagrad", "adam", "adamw", "deepspeedcpuadagrad", "deepspeedcpuadam", "deepspeedcpulion", "fusedadam",
    "fusedlion", "zenflowcpuadam",
})  # fmt: skip
_OF_DEEPSPEED_ON_CPU = ("DeepSpeedCPUAdam", "DeepSpeedCPULion")  # what zero_force_ds_cpu_optimizer lets pass
_VOUCH = "zero_allow_untested_optimizer"


def load_ds_config(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The config as a dict of its own: a deep copy of a mapping, or a JSON file.

    Files are read as DeepSpeed reads them (hjson: comments are allowed, a key given
    twice is not). Raises ConfigError where there is no such file or it is no JSON object.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    path = Path(config)
    import hjson  # type: ignore[import-untyped]  # it comes with deepspeed
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the DeepSpeed config {path}: {error.strerror}",
            hint=f"the path is taken from the current directory, {Path.cwd()}",
        ) from None
    try:
        value = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except ValueError as error:
        raise ConfigError(f"{path} is not a DeepSpeed config: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def is_enabled(config: Mapping[str, Any], block: str) -> bool:
    """Whether a precision block ("fp16", "bf16", "torch_autocast") is on.

    Raises ConfigError where ``enabled`` is no boolean: DeepSpeed takes the text "yes" for
    true and "auto" for false without a word.
    """
    value = config.get(block)
    enabled = value.get("enabled", False) if isinstance(value, Mapping) else False
    if not isinstance(enabled, bool):
        raise ConfigError(f"{block}.enabled is {enabled!r}; it must be true or false, without quotes")
    return enabled


def precision_of(config: Mapping[str, Any]) -> str:
    """``fp16``, ``bf16`` or ``fp32``: the dtype of the weights that forward sees."""
    if is_enabled(config, "fp16"):
        return "fp16"
    return "bf16" if is_enabled(config, "bf16") or is_enabled(config, "bfloat16") else "fp32"


def zero_stage_of(config: Mapping[str, Any]) -> int:
    """``zero_optimization.stage``; 0 where the block is left out."""
    block = config.get("zero_optimization")
    stage = block.get("stage", 0) if isinstance(block, Mapping) else 0
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(f"zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3")
    return int(stage)


def refuse_fp16_autocast_under_zero(config: Mapping[str, Any]) -> None:
    """F5: float16 autocast at stages 1-3 never lowers its scale, so one overflow stops it for ever."""
    block = config.get("torch_autocast")
    if not is_enabled(config, "torch_autocast") or not isinstance(block, Mapping):
        return
    dtype = str(block.get("dtype", "")).removeprefix("torch.")
    stage = zero_stage_of(config)
    if dtype in ("float16", "half", "fp16") and stage >= 1:
        raise ConfigError(
            f"torch_autocast.dtype {dtype} with zero_optimization.stage {stage}: "
            "DeepSpeed skips every step after the first overflow",
            hint="use dtype bfloat16, or the fp16 block, or stage 0",
        )


def refuse_unmeasured_gradients(config: Mapping[str, Any]) -> None:
    """Refuse keys that leave no norm to report, or no check by which inf and nan are found."""
    precision = config.get("bf16")
    if isinstance(precision, Mapping) and precision.get("check_grad_overflow") is False:
        raise ConfigError(
            "bf16.check_grad_overflow is false: at stages 1 and 2 inf and nan would go into the weights",
            hint="leave check_grad_overflow out",
        )
    block = config.get("zero_optimization")
    if isinstance(block, Mapping) and block.get("compute_grad_norm") is False:
        raise ConfigError(
            "zero_optimization.compute_grad_norm is false: each step's norm is reported, and non-finite "
            "gradients are found by it",
            hint="leave compute_grad_norm out",
        )


def run_16bit_stage_0_as_stage_1(
    config: dict[str, Any], optimizer_name: str | None
) -> tuple[dict[str, Any], str | None]:
    """F1, F3, F4: fp16 and bf16 at stage 0 run as stage 1, which is the same mathematics.

    DeepSpeed's own stage 0 does not scale fp16 losses, takes an optimizer step on zero
    gradients before training, and ignores hysteresis. ``optimizer_name``: class of a
    client optimizer; None when the config names it. Returns the config to run and a
    note for the user (None: nothing changed, also where there is no optimizer at all).
    Raises ConfigError for an optimizer that looks at whole tensors, which stage 1 would
    flatten.
    """
    precision = precision_of(config)
    name = optimizer_name or optimizer_type(config)
    if precision == "fp32" or zero_stage_of(config) != 0 or name is None:
        return config, None
    vouched = config.get(_VOUCH) is True
    if name.lower() not in ELEMENTWISE_OPTIMIZERS and not vouched:
        raise ConfigError(
            f"{name} with {precision} at zero_optimization.stage 0: DeepSpeed's {precision} stage 0 is wrong "
            f"and runs as stage 1 here, which flattens the parameters that {name} may need whole",
            hint="use fp32 at stage 0 or an elementwise optimizer (AdamW, SGD, Lion, ...), or set "
            f"{_VOUCH}: true if yours treats each element by itself",
        )
    changed = copy.deepcopy(config)
    changed["zero_optimization"] = {**(config.get("zero_optimization") or {}), "stage": 1}
    changed[_VOUCH] = True
    if precision == "bf16" and config.get("gradient_accumulation_steps") != 1:
        # Sums of bf16 gradients in bf16 lose the small ones; stage 1 can add them up in fp32.
        changed["data_types"] = {"grad_accum_dtype": "fp32", **(config.get("data_types") or {})}
    note = (
        f"{precision} at ZeRO stage 0 runs as stage 1: the same mathematics, without the faults "
        "of DeepSpeed's 16-bit stage 0 (docs/upstream.md, F1 F3 F4)"
    )
    return changed, note


def vouch_for_elementwise(
    config: dict[str, Any], optimizer_name: str | None, *, is_client: bool
) -> tuple[dict[str, Any], str | None]:
    """ZeRO asks for a flag with optimizers not tested with it; an elementwise one gets it, and a note.

    ``optimizer_name``: its class or ``optimizer.type``; None where it cannot be known or there is none.
    Raises ConfigError for one that may need whole tensors, which ZeRO flattens.
    """
    stage, name = zero_stage_of(config), (optimizer_name or "").lower()
    tested = name in _TESTED_WITH_ZERO or (name == "lion" and not is_client)
    if stage == 0 or not name.isidentifier() or tested or _VOUCH in config:
        return config, None
    if name not in ELEMENTWISE_OPTIMIZERS:
        raise ConfigError(
            f"{optimizer_name} at zero_optimization.stage {stage}: ZeRO gives it flat shards, and it may "
            "need whole tensors",
            hint="use an elementwise optimizer (AdamW, SGD, Lion, ...), or fp32 at stage 0, or set "
            f"{_VOUCH}: true if yours treats each element by itself",
        )
    note = (
        f"{_VOUCH} is set: {optimizer_name} treats each element by itself, so ZeRO's shards do not change it"
    )
    return {**config, _VOUCH: True}, note


def let_own_optimizer_be_offloaded(
    config: dict[str, Any], optimizer_name: str
) -> tuple[dict[str, Any], str | None]:
    """Offload to the CPU wants DeepSpeed's CPUAdam, or a flag that is given here to a client optimizer."""
    block = config.get("zero_optimization")
    offload = block.get("offload_optimizer") if isinstance(block, Mapping) else None
    device = offload.get("device") if isinstance(offload, Mapping) else None
    key = "zero_force_ds_cpu_optimizer"
    if device != "cpu" or key in config or optimizer_name in _OF_DEEPSPEED_ON_CPU:
        return config, None
    note = (
        f"offload_optimizer cpu with an optimizer of your own: {key} is set to false; {optimizer_name} takes "
        "its steps on the CPU as torch has them, slower than DeepSpeed's, which the config's optimizer gives"
    )
    return {**config, key: False}, note


def write_clipping(config: dict[str, Any], optimizer_name: str | None) -> tuple[dict[str, Any], str | None]:
    """F7: the config with ``gradient_clipping`` written out, and a note where that was left out.

    Left out it means 1.0 since DeepSpeed 0.19.3 and none before, so a config would train otherwise
    after an upgrade. Without an optimizer there is nothing to clip.
    """
    if "gradient_clipping" in config or optimizer_name is None:
        return config, None
    note = "gradient_clipping is left out: 1.0, as DeepSpeed has it since 0.19.3 (docs/upstream.md, F7)"
    return {**config, "gradient_clipping": 1.0}, note


def refuse_client_muon(config: Mapping[str, Any], optimizer_name: str | None) -> None:
    """F11: under ZeRO a Muon that is handed over, of the class ``optimizer_name``, gets flat shards."""
    stage = zero_stage_of(config)
    if stage and (optimizer_name or "").lower().startswith("muon"):
        raise ConfigError(
            f"{optimizer_name} as an optimizer of your own at zero_optimization.stage {stage}: it would get "
            "flat shards, not matrices",
            hint='name it in the config instead, "optimizer": {"type": "Muon", ...}: dslaunch then runs its '
            "own, which knows the shards",
        )


def optimizer_type(config: Mapping[str, Any]) -> str | None:
    """``optimizer.type`` of the config, or None."""
    block = config.get("optimizer")
    return str(block["type"]) if isinstance(block, Mapping) and block.get("type") else None


def quiet(config: dict[str, Any]) -> dict[str, Any]:
    """Keep DeepSpeed from printing a progress line of its own, unless the config asks for one."""
    return {"steps_per_print": 2**31 - 1, **config}
