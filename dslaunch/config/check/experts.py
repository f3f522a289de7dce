"""expert_parallel: what DeepSpeed 0.19.8 refuses at start where it is on.

Read in module_inject/auto_ep_config.py and auto_ep_folding.py, and run.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.config.check.context import Checker

_SECTION = "expert_parallel"
_CHOICES = {
    "score_func": ("auto", "softmax", "sigmoid"),
    "expert_activation": ("swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"),
    "preset_model": ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"),
}
_ATTRIBUTES = (
    "expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr", "router_pattern",
    "expert_pattern", "shared_experts_pattern", "shared_experts_gate_pattern",
)  # fmt: skip


def check_experts(checker: Checker) -> None:
    """The sizes against the target's world size, and values that do not go together."""
    if not checker.on(_SECTION, "enabled"):
        return
    _check_width(checker)
    for key, known in _CHOICES.items():
        value = checker.get(_SECTION, key)
        if isinstance(value, str) and value not in known:
            message = f'"{value}" is not one of {", ".join(known)}'
            checker.report("choice", "error", (_SECTION, key), message, "choose one of them")
    for key in _ATTRIBUTES:
        value = checker.get(_SECTION, key)
        if isinstance(value, str) and (not value or "." in value):
            message = f'"{value}" is no name of one attribute, without dots: DeepSpeed stops at start'
            checker.report("range", "error", (_SECTION, key), message, "write the last part of the name")
    for key, message, hint in _contradictions(checker):
        checker.report(
            "contradiction", "error", (_SECTION, key), f"{message}: DeepSpeed stops at start", hint
        )


def _check_width(checker: Checker) -> None:
    experts, tensors = (
        checker.number(_SECTION, key) or 1 for key in ("autoep_size", "expert_tensor_parallel_size")
    )
    world, stages = checker.target.world_size, checker.get("pipeline", "stages")
    if tensors > 1:
        message = f"{tensors} is not supported yet: DeepSpeed 0.19.8 stops at start"
        checker.report("range", "error", (_SECTION, "expert_tensor_parallel_size"), message, "use 1")
    elif world is not None and world % experts and not (isinstance(stages, int) and stages > 1):
        message = f"{experts} does not divide the world size {world}"
        hint = "choose a divisor of the number of ranks"
        checker.report("world-size", "error", (_SECTION, "autoep_size"), message, hint)


def _contradictions(checker: Checker) -> Iterator[tuple[str, str, str]]:
    def value(key: str) -> object:
        return checker.value(_SECTION, key)

    tensor_parallel = (checker.number("tensor_parallel", "autotp_size") or 1) > 1
    shares = (checker.number(_SECTION, "autoep_size") or 1) > 1
    deepep = value("comm_backend") == "deepep"
    if deepep and not value("comm_max_tokens_per_rank"):
        hint = "set it to micro-batch size x longest sequence"
        yield "comm_backend", "deepep needs comm_max_tokens_per_rank", hint
    if value("gate_up_impl") == "fused" and value("use_grouped_mm") is False:
        yield "gate_up_impl", "fused needs use_grouped_mm", "leave it out"
    if value("row_weighting_impl") == "fused" and not (deepep and shares):
        hint = "leave it out"
        yield "row_weighting_impl", "fused needs comm_backend deepep and autoep_size above 1", hint
    if value("combine_impl") == "fused_weighted_sum" and (tensor_parallel or (deepep and shares)):
        message = "fused_weighted_sum goes with no tensor parallelism and not with deepep"
        yield "combine_impl", message, "leave it out"
    if value("async_split_plan") is True and shares and tensor_parallel:
        yield "async_split_plan", "true goes with no tensor parallelism", "leave it out"
    groups, limited = (
        checker.number(_SECTION, "num_expert_groups"),
        checker.number(_SECTION, "num_limited_groups"),
    )
    if groups is not None and limited is not None and limited > groups:
        yield "num_limited_groups", f"{limited} is above num_expert_groups {groups}", f"use {groups} or less"
