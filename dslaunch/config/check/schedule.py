"""Schedules that run the wrong way or that DeepSpeed's constructors refuse (runtime/lr_schedules.py)."""

from __future__ import annotations

from typing import Any

from dslaunch.config.check.context import Checker
from dslaunch.core.finding import Edit

# Schedule -> (lower, its default, upper, its default, what happens where they are the other way round).
_FALLS = "the rate falls while it should warm up"
_ORDER: dict[str, tuple[tuple[str, float | None, str, float | None, str], ...]] = {
    "WarmupLR": (("warmup_min_lr", 0.0, "warmup_max_lr", 0.001, _FALLS),),
    "WarmupDecayLR": (("warmup_min_lr", 0.0, "warmup_max_lr", 0.001, _FALLS),),
    "OneCycle": (
        ("cycle_min_lr", None, "cycle_max_lr", None, "the rate falls first and rises then"),
        ("cycle_min_mom", 0.8, "cycle_max_mom", 0.9, "momentum moves with the rate, not against it"),
    ),
}
_SHARES = {  # of optimizer.params.lr
    "warmup_min_ratio": _FALLS,
    "cos_min_ratio": "the rate rises where it should decay",
}


def check_course(checker: Checker, name: str) -> None:
    """What the schedule ``name`` of the config does that nobody wants of it."""
    params = checker.block("scheduler", "params")
    for low, low_default, high, high_default, effect in _ORDER.get(name, ()):
        below, above = _of(params, low, low_default), _of(params, high, high_default)
        if below is not None and above is not None and below > above:
            place = low if low in params else high
            other = f"{high} {above:g}" if place == low else f"{low} {below:g}"
            side, value = ("above", below) if place == low else ("below", above)
            message = f"{value:g} is {side} {other}: {effect}"
            checker.report("order", "warning", ("scheduler", "params", place), message, "swap the two")
    for key, effect in _SHARES.items() if name == "WarmupCosineLR" else ():
        share = _number(params.get(key))
        if share is not None and share > 1:
            message = f"{share:g} is above 1, and it is a share of optimizer.params.lr: {effect}"
            checker.report("order", "warning", ("scheduler", "params", key), message, "write a share below 1")
    _check_warmup_type(checker, params.get("warmup_type"))
    if name == "OneCycle":
        _check_betas(checker, params.get("cycle_momentum", True))


def _check_warmup_type(checker: Checker, kind: Any) -> None:
    if isinstance(kind, str) and kind not in ("log", "linear", "auto"):
        near = "linear" if kind.lower().startswith("lin") else "log"
        path = ("scheduler", "params", "warmup_type")
        message = f'"{kind}" is neither log nor linear, and DeepSpeed then takes log'
        edits = (Edit("set", path, near),)
        checker.report("choice", "warning", path, message, f"write {near}", fix=f"write {near}", edits=edits)


def _check_betas(checker: Checker, cycles: Any) -> None:
    """OneCycle writes its own betas into the optimizer, with 0.99 as the second."""
    path = ("optimizer", "params", "betas")
    if cycles is not False and checker.get(*path) is not None:
        low, high = (
            checker.get("scheduler", "params", "cycle_min_mom"),
            checker.get("scheduler", "params", "cycle_max_mom"),
        )
        run = f"{0.8 if low is None else low} to {0.9 if high is None else high}"
        message = f"OneCycle replaces them: the first runs from {run}, the second is 0.99"
        checker.report(
            "contradiction", "warning", path, message, "set scheduler.params.cycle_momentum to false"
        )


def _of(params: dict[str, Any], key: str, default: float | None) -> float | None:
    """The number of a key, its default where it is left out; None for anything else, as "auto" or a list."""
    return _number(params[key]) if key in params else default


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
