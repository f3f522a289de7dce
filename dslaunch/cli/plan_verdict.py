"""The first lines of ``dslaunch plan``: what would run, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dslaunch.cli.plan_memory import Memory
    from dslaunch.config.length import RunLength
    from dslaunch.core.plan import BatchPlan, Precision


def verdict_lines(
    precision: Precision,
    zero: Mapping[str, Any] | None,
    batch: BatchPlan,
    memory: Memory | None,
    *,
    autocast: bool = False,
) -> list[str]:
    """Precision, stage and batch in two lines, then the memory: whether it fits, and what would.

    ``zero``: the block of the DeepSpeed JSON; None without DeepSpeed.
    """
    from dslaunch.cli.memory_table import verdict
    from dslaunch.config.zero import OFFLOADS

    away = [f"{name} {zero[name]['device']}" for name in OFFLOADS if zero and name in zero]
    offload = f" with {' and '.join(away)}" if away else ""
    shards = f"ZeRO stage {zero['stage']}{offload}" if zero else "torch without DeepSpeed"
    autocast = precision != "fp32" and (zero is None or autocast)
    computes = f"{precision} autocast" if autocast else precision
    micro, steps = batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps
    ranks = "1 rank" if batch.world_size == 1 else f"{batch.world_size} ranks"
    return [
        f"{computes}, {shards}, {ranks}",
        f"train_batch_size {batch.train_batch_size} = micro-batch {micro} x accumulation {steps} x {ranks}",
        *(verdict(memory) if memory else ["memory: not planned, the model is not on this machine"]),
    ]


def length_line(length: RunLength) -> str:
    """How many steps, and how many of them warm up."""
    if length.total_steps is None:
        return f"steps: {length.reason}"
    few = "" if length.exact else "at most "
    steps = "1 step" if length.total_steps == 1 else f"{length.total_steps} steps"
    return f"{few}{steps}, {length.warmup_steps} of warm-up"
