"""Arguments that only some of the optimizers behind one name take: DeepSpeed's own, its CPU's, torch's."""

from __future__ import annotations

from dslaunch.config.check.context import Checker
from dslaunch.config.schema.optimizers import VARIANTS, Variant

_WORDS: dict[Variant, str] = {"fused": "fused", "cpu": "CPU", "torch": "torch's"}


def check_variant(checker: Checker, name: str) -> None:
    """What the one that DeepSpeed makes of ``name`` here does not take: it stops at start."""
    if name not in VARIANTS:
        return
    variants, variant = VARIANTS[name], _variant(checker, name)
    who = f"{_WORDS[variant]} {name}"
    params = checker.block("optimizer", "params")
    for key in params:
        path = ("optimizer", "params", key)
        takers = [other for other in variants if key in variants[other]]
        if path in checker.bad or not takers or variant in takers:
            continue
        when = " or ".join(_when(name, other) for other in takers)
        message = f"is no argument of {who}, which DeepSpeed takes here and which stops at start"
        checker.report_to_remove("needs", "error", path, message, f"remove it; it goes {when}")
    if name in ("Adam", "AdamW") and variant != "torch" and checker.on("optimizer", "params", "amsgrad"):
        path = ("optimizer", "params", "amsgrad")
        hint = f"remove it; it goes {_when(name, 'torch')}"
        checker.report_to_remove("needs", "error", path, f"true is refused by {who} at start", hint)


def _variant(checker: Checker, name: str) -> Variant:
    if name in ("Adam", "AdamW") and checker.on("optimizer", "params", "torch_adam"):
        return "torch"
    if checker.offload("offload_optimizer") != "none":
        return "cpu"
    return "torch" if name == "Adagrad" else "fused"


def _when(name: str, variant: Variant) -> str:
    if variant == "cpu":
        return "with offload_optimizer"
    return "with torch_adam" if variant == "torch" and name != "Adagrad" else "without offload_optimizer"
