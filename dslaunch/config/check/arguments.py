"""Arguments of an optimizer or a schedule: names, types and ranges as the constructors take them.

Held against the constructors of torch by tests/config/check/test_arguments.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dslaunch.config.check.context import FILLED, Checker
from dslaunch.config.check.values import broken_bound, in_words, to_number
from dslaunch.config.schema.optimizers import NO_JSON
from dslaunch.config.schema.other_names import OTHER_NAMES
from dslaunch.core.finding import Edit

_BOOLS = {
    "adam_w_mode", "torch_adam", "amsgrad", "bias_correction", "fp32_optimizer_states", "set_grad_none",
    "foreach",
    "maximize", "fused", "capturable", "differentiable", "nesterov", "centered", "cycle_momentum",
    "lr_range_test_staircase", "decoupled_weight_decay", "eps_inside_sqrt", "three_phase",
}  # fmt: skip
_COUNTS = {
    "warmup_num_steps", "total_num_steps", "cycle_first_step_size", "cycle_second_step_size",
    "lr_range_test_step_size", "T_0", "T_mult", "total_steps", "epochs", "steps_per_epoch",
}  # fmt: skip
_TEXTS: Mapping[str, tuple[str, ...]] = {  # and the words that there are, where there are few
    "warmup_type": (),
    "ns_method": (),
    "scale_mode": (),
    "CyclicLR.mode": ("triangular", "triangular2", "exp_range"),
    "ReduceLROnPlateau.mode": ("min", "max"),
    "threshold_mode": ("rel", "abs"),
    "anneal_strategy": ("cos", "linear"),
}
_MAY_BE_NULL = {
    "warmup_max_lr", "cycle_second_step_size", "cycle_second_stair_count", "step_size_down", "total_steps",
    "epochs", "steps_per_epoch",
}  # fmt: skip
_PAIRS = {"betas", "etas", "step_sizes"}
_ADAFACTOR = "adafactor"  # its eps is a pair, the first of them may be null
_NOT_BELOW_0 = (">=0",)
_SHARE = (">=0", "<1")
_RANGES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "lr", "muon_lr", "adam_lr", "eps", "weight_decay", "momentum", "lr_decay", "momentum_decay",
            "initial_accumulator_value", "max_coeff", "min_coeff", "warmup_max_lr", "warmup_min_lr",
        ),
        _NOT_BELOW_0,
    ),
    **dict.fromkeys(("RMSprop.alpha", "rho"), (">=0", "<=1")),
    "beta2_decay": ("<=0",),
    "d": (">=1",),
    **dict.fromkeys(
        (
            "warmup_num_steps", "total_num_steps", "T_max", "T_0", "step_size", "step_size_up", "div_factor",
            "final_div_factor", "total_steps",
        ),
        (">0",),
    ),
    **dict.fromkeys(("cycle_min_mom", "cycle_max_mom", "base_momentum", "max_momentum"), ("<1",)),
    "T_mult": (">=1",),
    "LinearLR.start_factor": (">0", "<=1"),
    **dict.fromkeys(("LinearLR.end_factor", "ConstantLR.factor"), (">=0", "<=1")),
    "ReduceLROnPlateau.factor": ("<1",),
    "pct_start": (">0", "<1"),
    "last_epoch": ("-1",),
}  # fmt: skip
_PAIR_RANGES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "betas": (_SHARE, _SHARE),
    "etas": ((">0", "<1"), (">1",)),
    "step_sizes": ((), ()),
    "eps": (_NOT_BELOW_0, _NOT_BELOW_0),
}


def check_arguments(checker: Checker, section: str, name: str, known: frozenset[str]) -> None:
    """Each argument under ``section.params``, for the constructor ``name`` that takes ``known``."""
    for key, value in checker.block(section, "params").items():
        if key == "max_grad_norm" and section == "optimizer":
            _report_clipping(checker, (section, "params", key))
        elif key not in known:
            _report_unknown(checker, (section, "params", key), name, known)
        else:
            _check_argument(checker, (section, "params", key), name, value)


def check_combinations(checker: Checker) -> None:
    """Arguments of the optimizer that are right each, and refused together at start or in the first step."""
    params = checker.block("optimizer", "params")
    path = ("optimizer", "params")

    def refuse(key: str, message: str, hint: str) -> None:
        if (*path, key) not in checker.bad:
            checker.report_to_remove("needs", "error", (*path, key), message, hint)

    if checker.on(*path, "nesterov") and (not params.get("momentum") or params.get("dampening")):
        refuse(
            "nesterov",
            "needs a momentum above 0 and no dampening: torch stops at start",
            "set momentum to 0.9",
        )
    if checker.on(*path, "foreach") and checker.on(*path, "fused"):
        refuse("foreach", "and fused are both true, which torch refuses at start", "keep one")
    if checker.on(*path, "differentiable"):
        refuse(
            "differentiable",
            "true stops the first step: a trained weight cannot be part of a graph",
            "remove it",
        )
    cpu = checker.on_cpu or checker.offload("offload_optimizer") != "none"
    if checker.on(*path, "capturable") and cpu:
        refuse(
            "capturable", "true needs weights on a GPU, and here the optimizer works on the CPU", "remove it"
        )


def _report_clipping(checker: Checker, path: tuple[str, str, str]) -> None:
    has_clipping = checker.has("gradient_clipping")
    edit = Edit("delete", path) if has_clipping else Edit("rename", path, ("gradient_clipping",))
    checker.report(
        "misplaced-key",
        "error",
        path,
        "is refused here at start; clipping is gradient_clipping at the top level",
        "move it to gradient_clipping",
        fix="remove it" if has_clipping else "move to gradient_clipping",
        edits=(edit,),
    )


def _report_unknown(checker: Checker, path: tuple[str, str, str], name: str, known: frozenset[str]) -> None:
    section, _, key = path
    elsewhere = OTHER_NAMES.get(key, "").removeprefix(f"{section}.params.")
    near = [elsewhere] if elsewhere in known else nearest(key, known, n=1, cutoff=0.7)
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


def _check_argument(checker: Checker, path: tuple[str, str, str], name: str, value: Any) -> None:
    section, _, key = path
    if path in checker.bad or key in NO_JSON:
        return
    kind = _kind(key, name)
    if value is None:
        if _needs_value(checker, section, key, kind):
            _report_null(checker, path, kind)
    elif value == "auto":
        if ".".join(path) not in FILLED[checker.target.reader]:
            _report_auto(checker, path)
    elif kind == "true or false" and type(value) is int and value in (0, 1) and key != "differentiable":
        word = str(bool(value)).lower()
        message = f"{value} is a number, where true or false is expected"
        edits = (Edit("set", path, bool(value)),)
        checker.report("type", "warning", path, message, f"write {word}", fix=f"write {word}", edits=edits)
    elif not _fits(kind, value, key):
        _report_type(checker, path, kind, value)
    else:
        _check_ranges(checker, path, name, kind, value)


def _kind(key: str, name: str) -> str:
    if key in _PAIRS or (key == "eps" and name.lower() == _ADAFACTOR):
        return "a list of two numbers"
    return (
        "true or false" if key in _BOOLS
        else "a text" if key in _TEXTS or f"{name}.{key}" in _TEXTS
        else "a list" if key == "milestones"
        else "a whole number" if key in _COUNTS
        else "a number"
    )  # fmt: skip


def _needs_value(checker: Checker, section: str, key: str, kind: str) -> bool:
    """Whether null breaks it: a switch is off then, and of DeepSpeed's own a schedule sets the rate."""
    if section == "optimizer" and key == "lr":
        from dslaunch.config.schema.optimizers import find_optimizer

        found = find_optimizer(str(checker.get("optimizer", "type")))
        torchs = found is not None and (found.from_torch or found.name == "Adagrad")
        scheduled = checker.has("scheduler") and checker.offload("offload_optimizer") == "none"
        return torchs or not scheduled or checker.on("optimizer", "params", "torch_adam")
    return key == "differentiable" or (kind != "true or false" and key not in _MAY_BE_NULL)


