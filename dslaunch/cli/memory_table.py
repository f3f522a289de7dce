"""A memory plan as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dslaunch.cli.plan_memory import Memory
    from dslaunch.config.memory.alternatives import Alternative
    from dslaunch.config.memory.items import Item
    from dslaunch.config.memory.planner import MemoryPlan

_ROOMIER = 0.95  # of what is needed now


def table(memory: Memory, shown: int) -> list[str]:
    """What a device, a host and a checkpoint take, what surprises, what else could be done."""
    setup, plan, model = memory.setup, memory.plan, memory.setup.model
    trained = f"{setup.numel:,} of {model.numel + (setup.numel if setup.method != 'full' else 0):,}"
    shards = f"ZeRO stage {setup.zero_stage}" if setup.engine == "deepspeed" else "torch without DeepSpeed"
    lines = [f"memory: {trained} parameters trained ({model.source}), {shards}"]
    lines += ["each device:", *_items(plan.items)]
    lines += [
        f"  {'rest':<44} {gib(plan.rest_bytes)}",
        f"  {'in the step':<44} {gib(plan.step_bytes)}",
        f"  {'peak':<44} {gib(plan.peak_bytes)}  {plan.phase}",
    ]
    if plan.outside:
        least, most = (gib(size).strip() for size in plan.total_range)
        lines += ["beside the allocator (estimates):", *_items(plan.outside)]
        lines += [f"  {'peak with these':<44} {gib(plan.total_bytes)}  {least} to {most} as they usually are"]
    lines += ["each host:", *_items(plan.host)]
    lines += [f"  {'peak':<44} {gib(plan.host_peak_bytes)}  {plan.host_phase}"]
    lines += [
        f"each checkpoint: {gib(plan.checkpoint_bytes).strip()}",
        *_surprises(memory),
    ]
    return [*lines, *_alternatives(memory, shown)]


def gib(size: int) -> str:
    """Bytes as GiB, or MiB below a tenth of one, right-aligned."""
    text = f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"
    return f"{text:>12}"


def _items(items: Sequence[Item]) -> list[str]:
    return [f"  {item.name:<44} {gib(item.size)}  {', '.join(item.when)}" for item in items]


def _surprises(memory: Memory) -> Iterator[str]:
    from dslaunch.config.memory.surprises import surprises

    for surprise in surprises(memory.setup, memory.plan):
        yield f"note: {surprise.text}"
        if surprise.setting:
            key, value = surprise.setting
            saves = f"takes {gib(surprise.saves).strip()} off the peak" if surprise.saves else "is enough"
            yield f"      {key}: {value} {saves}"


def verdict(memory: Memory) -> list[str]:
    """Whether device and host hold it; where not, the nearest change that does."""
    plan = memory.plan
    lines = [_device_verdict(plan)] if not plan.on_cpu else []
    lines.append(_host_verdict(plan))
    if plan.tight:
        lines += _what_is_roomier(memory)
    return lines if plan.fits is not False else lines + _what_would_fit(memory)


def _device_verdict(plan: MemoryPlan) -> str:
    total = gib(plan.total_bytes).strip()
    if plan.capacity_bytes is None:
        return f"needs {total} on each device; its size is not known"
    capacity = gib(plan.capacity_bytes).strip()
    if plan.device_fits is None:
        changing, saved = ", ".join(plan.uncounted), ", ".join(plan.overcounted)
        if changing:
            return (
                f"needs {total} of {capacity} on each device, without what {changing} changes, which is not"
                " known: so neither is whether it fits"
            )
        return f"needs up to {total} of {capacity} on each device; what {saved} saves is not counted"
    if plan.device_fits:
        return (
            f"fits: {total} of {capacity} on each device{_how_tight(plan.total_bytes, plan.capacity_bytes)}"
        )
    return f"does not fit: {total} of {capacity} on each device; at {plan.phase}, {plan.binds} is the largest"


def _host_verdict(plan: MemoryPlan) -> str:
    total = gib(plan.host_peak_bytes).strip()
    if plan.host_capacity_bytes is None:
        return f"needs {total} of each host's RAM, which is not known: --host-memory-gib says"
    capacity = gib(plan.host_capacity_bytes).strip()
    if plan.host_fits:
        close = _how_tight(plan.host_peak_bytes, plan.host_capacity_bytes)
        return f"fits: {total} of {capacity} RAM on each host{close}"
    if plan.host_fits is None:
        return f"needs up to {total} of {capacity} RAM on each host, without what is saved as above"
    if plan.trains:
        return f"trains, but cannot be resumed there: {total} of {capacity} RAM on each host when resuming"
    return (
        f"does not fit: {total} of {capacity} RAM on each host; "
        f"when {plan.host_phase}, {plan.host_binds} is the largest"
    )


def _how_tight(needed: int, capacity: int) -> str:
    from dslaunch.config.memory.planner import is_tight

    return f", tight: {100 * needed / capacity:.1f} %" if is_tight(needed, capacity) else ""


def _what_is_roomier(memory: Memory) -> list[str]:
    """What to do about a plan that its estimates alone may break."""
    from dslaunch.config.memory.alternatives import nearest_that_fits

    nearest = nearest_that_fits(memory.alternatives)
    advice = "try some steps with the longest samples first"
    if nearest is not None and not nearest.plan.tight:
        advice += f"; with more room: {_change(nearest)}"
    return [f"estimates may be wrong by what is left: {advice}"]


def _change(alternative: Alternative) -> str:
    """What is typed, and what it takes then."""
    plan = alternative.plan
    device, host = (gib(size).strip() for size in (plan.total_bytes, plan.host_peak_bytes))
    where = "" if plan.on_cpu else f"{device} on each device, "
    return f"{' '.join(alternative.changes)} ({where}{host} of each host's RAM)"


def _what_would_fit(memory: Memory) -> list[str]:
    from dslaunch.config.memory.alternatives import nearest_that_fits

    nearest = nearest_that_fits(memory.alternatives)
    if nearest is not None:
        return [f"nearest that fits: {_change(nearest)}"]
    if not memory.larger:
        return ["nothing tried here fits: neither shorter samples nor adapters nor 64 hosts like these"]
    found = [f"  {' '.join(change.changes)} ({change.price})" for change in memory.larger]
    return ["no stage, offload, checkpointing or micro-batch makes it fit; these would:", *found]


def _alternatives(memory: Memory, shown: int) -> list[str]:
    """What is better: where the plan fits, only what is faster or leaves more room, and fits as well."""
    from dslaunch.config.memory.alternatives import COST_ORDER, cost_of

    found, head = memory.alternatives, "alternatives, what fits first (tight ones last):"
    if memory.plan.fits:
        cost, needed = cost_of(memory.setup), memory.plan.needed_bytes
        found = [
            other
            for other in found
            if other.plan.fits and (other.cost < cost or other.plan.needed_bytes < _ROOMIER * needed)
        ]
        head = "this fits; cheaper or roomier:"
    if not found:
        return []
    order = "ordered by what slows a step down least, then by size"
    if all(other.plan.fits is False for other in found[:shown]):
        head, order = "alternatives, none of which fits:", "ordered by what is lacking, least first"
    else:
        order += f"; a rough rule: {COST_ORDER}"
    return [head, *map(_alternative, found[:shown]), order]


def _alternative(alternative: Alternative) -> str:
    plan = alternative.plan
    word = {True: "fits", False: "does not fit", None: "needs"}[plan.fits]
    binds = alternative.binds()
    on_host = binds["where"] == "host"
    needed = plan.host_peak_bytes if on_host else plan.needed_bytes
    where = f"{binds['item']}, in each host's RAM" if on_host else binds["item"]
    word = f"{word}, tight" if plan.tight else word
    return f"  {word:<13} {gib(needed)}  {' '.join(alternative.changes)} ({where})"
