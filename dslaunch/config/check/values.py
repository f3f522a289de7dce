"""One value against its row of the table: type, range, ``auto``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from dslaunch.config.check.context import FILLED, Checker
from dslaunch.config.schema import Key
from dslaunch.core.finding import Edit, KeyPath

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_NAMES = {
    "int": "a whole number",
    "number": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "texts": "a list of texts",
    "choice": "a text",
    "strict": "a section in braces",
    "section": "a section in braces",
    "open": "a section in braces",
}
# Where null stands for "not there" although it is a section.
_MAY_BE_NULL = {
    "bf16", "aio", "checkpoint.writer", "autotuning.model_info", "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer", "zero_optimization.zenflow", "zero_optimization.leaf_module",
    "tensor_parallel.partition_config", "optimizer.type", "optimizer.params", "scheduler.type",
}  # fmt: skip
# DeepSpeed itself gives "auto" a meaning here.
_OWN_AUTO = ("pipeline.", "expert_parallel.", "zero_optimization.zenflow.", "data_types.keep_in_fp32_modules")
_DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_TRUE = {"true", "yes", "on", "1", "t", "y"}
_FALSE = {"false", "no", "off", "0", "f", "n"}
# Upper and lower case are one to DeepSpeed here.
_ANY_CASE = (
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "gradient_allreduce_op",
    "log_level",
    "checkpoint.",
)


_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
# Sections that are pydantic models of DeepSpeed's, which leave out what is "auto".
_DROP_AUTO = (
    "zero_optimization", "fp16", "bf16", "compile", "tensor_parallel", *_MONITORS,
    "hybrid_engine", "comms_logger", "timers",
)  # fmt: skip


def check_value(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    """Report a value of the wrong type or range, ``auto`` that nobody fills, and nulls that break."""
    if path in checker.bad:
        return  # a placeholder or bare word was named there already
    if value == "auto":
        check_auto(checker, path, key)
    elif value is None:
        _check_null(checker, path, key)
    elif key.path == "zero_optimization" and isinstance(value, bool):
        _check_old_zero(checker, path, value)
    elif key.type != "any":
        _CHECKS[key.type](checker, path, key, value)


def check_auto(checker: Checker, path: KeyPath, key: Key) -> None:
    """``auto`` is a word of the trainers; DeepSpeed itself drops it or trips over it."""
    reader = checker.target.reader
    if key.path in FILLED[reader] or (key.path.startswith(_OWN_AUTO) and key.type != "never"):
        return
    drops = key.section.partition(".")[0] in _DROP_AUTO and not key.is_section
    then = "trips over it"
    if drops or key.path in _MONITORS:
        then = f"uses {key.default or 'its default'} in its place"
    if reader == "raw":
        message = (
            f'"auto" means nothing to DeepSpeed, which {then}; only the Hugging Face Trainer fills it in'
        )
        hint = "write the value itself, or check with --for hf-trainer"
    else:
        message = f'"auto" is not filled in here by {reader}; DeepSpeed {then}'
        hint = "write the value itself"
    checker.report("auto", "error", path, message, hint)


def _check_null(checker: Checker, path: KeyPath, key: Key) -> None:
    if key.default == "null" or key.path in _MAY_BE_NULL or key.path.startswith("expert_parallel."):
        return
    checker.report_to_remove(
        "type",
        "error",
        path,
        f"is null; {_NAMES.get(key.type, 'a value')} is expected",
        "remove the key to have the default",
    )


def _check_old_zero(checker: Checker, path: KeyPath, value: bool) -> None:
    stage = int(value)
    checker.report(
        "deprecated-key",
        "warning",
        path,
        f"{str(value).lower()} is the old form and means stage {stage}",
        f'write {{"stage": {stage}}}',
        fix=f'write {{"stage": {stage}}}',
        edits=(Edit("set", path, {"stage": stage}),),
    )


def _type_error(checker: Checker, path: KeyPath, key: Key, value: Any, fixed: Any = None) -> None:
    kinds = {bool: "true or false", str: "a text", int: "a number", float: "a number", list: "a list"}
    is_kind = kinds.get(type(value), "a section")
    shown = f'"{value}"' if isinstance(value, str) else _shown(value)
    fix = None if fixed is None else f"write {_shown(fixed)}"
    edits = () if fixed is None else (Edit("set", path, fixed),)
    hint = fix or (f"values: {', '.join(key.range)}" if key.type == "choice" else _default_hint(key))
    message = f"{shown} is {is_kind}, but {_NAMES[key.type]} is expected"
    checker.report("type", "error", path, message, hint, fix=fix, edits=edits)


def _check_bool(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int) and value in (0, 1):
        word = "true" if value else "false"
        checker.report(
            "type",
            "warning",
            path,
            f"{value} is a number, where true or false is expected",
            f"write {word}",
            fix=f"write {word}",
            edits=(Edit("set", path, bool(value)),),
        )
        return
    word = value.strip().rstrip(",").lower() if isinstance(value, str) else ""
    _type_error(checker, path, key, value, True if word in _TRUE else False if word in _FALSE else None)


def _check_int(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        _type_error(checker, path, key, value)
        return
    if isinstance(value, str):
        number = to_number(value)
        whole = int(number) if number is not None and number == int(number) else None
        _type_error(checker, path, key, value, _if_in_range(key, whole))
        return
    if isinstance(value, float) and value != int(value):
        near = _if_in_range(key, round(value))
        fix = None if near is None else f"write {near}"
        checker.report(
            "fraction",
            "error",
            path,
            f"{value} has a fraction, but a whole number is expected",
            fix or _range_hint(key),
            fix=fix,
            edits=() if near is None else (Edit("set", path, near),),
        )
        return
    _check_range(checker, path, key, value)


def _check_number(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        number = to_number(value) if isinstance(value, str) else None
        _type_error(checker, path, key, value, _if_in_range(key, number))
        return
    _check_range(checker, path, key, value)


def _check_range(checker: Checker, path: KeyPath, key: Key, value: int | float) -> None:
    if (broken := broken_bound(key.range, value)) is None or _idle(checker, key):
        return
    if broken[0] in "<>":
        message = f"{value} is out of range: it must be {in_words(broken)}"
        checker.report("range", "error", path, message, _default_hint(key))
    else:
        checker.report("range", "error", path, f"{value} is not one of {broken}", "choose one of them")


def _idle(checker: Checker, key: Key) -> bool:
    """Whether DeepSpeed never looks at the value: a dynamic scale's, and there is none."""
    if key.section != "fp16" or key.name not in _DYNAMIC:
        return False
    return checker.precision in ("bf16", "fp32") or bool(checker.number("fp16", "loss_scale"))