def _report_null(checker: Checker, path: tuple[str, str, str], kind: str) -> None:
    message, edits = f"is null, but {kind} is expected", (Edit("delete", path),)
    checker.report("type", "error", path, message, "leave it out", fix="remove it", edits=edits)


def _report_type(checker: Checker, path: tuple[str, str, str], kind: str, value: Any) -> None:
    text = value if isinstance(value, str) and kind in ("a number", "a whole number") else ""
    number = to_number(text)
    fix = None if number is None else f"write {number}"
    shown = f'"{value}"' if isinstance(value, str) else value
    edits = () if number is None else (Edit("set", path, number),)
    checker.report("type", "error", path, f"{shown}, but {kind} is expected", fix, fix=fix, edits=edits)


def _report_auto(checker: Checker, path: tuple[str, str, str]) -> None:
    raw = checker.target.reader == "raw"
    who = "DeepSpeed, which hands the word to the constructor" if raw else f"{checker.target.reader} here"
    hint = "write the value itself" + (", or check with --for hf-trainer" if raw else "")
    checker.report("auto", "error", path, f'"auto" means nothing to {who}', hint)


def _fits(kind: str, value: Any, key: str) -> bool:
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "a text":
        return isinstance(value, str)
    if kind == "a list of two numbers":
        first_may_be_null = key == "eps"
        return (
            isinstance(value, list)
            and len(value) == 2
            and (is_number(value[0]) or (first_may_be_null and value[0] is None))
            and is_number(value[1])
        )
    if kind == "a list":
        return isinstance(value, list)
    if kind == "a whole number":
        decimal = isinstance(value, float) and key == "warmup_num_steps"
        return is_number(value) and value == int(value) and not decimal
    if isinstance(value, list):  # one of each parameter group
        return bool(value) and key.endswith(("_lr", "_mom", "_momentum")) and all(map(is_number, value))
    return is_number(value)


def _check_ranges(checker: Checker, path: tuple[str, str, str], name: str, kind: str, value: Any) -> None:
    key = path[2]
    if kind == "a list of two numbers":
        bounds: Iterable[tuple[Any, tuple[str, ...]]] = zip(value, _PAIR_RANGES[key], strict=True)
    elif kind == "a text":
        bounds = [(value, _TEXTS.get(f"{name}.{key}") or _TEXTS.get(key, ()))]
    else:
        range_ = _RANGES.get(f"{name}.{key}") or _RANGES.get(key, ())
        bounds = [(number, range_) for number in (value if isinstance(value, list) else [value])]
    for number, range_ in bounds:
        broken = None if number is None else broken_bound(range_, number)
        if broken is not None and broken[0] in "<>":
            message = f"{number} is out of range: it must be {in_words(broken)}"
            hint = "write the number of steps" if key in _COUNTS else None
            checker.report("range", "error", path, message, hint)
            return
        if broken is not None:
            checker.report("range", "error", path, f"{number} is not {broken}", "choose among them")
            return


def is_number(value: Any) -> bool:
    """A number, which true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def nearest(word: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known words that are most like this one."""
    import difflib  # slow to import, and most configs are right

    return difflib.get_close_matches(word, list(known), n=n, cutoff=cutoff)
