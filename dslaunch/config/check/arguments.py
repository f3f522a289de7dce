"""Arguments of an optimizer or a schedule: names, types and ranges as the constructors take them.

Held against the constructors of torch by tests/config/check/test_arguments.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dslaunch.config.check.context import FILLED, Checker
from dslaunch.config.check.values import broken_bound, in_words, to_number
from dslaunch.config.schema.arguments import argument_table
from dslaunch.config.schema.optimizers import NO_JSON
from dslaunch.config.schema.other_names import OTHER_NAMES
from dslaunch.core.finding import Edit

_WORDS: Mapping[str, tuple[str, ...]] = {
    "CyclicLR.mode": ("triangular", "triangular2", "exp_range"),
    "ReduceLROnPlateau.mode": ("min", "max"),
    "OneCycleLR.anneal_strategy": ("cos", "linear"),
    "ReduceLROnPlateau.threshold_mode": ("rel", "abs"),
}
# Narrower than the row of all that have the argument.
_BOUNDS: Mapping[str, tuple[str, ...]] = {
    "RMSprop.alpha": (">=0", "<=1"),
    "ConstantLR.factor": (">=0", "<=1"),
    "ReduceLROnPlateau.factor": ("<1",),
}
_MAY_BE_NULL = {
    "warmup_max_lr", "cycle_second_step_size", "cycle_second_stair_count", "step_size_down", "total_steps",
    "epochs", "steps_per_epoch",
}  # fmt: skip
_FP32_MAX = 3.4028234e38
_ETAS = ((">0", "<1"), (">1",))
_PAIR = "list of two numbers"


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
    fits = not near or _kind(section, near[0], name) != _PAIR  # one of two numbers
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
    kind = _kind(section, key, name)
    if path in checker.document.decimals and checker.target.reader != "raw":
        value = float(value)  # hjson makes a whole number of 2.0, JSON does not
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


def _kind(section: str, key: str, name: str) -> str:
    if key == "eps" and name == "Adafactor":
        return _PAIR  # the first of them may be null
    return argument_table()[f"{section}.params.{key}"].kind


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
    message, edits = f"is null, but {_wanted(kind)} is expected", (Edit("delete", path),)
    checker.report("type", "error", path, message, "leave it out", fix="remove it", edits=edits)


def _report_type(checker: Checker, path: tuple[str, str, str], kind: str, value: Any) -> None:
    text = value if isinstance(value, str) and kind in ("number", "whole number") else ""
    number = to_number(text)
    fix = None if number is None else f"write {number}"
    shown = f'"{value}"' if isinstance(value, str) else value
    edits = () if number is None else (Edit("set", path, number),)
    message = f"{shown}, but {_wanted(kind)} is expected"
    checker.report("type", "error", path, message, fix or _hint(path), fix=fix, edits=edits)


def _report_auto(checker: Checker, path: tuple[str, str, str]) -> None:
    raw = checker.target.reader == "raw"
    who = "DeepSpeed, which hands the word to the constructor" if raw else f"{checker.target.reader} here"
    hint = "write the value itself" + (", or check with --for hf-trainer" if raw else "")
    checker.report("auto", "error", path, f'"auto" means nothing to {who}', hint)


def _fits(kind: str, value: Any, key: str) -> bool:
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "text":
        return isinstance(value, str)
    if kind == _PAIR:
        first_may_be_null = key == "eps"
        return (
            isinstance(value, list)
            and len(value) == 2
            and (is_number(value[0]) or (first_may_be_null and value[0] is None))
            and is_number(value[1])
        )
    if kind == "list":
        return isinstance(value, list)
    if kind == "whole number":
        decimal = isinstance(value, float) and key == "warmup_num_steps"
        return is_number(value) and value == int(value) and not decimal
    if isinstance(value, list):  # one of each parameter group
        return bool(value) and key.endswith(("_lr", "_mom", "_momentum")) and all(map(is_number, value))
    return is_number(value)


def _check_ranges(checker: Checker, path: tuple[str, str, str], name: str, kind: str, value: Any) -> None:
    key = path[2]
    if kind == "text":
        words = _WORDS.get(f"{name}.{key}", ())
        if words and value not in words:
            message = f'"{value}" is not one of {", ".join(words)}'
            checker.report("choice", "error", path, message, "choose one of them")
        return
    bounds = _BOUNDS.get(f"{name}.{key}") or argument_table()[".".join(path)].bounds
    numbers = [number for number in (value if isinstance(value, list) else [value]) if number is not None]
    for position, number in enumerate(numbers):
        broken = broken_bound(_ETAS[position] if key == "etas" else bounds, number)
        broken = broken or (_too_large(key, number) if path[0] == "optimizer" else None)
        if broken is not None:
            message = f"{number} is out of range: it must be {in_words(broken)}"
            checker.report("range", "error", path, message, _hint(path))
            return


def _too_large(key: str, number: float) -> str | None:
    """The bound that torch stops at in a step: what fp32 holds, and for whole numbers 64 bits."""
    if key not in ("lr", "weight_decay") and isinstance(number, int) and abs(number) >= 2**64:
        return f"<{2**64}"
    return f"<={_FP32_MAX}" if abs(number) > _FP32_MAX else None


def _hint(path: tuple[str, str, str]) -> str:
    default = argument_table()[".".join(path)].default
    known = default != "null" and not default.startswith("(")
    return f"the default is {default}" if known else "write such a value, or leave it out"


def _wanted(kind: str) -> str:
    return kind if kind == "true or false" else f"a {kind}"


def is_number(value: Any) -> bool:
    """A number, which true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def nearest(word: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known words that are most like this one."""
    import difflib  # slow to import, and most configs are right

    return difflib.get_close_matches(word, list(known), n=n, cutoff=cutoff)