def broken_bound(bounds: Sequence[str], value: int | float | str) -> str | None:
    """The bound that ``value`` breaks, or the choices that it is not among; None where it is in range."""
    choices = [bound for bound in bounds if bound[0] not in "<>"]
    if choices and str(value) not in choices:
        return ", ".join(choices)
    for bound in bounds:
        sign = bound[:2] if bound[:2] in _COMPARE else bound[0]
        if sign in _COMPARE and not _COMPARE[sign](value, float(bound[len(sign) :])):
            return bound
    return None


def _if_in_range(key: Key, value: int | float | None) -> int | float | None:
    return value if value is not None and broken_bound(key.range, value) is None else None


def _range_hint(key: Key) -> str:
    bounds = [in_words(bound) for bound in key.range if bound[0] in "<>"]
    return f"it must be {' and '.join(bounds)}; {_default_hint(key)}" if bounds else _default_hint(key)


def _default_hint(key: Key) -> str:
    known = key.default not in ("", "null", "auto")
    return f"the default is {key.default}" if known else "write such a value, or remove the key"


def in_words(bound: str) -> str:
    """``>=0`` -> ``at least 0``."""
    sign = bound[:2] if bound[:2] in _COMPARE else bound[0]
    word = {">=": "at least", "<=": "at most", ">": "greater than", "<": "less than"}[sign]
    return f"{word} {bound[len(sign) :]}"


def _check_str(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    if not isinstance(value, str):
        _type_error(checker, path, key, value)
    elif not value and key.range:
        checker.report("range", "error", path, "is empty", "write a name, or remove the key")


def _check_list(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    if not isinstance(value, list):
        _type_error(checker, path, key, value)


def _check_texts(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    if isinstance(value, str) and "leaf_module" in key.path:
        return  # DeepSpeed makes a list of it
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        _type_error(checker, path, key, value)
    elif key.range and (other := [item for item in value if item not in key.range]):
        checker.report(
            "choice", "error", path, f'"{other[0]}" is not one of {", ".join(key.range)}', "choose among them"
        )


def _check_never(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    checker.report_to_remove(
        "type",
        "error",
        path,
        f"{_shown(value)}: DeepSpeed accepts no value here",
        "remove it",
    )


def _check_choice(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    if not isinstance(value, str):
        _type_error(checker, path, key, value)
        return
    any_case = key.path.startswith(_ANY_CASE)
    if value in key.range or (any_case and value.lower() in {choice.lower() for choice in key.range}):
        return
    import difflib

    near = difflib.get_close_matches(value.lower(), key.range, n=1)
    hint = f"did you mean {near[0]}?" if near else "choose one of them"
    checker.report("choice", "error", path, f'"{value}" is not one of {", ".join(key.range[:6])}', hint)


def _check_block(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    if isinstance(value, dict):
        return
    enabled = any(child == "enabled" for child in _child_names(key.path))
    if isinstance(value, bool) and enabled:
        word = str(value).lower()
        checker.report(
            "type",
            "error",
            path,
            f"{word} stands where a section in braces is expected",
            f'write {{"enabled": {word}}}',
            fix=f'write {{"enabled": {word}}}',
            edits=(Edit("set", path, {"enabled": value}),),
        )
    else:
        _type_error(checker, path, key, value)


def _child_names(path: str) -> list[str]:
    from dslaunch.config.schema import section_keys

    return list(section_keys(path))


def to_number(text: str) -> int | float | None:
    """The number that a text holds, None for none; a comma behind it does not matter."""
    try:
        value = float(text.strip().rstrip(","))
    except ValueError:
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return None
    return int(value) if value == int(value) and "." not in text else value


def _shown(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


_CHECKS = {
    "int": _check_int,
    "number": _check_number,
    "bool": _check_bool,
    "str": _check_str,
    "list": _check_list,
    "texts": _check_texts,
    "never": _check_never,
    "choice": _check_choice,
    "strict": _check_block,
    "section": _check_block,
    "open": _check_block,
}
