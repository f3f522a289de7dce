"""A memory plan as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dslaunch.config.memory.alternatives import Alternative
    from dslaunch.config.memory.items import Item
    from dslaunch.config.memory.planner import MemoryPlan
    from dslaunch.config.memory.setup import Setup


def table(setup: Setup, plan: MemoryPlan, alternatives: list[Alternative], shown: int) -> list[str]:
    """What one device, one host and one checkpoint take, then the verdict and what else could be done."""
    model = setup.model
    trained = f"{setup.numel:,} of {model.numel + (setup.numel if setup.method != 'full' else 0):,}"
    lines = [f"memory: {trained} parameters trained ({model.source}), ZeRO stage {setup.zero_stage}"]
    lines += ["each device:", *_items(plan.items)]
    lines += [
        f"  {'rest':<44} {gib(plan.rest_bytes)}",
        f"  {'peak':<44} {gib(plan.peak_bytes)}  {plan.phase}",
    ]
    if plan.outside:
        lines += ["beside the allocator (estimates):", *_items(plan.outside)]
    lines += ["each host:", *_items(plan.host), f"  {'peak':<44} {gib(plan.host_peak_bytes)}"]
    lines += [f"each checkpoint: {gib(plan.checkpoint_bytes).strip()}", *_verdict(plan, alternatives)]
    lines += ["alternatives, best first:"] if alternatives else []
    return lines + [_alternative(alternative) for alternative in alternatives[:shown]]


def gib(size: int) -> str:
    """Bytes as GiB, or MiB below a tenth of one, right-aligned."""
    text = f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"
    return f"{text:>12}"


def _items(items: Sequence[Item]) -> list[str]:
    return [f"  {item.name:<44} {gib(item.size)}  {', '.join(item.when)}" for item in items]


def _verdict(plan: MemoryPlan, alternatives: list[Alternative]) -> list[str]:
    from dslaunch.config.memory.alternatives import nearest_that_fits

    total = gib(plan.total_bytes).strip()
    if plan.fits is None:
        return [f"needs {total} on each device; its size is not known"]
    capacity = gib(plan.capacity_bytes or 0).strip()
    if plan.fits:
        return [f"fits: {total} of {capacity} on each device"]
    lines = [
        f"does not fit: {total} of {capacity} on each device; at {plan.phase}, {plan.binds} is the largest"
    ]
    nearest = nearest_that_fits(alternatives)
    if nearest is None:
        return [*lines, "nothing tried here fits: use more or larger devices, or a shorter max_length"]
    return [*lines, f"nearest that fits: {', '.join(nearest.changes)}"]


def _alternative(alternative: Alternative) -> str:
    plan = alternative.plan
    word = {True: "fits", False: "does not fit", None: "needs"}[plan.fits]
    return f"  {word:<13} {gib(plan.total_bytes)}  {', '.join(alternative.changes)} ({plan.binds})"
