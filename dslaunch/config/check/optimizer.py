"""The optimizer and scheduler sections: names, arguments, and what fits which stage."""

from __future__ import annotations

from dslaunch.config.check.arguments import check_arguments, check_combinations, is_number, nearest
from dslaunch.config.check.context import PARENT, Checker
from dslaunch.config.check.keys import known_at
from dslaunch.config.check.optimizer_variant import check_variant
from dslaunch.config.check.schedule import check_course
from dslaunch.config.check.torch_schedule import check_torch_schedule
from dslaunch.config.schema import VERSION
from dslaunch.config.schema.optimizers import (
    GONE_OPTIMIZERS,
    NEEDED,
    OPTIMIZERS,
    SCHEDULES,
    TORCH_SCHEDULES,
    Optimizer,
    find_optimizer,
)
from dslaunch.core.finding import Edit


def check_optimizer(checker: Checker) -> None:
    """Name and arguments of both sections, and how the two go together."""
    found = _check_type(checker)
    if found is not None:
        check_arguments(checker, "optimizer", found.name, found.params)
        check_combinations(checker)
        check_variant(checker, found.name)
        _check_fit(checker, found)
    _check_legacy_fusion(checker)
    _check_scheduler(checker)
    _check_rates(checker)


def _check_type(checker: Checker) -> Optimizer | None:
    if not checker.has("optimizer"):
        return None
    name = checker.get("optimizer", "type")
    path = ("optimizer", "type")
    if not isinstance(name, str):
        _check_untyped(checker, "optimizer", "AdamW")
        return None
    if path in checker.bad:
        return None
    if (found := find_optimizer(name)) is not None:
        return found
    if name.lower() in GONE_OPTIMIZERS:
        if known_at(checker.target.version, VERSION) is False:
            return None  # there, in that version
        message, hint = f"{name} is not in DeepSpeed 0.19.8 any more: it stops at start", "use AdamW"
    else:
        near = nearest(name.lower(), [key.lower() for key in OPTIMIZERS], n=1)
        known = {key.lower(): optimizer.name for key, optimizer in OPTIMIZERS.items()}
        message = f"{name} is no optimizer of DeepSpeed or torch.optim: it stops at start"
        hint = (
            f"did you mean {known[near[0]]}?"
            if near
            else "use AdamW, or pass your own to deepspeed.initialize"
        )
    checker.report("optimizer-type", "error", path, message, hint)
    return None


def _check_untyped(checker: Checker, section: str, usual: str) -> None:
    """A section that says something, but not of what."""
    block = checker.block(section)
    if block and block.get("type") is None and set(block) != {"type"}:
        message = "has no type, so DeepSpeed ignores the section"
        checker.report("needs", "error", (section,), message, f'add "type": "{usual}"')


def _check_fit(checker: Checker, found: Optimizer) -> None:
    path = ("optimizer", "type")
    offload = checker.offload("offload_optimizer") != "none"
    allow = ("zero_allow_untested_optimizer",)
    said = checker.on(*allow) or allow in checker.bad
    if checker.stage and not found.tested and not said:
        safe = "is safe for it: it works element by element" if found.elementwise else "lets it run"
        checker.report(
            "untested-optimizer",
            "error",
            path,
            f"ZeRO stops at start with {found.name}, which DeepSpeed has not tested with it",
            f"set zero_allow_untested_optimizer to true, which {safe}",
            fix="write zero_allow_untested_optimizer: true" if found.elementwise else None,
            edits=(Edit("set", allow, True),) if found.elementwise else (),
        )
    if checker.stage and not found.elementwise and found.name != "Muon":
        checker.report(
            "optimizer-changes-meaning",
            "warning",
            path,
            f"{found.name} looks at whole tensors, but ZeRO gives it flat shards: the update is another one",
            "use AdamW, or stage 0",
        )
    if found.name == "Muon":
        _check_muon(checker)
    if found.name == "Lamb" and checker.precision == "fp16" and checker.number("fp16", "loss_scale"):
        checker.report("needs", "error", path, "Lamb needs a dynamic loss scale", "set fp16.loss_scale to 0")
    if offload and checker.on("optimizer", "params", "torch_adam") and not checker.on_cpu:
        checker.report(
            "slow",
            "warning",
            ("optimizer", "params", "torch_adam"),
            "with offload_optimizer torch's Adam runs on the CPU, several times slower than DeepSpeed's",
            "remove it",
            fix="remove it",
            edits=(Edit("delete", ("optimizer", "params", "torch_adam")),),
        )
    elif offload and found.from_torch and checker.stage:
        message = f"{found.name} from torch runs on the CPU with offload_optimizer"
        checker.report("slow", "info", path, message)


