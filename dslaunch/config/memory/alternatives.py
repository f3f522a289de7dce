"""What else could be done with the same model and devices: what fits first, then what costs least time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dslaunch.config.memory.planner import MemoryPlan, plan_memory
from dslaunch.config.memory.setup import Offload, Setup

# Rough order of what slows a step down, for ranking only: nothing is computed with it.
_COST = {"stage 3": 2, "checkpointing": 3, "micro": 1, "optimizer": 8, "param": 12}


@dataclass(frozen=True)
class Alternative:
    """A changed setup and its plan. ``changes`` are the flags that lead there."""

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
        changes, cost = _difference(setup, changed)
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
    """The one with the fewest changes; of those the fastest."""
    fitting = [alternative for alternative in alternatives if alternative.plan.fits]
    return min(fitting, key=lambda a: (len(a.changes), a.cost, a.plan.total_bytes), default=None)


def fitted_bucket(setup: Setup) -> int:
    """A reduce_bucket_size that is no larger than all that is trained: more is never filled."""
    return min(setup.zero.reduce_bucket_size, max(setup.numel, 1))


def _place(alternative: Alternative) -> tuple[bool, int, int, int]:
    plan = alternative.plan
    cost = alternative.cost if plan.fits is not False else 0
    return plan.fits is False, cost, plan.total_bytes, len(alternative.changes)


def _changed(setup: Setup) -> Iterator[Setup]:
    low = setup.precision != "fp32"
    # DeepSpeed's 16-bit stage 0 computes wrong (docs/upstream.md); one rank gains nothing by sharding.
    stages = [stage for stage in (0, 1, 2, 3) if stage == setup.zero_stage or stage > 0 or not low]
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
                accumulation=accumulation,
                grad_accum_fp32=setup.precision == "bf16" and stage > 0 and accumulation > 1,
            )


def _offloads(setup: Setup, stage: int) -> Iterator[tuple[Offload | None, Offload | None]]:
    yield None, None
    if stage == 0 or setup.device_type == "cpu":
        return
    yield "cpu", None
    if stage == 3 and setup.method != "qlora":
        yield "cpu", "cpu"


def _difference(old: Setup, new: Setup) -> tuple[tuple[str, ...], int]:
    """The flags that lead from ``old`` to ``new``, and how much slower they make it."""
    changes = []
    if new.zero_stage != old.zero_stage:
        changes.append(f"--zero-stage {new.zero_stage}")
    if new.gradient_checkpointing and not old.gradient_checkpointing:
        changes.append("--gradient-checkpointing")
    if new.micro_batch != old.micro_batch:
        changes.append(f"--train-micro-batch-size-per-gpu {new.micro_batch}")
    if new.zero.reduce_bucket_size != old.zero.reduce_bucket_size:
        changes.append(f"--set zero_optimization.reduce_bucket_size={new.zero.reduce_bucket_size}")
    for part in ("optimizer", "param"):
        before, after = getattr(old.zero, f"offload_{part}"), getattr(new.zero, f"offload_{part}")
        if after and not before:
            changes.append(f"--offload-{part} {after}")
        elif before and not after:
            changes.append(f"without --offload-{part}")
    cost = _COST["stage 3"] * (new.zero_stage == 3) + _COST["checkpointing"] * new.gradient_checkpointing
    cost += _COST["micro"] * (new.micro_batch != old.micro_batch)
    cost += _COST["optimizer"] * bool(new.zero.offload_optimizer) + _COST["param"] * bool(
        new.zero.offload_param
    )
    return tuple(changes), cost
