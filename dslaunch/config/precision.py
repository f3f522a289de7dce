"""Which precision a run computes in, chosen for the weakest device of all its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dslaunch.config.host_devices import DeviceGroup
from dslaunch.core.devices import CPU_NAME, Device
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import Precision, QuantizationPlan


@dataclass(frozen=True)
class ChosenPrecision:
    """The precision, why, and what to warn of."""

    value: Precision
    reason: str
    notes: tuple[str, ...] = ()


def resolve_precision(
    asked: str, groups: Sequence[DeviceGroup] | None, *, allow_emulated_fp16: bool = False
) -> ChosenPrecision:
    """``asked``: auto, bf16, fp16 or fp32. ``groups``: every kind of device in the run; None: unknown.

    Raises ConfigError for ``auto`` without devices, and for fp16 on a CPU that
    has no instructions for it, unless it may be emulated.
    """
    if asked == "auto":
        if groups is None:
            raise ConfigError(
                "precision auto: which devices the run is for is not known here",
                hint="name them with --gpu (cluster.gpu), such as --gpu a100, or set precision",
            )
        return _choose(groups)
    emulated = asked == "fp16" and any(_has_no_fp16(group.device) for group in groups or ())
    if emulated and not allow_emulated_fp16:
        bf16 = all(group.device.bf16 == "yes" for group in groups or ())
        raise ConfigError(
            "precision fp16: this CPU has neither AVX512-FP16 nor AMX-FP16, so DeepSpeed refuses it",
            hint=f"use precision {'bf16' if bf16 else 'fp32'}, or auto; for tests and debugging a run file"
            " may set allow_emulated_fp16: true",
        )
    notes = tuple(note for group in groups or () for note in _check(asked, group))
    value: Precision = "bf16" if asked == "bf16" else "fp16" if asked == "fp16" else "fp32"
    reason = "emulated on the CPU (allow_emulated_fp16): right, but slow" if emulated else "as asked for"
    return ChosenPrecision(value, reason, tuple(dict.fromkeys(notes)))


def communication_data_type(precision: Precision, devices: Sequence[Device] | None) -> str | None:
    """What gradients are summed over the ranks in, where it is not the model's type.

    fp32 for bf16 on AMD devices, where bf16 gradients would be added up in bf16, rank after rank.
    """
    amd = any(device.arch.startswith("gfx") for device in devices or ())
    return "fp32" if precision == "bf16" and amd else None


def dtypes(
    precision: Precision,
    config: Mapping[str, Any],
    method: str,
    quantization: QuantizationPlan | None = None,
) -> dict[str, str]:
    """The type of everything that has one, all from one truth. ``config``: the DeepSpeed JSON.

    ``method``: full, lora or qlora. Unless ``quantization`` says otherwise, bitsandbytes' packed weights are
    kept in tensors of the compute type at stage 3, where ZeRO partitions them with the rest, else as bytes.
    """
    found: dict[str, str] = {"model": precision}
    if method != "full":
        found["adapter"] = precision
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    found |= _quantised(precision, method, quantization, precision if stage == 3 else "uint8")
    found["master_weights"] = "fp32"
    found["gradient_accumulation"] = (config.get("data_types") or {}).get("grad_accum_dtype", precision)
    found["communication"] = config.get("communication_data_type") or precision
    return found


def dtypes_without_deepspeed(
    precision: Precision, method: str, quantization: QuantizationPlan | None = None
) -> dict[str, str]:
    """The same with engine torch: trained weights, sums and what is sent are fp32."""
    found = {"model": "fp32"} if method == "full" else {"model": precision, "adapter": "fp32"}
    found |= _quantised(precision, method, quantization, "uint8")
    if precision != "fp32":
        found["autocast"] = precision
    return {**found, "master_weights": "fp32", "gradient_accumulation": "fp32", "communication": "fp32"}


def _quantised(
    precision: Precision, method: str, quantization: QuantizationPlan | None, usual: str
) -> dict[str, str]:
    """``usual``: what 4-bit weights are packed in where nothing is said."""
    if method != "qlora":
        return {}
    if quantization is not None and quantization.load_in_8bit:
        return {"quantised_weights": "int8"}
    storage = quantization.bnb_4bit_quant_storage if quantization else usual
    return {"bnb_4bit_compute_dtype": precision, "bnb_4bit_quant_storage": storage}


def _choose(groups: Sequence[DeviceGroup]) -> ChosenPrecision:
    devices = [group.device for group in groups]
    names = ", ".join(dict.fromkeys(map(str, groups)))
    if unknown := [group for group in groups if "unknown" in (group.device.bf16, group.device.fp16)]:
        raise ConfigError(
            f"precision auto: {unknown[0]} is not in the device table",
            hint="set precision, or name a device like it with --gpu (cluster.gpu), such as sm_80",
        )
    if all(device.name == CPU_NAME for device in devices):
        if all(device.bf16 == "yes" for device in devices):
            return ChosenPrecision("bf16", "the CPU computes in bf16 (AVX512-BF16 or AMX)")
        return ChosenPrecision(
            "fp32", "the CPU has neither AVX512-BF16 nor AMX-BF16: bf16 would be emulated and slow"
        )
    weak_bf16 = [group for group in groups if group.device.bf16 != "yes"]
    if not weak_bf16:
        return ChosenPrecision("bf16", f"every device computes in bf16: {names}")
    weak = str(weak_bf16[0])
    if all(device.fp16 == "yes" for device in devices):
        return ChosenPrecision("fp16", f"{weak} does not compute in bf16; every device does in fp16: {names}")
    weak = str(next(group for group in groups if group.device.fp16 != "yes"))
    return ChosenPrecision("fp32", f"{weak} computes well in neither bf16 nor fp16")


def _has_no_fp16(device: Device) -> bool:
    return device.name == CPU_NAME and device.fp16 != "yes"


def _check(asked: str, group: DeviceGroup) -> list[str]:
    device = group.device
    if asked == "fp16" and _has_no_fp16(device):
        return ["fp16 is emulated on this CPU: right, but slow; for tests and debugging only"]
    support = {"bf16": device.bf16, "fp16": device.fp16}.get(asked, "yes")
    if asked == "fp16" and support == "slow":
        return [
            f"fp16 on {group}: no tensor cores, and DeepSpeed refuses it unless DS_ALLOW_DEPRECATED_FP16=1"
        ]
    if support in ("slow", "no"):
        return [f"{asked} on {group} is emulated and slow; precision auto chooses otherwise"]
    return []
