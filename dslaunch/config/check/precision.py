"""fp16, bf16, the loss scale, and what the devices can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dslaunch.config.check.context import PARENT, Checker
from dslaunch.config.check.cpu_kernels import check_cpu_kernels
from dslaunch.config.check.master_weights import check_master_weights
from dslaunch.core.finding import Edit

if TYPE_CHECKING:
    from dslaunch.core.devices import Device

_CPU = "cpu"

_SCALE_KEYS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_OVERFLOWS_WORTH_A_WORD = 20  # 2^20: four powers above DeepSpeed's own start


def check_precision(checker: Checker) -> None:
    """Contradictions of the precision blocks, risky scales, data types, devices."""
    _check_both(checker)
    if checker.precision == "fp16" and checker.stage == 0:
        _check_stage_0(checker)
    if checker.precision == "fp16" or checker.block("fp16").get("enabled") == "auto":
        _check_scale(checker)
    elif checker.precision is not None:
        _check_idle_fp16(checker)
    if checker.precision == "fp32" and not checker.on_cpu and not checker.on("torch_autocast", "enabled"):
        hint = "turn bf16 on where the GPUs have it (A100 and newer), else fp16"
        checker.report("fp32", "info", (), "neither bf16 nor fp16 is on: everything is fp32", hint)
    _check_bf16(checker)
    check_master_weights(checker)
    _check_autocast(checker)
    _check_data_types(checker)
    for device in checker.target.devices or ():
        _check_device(checker, device)
    check_cpu_kernels(checker)


def _check_both(checker: Checker) -> None:
    section = checker.bf16_section
    if checker.on("fp16", "enabled") and checker.on(section, "enabled"):
        checker.report(
            "fp16-and-bf16",
            "error",
            (section, "enabled"),
            "fp16 and bf16 are both on; DeepSpeed refuses that",
            "turn one off: bf16 where the GPUs have it (A100 and newer), else fp16",
        )
    if "bf16" in checker.config and "bfloat16" in checker.config:
        checker.report(
            "ignored",
            "warning",
            ("bfloat16",),
            "is not read where bf16 is there",
            "remove it",
            fix="remove it",
            edits=(Edit("delete", ("bfloat16",)),),
        )


def _check_stage_0(checker: Checker) -> None:
    checker.report(
        "fp16-stage-0",
        "warning",
        ("fp16", "enabled"),
        "fp16 at ZeRO stage 0: DeepSpeed 0.19.8 divides gradients by a scale it never multiplied by,"
        " and takes an optimizer step at start",
        "use zero_optimization.stage 1: the same mathematics, done right",
        fix="write zero_optimization.stage 1",
        edits=(Edit("set", ("zero_optimization", "stage"), 1),),
    )


def _check_scale(checker: Checker) -> None:
    """The loss scale of a run that is, or with ``auto`` may be, in fp16."""
    scale = checker.number("fp16", "loss_scale")
    if scale:
        _check_static(checker, scale)
        return
    power = checker.number("fp16", "initial_scale_power")
    if power is not None and power >= _OVERFLOWS_WORTH_A_WORD:
        checker.report(
            "initial-scale",
            "info",
            ("fp16", "initial_scale_power"),
            f"the scale starts at 2^{power} and comes down by one skipped step for each power:"
            f" about {power - 16} more of them than from 2^16",
            "use 16",
        )
    floor = checker.number("fp16", "min_loss_scale")
    start = 2**power if isinstance(power, int) and power < 64 else None
    if floor is not None and floor >= 128:
        checker.report(
            "min-loss-scale",
            "info",
            ("fp16", "min_loss_scale"),
            f"an overflow at scale {floor} stops the run; large models often need less",
            "use 1",
        )
    if floor is not None and start is not None and floor > start:
        checker.report(
            "min-loss-scale",
            "warning",
            ("fp16", "min_loss_scale"),
            f"{floor} is above the scale at the start, {start}",
            "use 1",
        )


def _check_static(checker: Checker, scale: float) -> None:
    if scale <= 1:
        checker.report(
            "no-loss-scaling",
            "warning",
            ("fp16", "loss_scale"),
            f"{scale:g} is a static scale: gradients below 6e-8 become 0 and nothing adapts",
            "write 0, which means dynamic",
            fix="write 0",
            edits=(Edit("set", ("fp16", "loss_scale"), 0),),
        )
    idle = [key for key in _SCALE_KEYS[1:] if checker.has("fp16", key)]
    if idle:
        acts = "acts" if len(idle) == 1 else "act"
        checker.report(
            "ignored",
            "info",
            ("fp16", idle[0]),
            f"{', '.join(idle)} {acts} only on a dynamic scale; loss_scale is {scale:g}, which is static",
        )


def _check_idle_fp16(checker: Checker) -> None:
    keys = [key for key in (*_SCALE_KEYS, "auto_cast", "consecutive_hysteresis") if checker.has("fp16", key)]
    if keys:
        one, remove = len(keys) == 1, "remove it" if len(keys) == 1 else "remove them"
        state = "off" if checker.has("fp16", "enabled") else "off, as enabled is missing"
        checker.report(
            "fp16-off",
            "warning",
            ("fp16", keys[0]),
            f"fp16 is {state}, so {', '.join(keys)} {'does' if one else 'do'} nothing",
            f"{remove}, or turn fp16 on",
            fix=remove,
            edits=tuple(Edit("delete", ("fp16", key)) for key in keys),
        )


def _check_bf16(checker: Checker) -> None:
    section, stage = checker.bf16_section, checker.stage
    if checker.precision == "bf16" and stage == 0:
        checker.report(
            "bf16-stage-0",
            "info",
            (section, "enabled"),
            "bf16 at ZeRO stage 0: DeepSpeed 0.19.8 takes an optimizer step on zero gradients at start",
            "use zero_optimization.stage 1: the same mathematics, without it",
        )
    if checker.get(section, "check_grad_overflow") is False and checker.precision == "bf16":
        checker.report(
            "risky",
            "warning",
            (section, "check_grad_overflow"),
            "one nan in a gradient becomes nan in every weight",
            "leave it out",
        )


def _check_autocast(checker: Checker) -> None:
    if not checker.on("torch_autocast", "enabled"):
        return
    dtype = str(checker.get("torch_autocast", "dtype") or "")
    if dtype in ("float16", "torch.float16", "fp16", "half") and checker.stage:
        checker.report(
            "autocast-float16",
            "warning",
            ("torch_autocast", "dtype"),
            "float16 with ZeRO: after the first overflow DeepSpeed 0.19.8 skips every step for ever",
            'use "bfloat16", or the fp16 section',
        )
    if checker.precision in ("bf16", "fp16"):
        message = (
            f"{checker.precision} is on as well: it casts every weight, and autocast is for fp32 weights"
        )
        checker.report(
            "contradiction", "warning", ("torch_autocast", "enabled"), message, "keep one of the two"
        )
    path = ("torch_autocast", "lower_precision_safe_modules")
    names = checker.get(*path)
    alone = [name for name in names if "." not in name] if isinstance(names, list) else []
    if alone:
        message = f'"{alone[0]}" is no class with its module, so that DeepSpeed stops at start'
        checker.report("range", "error", path, message, f"write its whole name, as torch.nn.{alone[0]}")


def _check_data_types(checker: Checker) -> None:
    sent, wanted = checker.get("communication_data_type"), checker.on(PARENT, "zero_quantized_gradients")
    if sent == "fp16" and checker.precision in ("bf16", "fp32") and not wanted:  # else its kernel takes fp16
        message = f"fp16 overflows where {checker.precision} does not"
        checker.report("risky", "warning", ("communication_data_type",), message, "use fp32, or leave it out")
    asked = checker.get("data_types", "param_dtype")
    if asked is not None and checker.precision not in (None, _short(asked)):
        message = f"{asked}, but the sections fp16 and bf16 say {checker.precision}: DeepSpeed stops at start"
        checker.report_to_remove(
            "contradiction", "error", ("data_types", "param_dtype"), message, "leave it out"
        )
    written = checker.get("data_types", "grad_accum_dtype")
    path = ("data_types", "grad_accum_dtype")
    if written is not None:
        accumulate = _short(written)
        if checker.stage == 0 and checker.precision not in (None, accumulate):
            checker.report(
                "grad-accum-dtype",
                "error",
                path,
                f"{written} with {checker.precision} parameters at stage 0: DeepSpeed has nothing for it",
                "use zero_optimization.stage 1 or higher, or leave it out",
            )
        elif accumulate == "fp16" and checker.precision == "bf16":
            checker.report("risky", "warning", path, "fp16 overflows where bf16 does not", "use fp32")
    elif (
        checker.precision == "bf16"
        and checker.stage
        and (checker.number("gradient_accumulation_steps") or 1) > 1
    ):
        checker.report(
            "grad-accum-dtype",
            "info",
            (checker.bf16_section,),
            "gradients are added up in bf16, which loses small ones over many micro-batches",
            'add "data_types": {"grad_accum_dtype": "fp32"}',
        )


def _short(dtype: str) -> str:
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "half": "fp16", "float": "fp32"}
    plain = str(dtype).removeprefix("torch.")
    return names.get(plain, plain)


def _check_device(checker: Checker, device: Device) -> None:
    if checker.precision == "fp16" and device.fp16 in ("no", "slow"):
        cpu = device.name == _CPU
        why = "the CPU lacks fp16 instructions" if cpu else f"{device} has no fp16 tensor cores"
        checker.report(
            "device",
            "error",
            ("fp16", "enabled"),
            f"{why}, and DeepSpeed refuses fp16 there"
            + ("" if cpu else " unless DS_ALLOW_DEPRECATED_FP16=1"),
            "use bf16 or fp32" if cpu else "use fp32",
        )
    if checker.precision == "bf16" and device.bf16 in ("no", "slow") and device.name != _CPU:
        checker.report(
            "device",
            "warning",
            (checker.bf16_section, "enabled"),
            f"{device} has no bf16: torch emulates it slowly, or DeepSpeed refuses",
            "use fp16 with a dynamic loss scale" if device.fp16 == "yes" else "use fp32",
        )
    if (
        checker.precision == "bf16"
        and device.arch.startswith("gfx")
        and not checker.has("communication_data_type")
    ):
        checker.report(
            "communication-type",
            "info",
            (checker.bf16_section, "enabled"),
            f"{device}: gradients are added up over the ranks in bf16, one rank after another",
            'add "communication_data_type": "fp32"',
        )
