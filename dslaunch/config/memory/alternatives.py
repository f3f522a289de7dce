"""What else could be done with the same model and devices: what fits first, then what costs least time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dslaunch.config.memory.planner import MemoryPlan, plan_memory
from dslaunch.config.memory.setup import Offload, Setup
from dslaunch.config.memory.typed import typed_difference

# Rough order of what slows a step down, for ranking only: nothing is computed with it.
_COST = {"stage 3": 2, "checkpointing": 3, "micro": 1, "optimizer": 8, "param": 12}
# The same for a reader.
COST_ORDER = "offloads cost most, then checkpointing, stage 3, a smaller micro-batch"


@dataclass(frozen=True)
class Alternative:
    """A changed setup and its plan. ``changes``: what is typed to get there."""

    setup: Setup
    plan: MemoryPlan
    changes: tuple[str, ...]
    cost: int

    def to_json(self) -> dict[str, Any]:
        setup, zero = self.setup, self.setup.zero
        return {
            "zero_stage": setup.zero_stage,
            "offload_optimizer": zero.offload_optimizer,
            "offload_param": zero.offload_param,
            "gradient_checkpointing": setup.gradient_checkpointing,
            "train_micro_batch_size_per_gpu": setup.micro_batch,
            "reduce_bucket_size": zero.reduce_bucket_size,
            "peak_bytes": self.plan.peak_bytes,
            "total_bytes": self.plan.total_bytes,
            "host_peak_bytes": self.plan.host_peak_bytes,
            "fits": self.plan.fits,
            "binds": self.binds(),
            "changes": list(self.changes),
        }

    def binds(self) -> dict[str, str]:
        """The item that takes most, when and where: on the host if only that is too small."""
        plan = self.plan
        if plan.host_fits is False and plan.device_fits is not False:
            return {"where": "host", "when": plan.host_phase, "item": plan.host_binds}
        return {"where": "device", "when": plan.phase, "item": plan.binds}


def rank_alternatives(
    setup: Setup, capacity_gib: float | None, *, host_gib: float | None = None
) -> list[Alternative]:
    """Every sensible change of stage, offload, checkpointing, micro-batch and bucket, best first.

    ``capacity_gib`` is of one device, ``host_gib`` of one host: what does not fit either does not fit.
    """
    found: dict[Setup, Alternative] = {}
    for changed in _changed(setup):
        changes = typed_difference(setup, changed)
        cost = cost_of(changed) + _COST["micro"] * (changed.micro_batch != setup.micro_batch)
        plan = plan_memory(changed, capacity_gib, host_gib=host_gib)
        found[changed] = Alternative(changed, plan, changes, cost)
    worth = [a for a in found.values() if a.changes and _bucket_matters(a, setup, found)]
    return sorted(worth, key=_place)


def _bucket_matters(alternative: Alternative, setup: Setup, found: dict[Setup, Alternative]) -> bool:
    """Whether a smaller bucket saves at least 1 % against the same with the old one."""
    zero = dataclasses.replace(alternative.setup.zero, reduce_bucket_size=setup.zero.reduce_bucket_size)
    same = found[dataclasses.replace(alternative.setup, zero=zero)]
    return same is alternative or alternative.plan.total_bytes < 0.99 * same.plan.total_bytes


def nearest_that_fits(alternatives: list[Alternative]) -> Alternative | None:
    """The one with the fewest changes, of those the fastest; a tight one only if there is no other."""
    fitting = [alternative for alternative in alternatives if alternative.plan.fits]
    order = lambda a: (a.plan.tight, len(a.changes), a.cost, a.plan.needed_bytes)  # noqa: E731
    return min(fitting, key=order, default=None)


def fitted_bucket(setup: Setup) -> int:
    """A reduce_bucket_size that is no larger than all that is trained: more is never filled."""
    return min(setup.zero.reduce_bucket_size, max(setup.numel, 1))


def _place(alternative: Alternative) -> tuple[bool, bool, float, int, int]:
    """What fits by the time it costs; of what does not, first what lacks least."""
    plan = alternative.plan
    worse = alternative.cost if plan.fits is not False else plan.fullness
    return plan.fits is False, plan.tight, worse, plan.needed_bytes, len(alternative.changes)


def _changed(setup: Setup) -> Iterator[Setup]:
    low = setup.precision != "fp32"
    # DeepSpeed's 16-bit stage 0 computes wrong (docs/upstream.md); one rank gains nothing by sharding.
    stages = [stage for stage in (0, 1, 2, 3) if stage == setup.zero_stage or stage > 0 or not low]
    if setup.engine == "torch":
        stages = [0]
    recompute = [setup.gradient_checkpointing] if setup.gradient_checkpointing else [False, True]
    micro = sorted({setup.micro_batch, 1}, reverse=True)
    buckets = sorted({setup.zero.reduce_bucket_size, fitted_bucket(setup)}, reverse=True)
    for stage, again, size, bucket in itertools.product(stages, recompute, micro, buckets):
        if stage == 0 and bucket != setup.zero.reduce_bucket_size:
            continue
        for optimizer, param in _offloads(setup, stage):
            zero = dataclasses.replace(
                setup.zero, offload_optimizer=optimizer, offload_param=param, reduce_bucket_size=bucket
            )
            # The global batch stays what it is.
            accumulation = setup.accumulation * (setup.micro_batch // size)
            yield dataclasses.replace(
                setup,
                zero_stage=stage,
                zero=zero,
                gradient_checkpointing=again,
                micro_batch=size,
                mask=setup.mask and (size == setup.micro_batch or size > 1 or setup.mask_alone),
                accumulation=accumulation,
                grad_accum_fp32=setup.precision == "bf16" and stage > 0 and accumulation > 1,
            )


def _offloads(setup: Setup, stage: int) -> Iterator[tuple[Offload | None, Offload | None]]:
    yield None, None
    if stage == 0 or setup.engine == "torch" or setup.device_type == "cpu":
        return
    yield "cpu", None
    if stage == 3 and setup.method != "qlora":
        yield "cpu", "cpu"


def cost_of(setup: Setup) -> int:
    """How much a step of it is slowed down, by the rough rule."""
    zero = setup.zero
    cost = _COST["stage 3"] * (setup.zero_stage == 3) + _COST["checkpointing"] * setup.gradient_checkpointing
    return (
        cost + _COST["optimizer"] * bool(zero.offload_optimizer) + _COST["param"] * bool(zero.offload_param)
    )
