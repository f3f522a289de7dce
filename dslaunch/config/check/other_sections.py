"""Sections with a rule or two each, and what is not written at all."""

from __future__ import annotations

from dslaunch.config.check.context import PARENT, Checker
from dslaunch.config.check.experts import check_experts
from dslaunch.config.check.keys import parse_version

_CLIPS_SINCE = (0, 19, 3)  # before it, clipping that is not written is off
_SAMPLING = ("data_efficiency", "data_sampling")
_DATA = {
    (*_SAMPLING, "dynamic_batching"): ("max_tokens",),
    (*_SAMPLING, "curriculum_learning"): ("curriculum_metrics",),
    # DeepSpeed turns it on whatever the sections above it say.
    ("data_efficiency", "data_routing", "random_ltd"): (
        "total_layer_num",
        "random_ltd_layer_num",
        "random_ltd_schedule",
    ),
}


def check_other_sections(checker: Checker) -> None:
    """Rules of the sections that have a rule or two each, and what is not written at all."""
    block = "activation_checkpointing"
    if checker.on(block, "contiguous_memory_optimization"):
        for other in ("number_checkpoints", "partition_activations"):
            if not checker.get(block, other):
                checker.report(
                    "needs",
                    "warning",
                    (block, "contiguous_memory_optimization"),
                    f"needs {other}; DeepSpeed's checkpointing stops without it",
                    f"set {other}, or turn it off",
                )
    if checker.on("wall_clock_breakdown"):
        checker.report(
            "slow",
            "info",
            ("wall_clock_breakdown",),
            "its timers wait for the device and slow training",
            "turn it off once you have measured",
        )
    if not checker.has(PARENT):
        wanted = checker.target.reader == "accelerate"
        checker.report(
            "unsharded",
            "error" if wanted else "info",
            (),
            "zero_optimization is not written"
            + (", and accelerate stops" if wanted else ": nothing is sharded (stage 0)"),
            'add "zero_optimization": {"stage": 2}',
        )
    if not checker.has("gradient_clipping"):
        version = checker.target.version
        does = "clips at 1.0" if parse_version(version) >= _CLIPS_SINCE else "does not clip"
        checker.report(
            "clipping-default",
            "info",
            (),
            f"gradient_clipping is not written: DeepSpeed {version} then {does}",
            "write it, 0 for no clipping",
        )
    if isinstance(checker.get("comet", "api_key"), str):
        checker.report(
            "secret", "warning", ("comet", "api_key"), "a key stands in the file", "use COMET_API_KEY"
        )
    for section, keys in _DATA.items():
        if checker.on(*section, "enabled"):
            for needed in [key for key in keys if key not in checker.block(*section)]:
                checker.report("needs", "error", (*section, "enabled"), f"needs {needed}", f"set {needed}")
    check_experts(checker)