def _check_legacy_fusion(checker: Checker) -> None:
    path = ("optimizer", "legacy_fusion")
    if not checker.on(*path):
        return
    kind = str(checker.get("optimizer", "type")).lower()
    fused = kind in ("adam", "adamw") and not checker.on("optimizer", "params", "torch_adam")
    if checker.stage or checker.precision == "fp32" or not fused:
        message = "acts in fp16 and bf16 at stage 0 with the fused Adam only"
        checker.report_to_remove("ignored-at-stage", "warning", path, message, "remove it")
    elif checker.stage == 0 and checker.precision is not None:
        message = "calls the fused Adam as it was once: DeepSpeed 0.19.8 stops in the first step"
        checker.report_to_remove("removed-key", "error", path, message, "remove it")


def _check_muon(checker: Checker) -> None:
    path = ("optimizer", "type")
    if checker.stage == 3 and checker.value(PARENT, "reduce_scatter") is not False:
        checker.report(
            "muon-stage-3",
            "error",
            path,
            "Muon at stage 3 stops at start while zero_optimization.reduce_scatter is on",
            "set zero_optimization.reduce_scatter to false",
            fix="write zero_optimization.reduce_scatter: false",
            edits=(Edit("set", (PARENT, "reduce_scatter"), False),),
        )
    if checker.stage and checker.precision in ("fp16", "bf16"):
        scaled = " and with the loss scale on them" if checker.precision == "fp16" else ""
        checker.report(
            "muon-momentum",
            "warning",
            path,
            f"at stage {checker.stage} DeepSpeed 0.19.8 keeps Muon's momentum in {checker.precision},"
            f" of gradients before clipping{scaled}",
            "use fp32, or AdamW, or dslaunch's `initialize`, which runs a Muon of its own",
        )
    if checker.stage and (checker.number("gradient_clipping") or 0) > 0:
        checker.report(
            "muon-clipping",
            "warning",
            path,
            f"at stage {checker.stage} DeepSpeed 0.19.8 clips Muon's update, not the gradient, and reports"
            " the norm of that",
            "set gradient_clipping to 0, or use dslaunch's `initialize`, which runs a Muon of its own",
        )
    elif checker.stage:
        message = (
            f"at stage {checker.stage} get_global_grad_norm() is that of Muon's update, not the gradient's"
        )
        checker.report("muon-norm", "info", path, message)


def _check_scheduler(checker: Checker) -> None:
    name = checker.get("scheduler", "type")
    path = ("scheduler", "type")
    if not isinstance(name, str):
        _check_untyped(checker, "scheduler", "WarmupLR")
        return
    if path in checker.bad:
        return
    if name not in SCHEDULES and name not in TORCH_SCHEDULES:
        _report_no_schedule(checker, name)
        return
    check_arguments(checker, "scheduler", name, {**SCHEDULES, **TORCH_SCHEDULES}[name])
    params = checker.block("scheduler", "params")
    if not checker.has("scheduler", "params"):
        checker.report(
            "needs", "error", ("scheduler",), "has no params: DeepSpeed stops at start", 'add "params": {}'
        )
    for key in NEEDED.get(name, ()):
        if key not in params and checker.has("scheduler", "params"):
            checker.report("needs", "error", ("scheduler", "params"), f"{name} needs {key}", f"add {key}")
    if name in TORCH_SCHEDULES:
        check_torch_schedule(checker, name)
        return
    total, warm = params.get("total_num_steps"), params.get("warmup_num_steps")
    if isinstance(total, (int, float)) and isinstance(warm, (int, float)) and 0 < total < warm:
        checker.report(
            "contradiction",
            "warning",
            ("scheduler", "params", "total_num_steps"),
            f"{total} steps in all, but {warm} of warm-up: the full rate is never reached",
            "make warmup_num_steps smaller",
        )
    check_course(checker, name)


def _report_no_schedule(checker: Checker, name: str) -> None:
    lowered = {known.lower(): known for known in (*TORCH_SCHEDULES, *SCHEDULES)}
    near = [lowered[word] for word in nearest(name.lower(), lowered, n=1)]
    near = near or nearest(name, SCHEDULES, n=1)
    checker.report(
        "scheduler-type",
        "error",
        ("scheduler", "type"),
        f"{name} is no schedule of DeepSpeed or torch: it stops at start",
        f"did you mean {near[0]}?" if near else f"choose one of {', '.join(SCHEDULES)}",
        fix=f"write {near[0]}" if near else None,
        edits=tuple(Edit("set", ("scheduler", "type"), guess) for guess in near),
    )


def _check_rates(checker: Checker) -> None:
    rate = checker.get("optimizer", "params", "lr")
    top = checker.get("scheduler", "params", "warmup_max_lr")
    if is_number(rate) and is_number(top) and rate != top:
        checker.report(
            "contradiction",
            "warning",
            ("scheduler", "params", "warmup_max_lr"),
            f"{top} differs from optimizer.params.lr {rate}; the schedule's wins",
            "write one value in both",
        )
