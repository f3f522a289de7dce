"""The optimizer and scheduler sections: names, arguments, and what fits which stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dslaunch.config.check.context import FILLED, PARENT, Checker
from dslaunch.config.check.optimizer_variant import check_variant
from dslaunch.config.check.schedule import check_course
from dslaunch.config.check.values import to_number
from dslaunch.config.schema.optimizers import (
    GONE_OPTIMIZERS,
    NEEDED,
    OPTIMIZERS,
    SCHEDULES,
    Optimizer,
    find_optimizer,
)
from dslaunch.config.schema.other_names import OTHER_NAMES
from dslaunch.core.finding import Edit

_BOOLS = {
    "adam_w_mode", "torch_adam", "amsgrad", "bias_correction", "fp32_optimizer_states", "set_grad_none",
    "foreach",
    "maximize", "fused", "capturable", "differentiable", "nesterov", "centered", "cycle_momentum",
    "lr_range_test_staircase", "decoupled_weight_decay", "eps_inside_sqrt",
}  # fmt: skip
_COUNTS = {
    "warmup_num_steps", "total_num_steps", "cycle_first_step_size", "cycle_second_step_size",
    "lr_range_test_step_size",
}  # fmt: skip
_TEXTS = {"warmup_type", "ns_method"}
_PAIRS = {"betas", "etas", "step_sizes"}
_NEVER_NULL = {"betas", "eps", "weight_decay", "momentum", "dampening"}  # a schedule sets lr


def check_optimizer(checker: Checker) -> None:
    """Name and arguments of both sections, and how the two go together."""
    found = _check_type(checker)
    if found is not None:
        _check_params(checker, "optimizer", found.name, found.params)
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
        if checker.block("optimizer") and not checker.has(*path):
            checker.report(
                "needs",
                "error",
                ("optimizer",),
                "has no type, so DeepSpeed ignores the section",
                'add "type": "AdamW"',
            )
        return None
    if path in checker.bad:
        return None
    if (found := find_optimizer(name)) is not None:
        return found
    if name.lower() in GONE_OPTIMIZERS:
        message, hint = f"{name} is not in DeepSpeed 0.19.8 any more: it stops at start", "use AdamW"
    else:
        near = _nearest(name.lower(), [key.lower() for key in OPTIMIZERS], n=1)
        known = {key.lower(): optimizer.name for key, optimizer in OPTIMIZERS.items()}
        message = f"{name} is no optimizer of DeepSpeed or torch.optim: it stops at start"
        hint = (
            f"did you mean {known[near[0]]}?"
            if near
            else "use AdamW, or pass your own to deepspeed.initialize"
        )
    checker.report("optimizer-type", "error", path, message, hint)
    return None


def _check_params(checker: Checker, section: str, name: str, known: frozenset[str]) -> None:
    for key, value in checker.block(section, "params").items():
        path = (section, "params", key)
        if key == "max_grad_norm" and section == "optimizer":
            has_clipping = checker.has("gradient_clipping")
            checker.report(
                "misplaced-key",
                "error",
                path,
                "is refused here at start; clipping is gradient_clipping at the top level",
                "move it to gradient_clipping",
                fix="remove it" if has_clipping else "move to gradient_clipping",
                edits=(
                    Edit("delete", path) if has_clipping else Edit("rename", path, ("gradient_clipping",)),
                ),
            )
        elif key not in known:
            elsewhere = OTHER_NAMES.get(key, "").removeprefix(f"{section}.params.")
            near = [elsewhere] if elsewhere in known else _nearest(key, known, n=1, cutoff=0.7)
            fits = elsewhere not in _PAIRS  # one of two numbers
            renamed = near and fits and near[0] not in checker.block(section, "params")
            checker.report(
                "unknown-key",
                "error",
                path,
                f"is no argument of {name}, which stops at start",
                f"did you mean {near[0]}?" if near else f"arguments: {', '.join(sorted(known))}",
                fix=f"rename to {near[0]}" if renamed else None,
                edits=(Edit("rename", path, (section, "params", near[0])),) if renamed else (),
            )
        elif value is None and section == "optimizer" and key in _NEVER_NULL and name.lower() != "adafactor":
            wanted = "a list of two" if key in _PAIRS else "a number"
            message = f"is null, but {wanted} is expected"
            edits = (Edit("delete", path),)
            checker.report("type", "error", path, message, "leave it out", fix="remove it", edits=edits)
        else:
            _check_param(checker, section, key, value)


def _check_param(checker: Checker, section: str, key: str, value: Any) -> None:
    path = (section, "params", key)
    if path in checker.bad or value is None:
        return
    if value == "auto":
        if ".".join(path) not in FILLED[checker.target.reader]:
            _report_auto(checker, path)
        return
    wanted = (
        "true or false" if key in _BOOLS else "a text" if key in _TEXTS else "a list of two" if key in _PAIRS
        else "a whole number" if key in _COUNTS else "a number"
    )  # fmt: skip
    if not _fits(wanted, value, key):
        text = value if isinstance(value, str) and wanted in ("a number", "a whole number") else ""
        number = to_number(text)
        fix = None if number is None else f"write {number}"
        shown = f'"{value}"' if isinstance(value, str) else value
        edits = () if number is None else (Edit("set", path, number),)
        checker.report("type", "error", path, f"{shown}, but {wanted} is expected", fix, fix=fix, edits=edits)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_sign(checker, path, key, value)


def _report_auto(checker: Checker, path: tuple[str, str, str]) -> None:
    raw = checker.target.reader == "raw"
    who = "DeepSpeed, which hands the word to the constructor" if raw else f"{checker.target.reader} here"
    hint = "write the value itself" + (", or check with --for hf-trainer" if raw else "")
    checker.report("auto", "error", path, f'"auto" means nothing to {who}', hint)


def _fits(wanted: str, value: Any, key: str) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted == "true or false":
        return isinstance(value, bool)
    if wanted == "a text":
        return isinstance(value, str)
    if wanted == "a list of two":
        return isinstance(value, list) and len(value) == 2
    if wanted == "a whole number":
        return number and value == int(value) and not (isinstance(value, float) and key == "warmup_num_steps")
    if isinstance(value, list):  # one learning rate for each parameter group
        return key.endswith(("_lr", "_mom")) or key == "eps"
    return number


def _check_sign(checker: Checker, path: tuple[str, str, str], key: str, value: float) -> None:
    if key in ("warmup_num_steps", "total_num_steps") and value <= 0:
        checker.report(
            "range",
            "error",
            path,
            f"{value} is out of range: it must be greater than 0",
            "write the number of steps",
        )
    elif key in ("lr", "eps", "weight_decay", "warmup_max_lr", "warmup_min_lr", "momentum") and value < 0:
        checker.report("range", "error", path, f"{value} is out of range: it must be at least 0")


def _check_fit(checker: Checker, found: Optimizer) -> None:
    path = ("optimizer", "type")
    offload = checker.offload("offload_optimizer") != "none"
    allowed = checker.value("zero_allow_untested_optimizer") is True
    if checker.stage and not found.tested and not allowed:
        safe = "is safe for it: it works element by element" if found.elementwise else "lets it run"
        checker.report(
            "untested-optimizer",
            "error",
            path,
            f"ZeRO stops at start with {found.name}, which DeepSpeed has not tested with it",
            f"set zero_allow_untested_optimizer to true, which {safe}",
            fix="write zero_allow_untested_optimizer: true" if found.elementwise else None,
            edits=(Edit("set", ("zero_allow_untested_optimizer",), True),) if found.elementwise else (),
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
    on_cpu = bool(checker.target.devices) and all(
        device.name == "cpu" for device in checker.target.devices or ()
    )
    if offload and checker.on("optimizer", "params", "torch_adam") and not on_cpu:
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
    if checker.on(*path) and (checker.stage or checker.precision not in (None, "fp16")):
        message = "acts in fp16 at stage 0 only"
        checker.report_to_remove("ignored-at-stage", "warning", path, message, "remove it")


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
    if checker.block("scheduler") and not checker.has(*path):
        checker.report(
            "needs",
            "error",
            ("scheduler",),
            "has no type, so DeepSpeed ignores the section",
            'add "type": "WarmupLR"',
        )
    if not isinstance(name, str) or path in checker.bad:
        return
    if name not in SCHEDULES:
        _check_foreign_schedule(checker, name)
        return
    _check_params(checker, "scheduler", name, SCHEDULES[name])
    params = checker.block("scheduler", "params")
    if not checker.has("scheduler", "params"):
        checker.report(
            "needs", "error", ("scheduler",), "has no params: DeepSpeed stops at start", 'add "params": {}'
        )
    for key in NEEDED.get(name, ()):
        if key not in params and checker.has("scheduler", "params"):
            checker.report("needs", "error", ("scheduler", "params"), f"{name} needs {key}", f"add {key}")
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


def _check_foreign_schedule(checker: Checker, name: str) -> None:
    near = _nearest(name, SCHEDULES, n=1)
    lowered = {known.lower(): known for known in SCHEDULES}
    guess = lowered.get(name.lower()) or (near[0] if near else None)
    path = ("scheduler", "type")
    if guess:
        checker.report(
            "scheduler-type",
            "error",
            path,
            f"{name} is no schedule of DeepSpeed",
            f"did you mean {guess}?",
            fix=f"write {guess}",
            edits=(Edit("set", path, guess),),
        )
    elif not name.endswith(("LR", "Restarts", "Plateau")):
        checker.report(
            "scheduler-type",
            "error",
            path,
            f"{name} is no schedule of DeepSpeed or torch",
            f"choose one of {', '.join(SCHEDULES)}",
        )


def _check_rates(checker: Checker) -> None:
    rate = checker.get("optimizer", "params", "lr")
    top = checker.get("scheduler", "params", "warmup_max_lr")
    if _is_number(rate) and _is_number(top) and rate != top:
        checker.report(
            "contradiction",
            "warning",
            ("scheduler", "params", "warmup_max_lr"),
            f"{top} differs from optimizer.params.lr {rate}; the schedule's wins",
            "write one value in both",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _nearest(word: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> list[str]:
    import difflib  # slow to import, and most configs are right

    return difflib.get_close_matches(word, list(known), n=n, cutoff=cutoff)
