"""What ``initialize`` makes of a config before DeepSpeed sees it."""

from __future__ import annotations

from typing import Any

import torch

from dslaunch.core.errors import ConfigError
from dslaunch.train.engine import cures, ds_config
from dslaunch.train.engine.muon import take_muon
from dslaunch.train.engine.version import check_deepspeed_version


def check_version(allowed: str | None) -> list[str]:
    import deepspeed

    note = check_deepspeed_version(deepspeed.__version__, allowed)
    return [note] if note else []


def prepare(
    settings: dict[str, Any], model: torch.nn.Module, optimizer: Any, allow_emulated_fp16: bool
) -> tuple[dict[str, Any], Any, list[str]]:
    """Refuse what cannot run right; returns config and optimizer to run, and notes on what was changed."""
    if ds_config.is_enabled(settings, "fp16") and ds_config.is_enabled(settings, "bf16"):
        raise ConfigError("fp16.enabled and bf16.enabled are both true", hint="turn one of them off")
    ds_config.zero_stage_of(settings)  # raises for a stage that is none
    ds_config.refuse_fp16_autocast_under_zero(settings)
    ds_config.refuse_unmeasured_gradients(settings)
    ds_config.refuse_client_muon(settings, _optimizer_name(optimizer))
    muon = None
    if optimizer is None:
        settings, optimizer, muon = take_muon(settings, model)
    own = _optimizer_name(optimizer)
    name = own or ds_config.optimizer_type(settings)
    settings, clipping = ds_config.write_clipping(settings, name)
    settings, stage = ds_config.run_16bit_stage_0_as_stage_1(settings, name)
    known = None if _is_made_elsewhere(optimizer) else name
    settings, untested = ds_config.vouch_for_elementwise(settings, known, is_client=own is not None)
    settings, offload = ds_config.let_own_optimizer_be_offloaded(settings, own) if own else (settings, None)
    fp16 = permit_fp16(ds_config.precision_of(settings), allow_emulated_fp16)
    notes = (muon, clipping, stage, untested, offload, fp16)
    return settings, optimizer, [note for note in notes if note]


def permit_fp16(precision: str, allow_emulated_fp16: bool) -> str | None:
    """What is to be said of fp16 on this device. Raises ConfigError where it would have to be emulated."""
    if precision != "fp16":
        return None
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_fp16_supported():
        return None
    if not allow_emulated_fp16:
        raise ConfigError(
            f"fp16 on this {get_accelerator().device_name()}: it has no fp16 instructions",
            hint="use bf16 or fp32; allow_emulated_fp16, a run file's key and an argument of `initialize`, "
            "emulates it for tests and debugging",
        )
    cures.permit_emulated_fp16()
    return "fp16 is emulated on this CPU: right, but slow; for tests and debugging only"


def _is_made_elsewhere(optimizer: Any) -> bool:
    """Whether ``optimizer`` is a function: its name says nothing of the class that it will make."""
    made_by = getattr(optimizer, "func", optimizer)
    return callable(made_by) and not isinstance(made_by, (type, torch.optim.Optimizer))


def _optimizer_name(optimizer: Any) -> str | None:
    """The name of a client optimizer: of its class, or of the callable that will make it."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__ if optimizer is not None else None
    return str(getattr(getattr(optimizer, "func", optimizer), "__name__", type(optimizer).__name__))
