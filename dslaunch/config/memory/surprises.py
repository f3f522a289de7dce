"""What people do not expect of a plan, each in one sentence, and only where it matters there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dslaunch.config.memory.alternatives import fitted_bucket
from dslaunch.config.memory.items import CONVERT, UPDATE
from dslaunch.config.memory.planner import MemoryPlan, plan_memory
from dslaunch.config.memory.setup import Setup, ZeroOptions
from dslaunch.config.memory.states import GATHERED
from dslaunch.config.memory.zeropp import frozen_in_8_bit

_MATTERS = 0.01  # of what a device holds at its peak
_LOGITS_MATTER = 0.25
_GATHERED_MATTERS = 0.05
_TABLES_OF_POSITIONS = frozenset({"gpt2"})  # of the families that are known; the others compute them


@dataclass(frozen=True)
class Surprise:
    """A sentence. ``setting``: (key, value) that changes it, ``saves``: bytes less at the peak with that."""

    text: str
    setting: tuple[str, int] | None = None
    saves: int = 0

    def to_json(self) -> dict[str, Any]:
        key, value = self.setting or (None, None)
        return {"text": self.text, "key": key, "value": value, "saves_bytes": self.saves}


def surprises(setup: Setup, plan: MemoryPlan) -> list[Surprise]:
    """Those of ``plan``, which is that of ``setup``; the most useful first."""
    found = [
        _uncounted(plan),
        _overcounted(plan),
        _frozen_in_8_bit(setup),
        _bucket(setup, plan),
        _kept_gathered(plan),
        _step(setup, plan),
        _logits(plan),
        _resume(plan),
        _context(setup),
    ]
    return [surprise for surprise in found if surprise]


def _uncounted(plan: MemoryPlan) -> Surprise | None:
    if not plan.uncounted:
        return None
    keys = ", ".join(f"zero_optimization.{key}" for key in plan.uncounted)
    return Surprise(
        f"what {keys} changes is not counted here, so whether it fits is not known: packed 4-bit weights"
        " would be quantised again, and what becomes of them was neither measured nor can be read"
    )


def _overcounted(plan: MemoryPlan) -> Surprise | None:
    if not plan.overcounted:
        return None
    return Surprise(
        f"what {', '.join(plan.overcounted)} saves is not counted: less will be needed than is said here"
    )


def _frozen_in_8_bit(setup: Setup) -> Surprise | None:
    if not (less := frozen_in_8_bit(setup)):
        return None
    return Surprise(
        "zero_quantized_nontrainable_weights: frozen weights are counted as they are read; where the script"
        f" quantises them (engine.optimizer.quantize_nontrainable_params(), fp16), they take"
        f" {less / 2**30:.2f} GiB less on each device"
    )


def _bucket(setup: Setup, plan: MemoryPlan) -> Surprise | None:
    """All of the bucket is allocated, however little is trained."""
    size, fitted = setup.zero.reduce_bucket_size, fitted_bucket(setup)
    saves = _saved(setup, plan, dataclasses.replace(setup.zero, reduce_bucket_size=fitted))
    buckets = [item for item in plan.items if "reduce bucket" in item.name]
    there = sum(item.size for item in buckets)
    if setup.zero_stage == 0 or fitted == size or there < _MATTERS * plan.peak_bytes:
        return None
    text = (
        f"DeepSpeed allocates all {size:,} elements of reduce_bucket_size "
        f"although only {setup.numel:,} parameters are trained"
    )
    if saves < _MATTERS * plan.peak_bytes:
        at_peak = any(plan.phase in item.when for item in buckets)
        missing = f"which are not there at the peak ({plan.phase})"
        why = "but another moment takes nearly as much" if at_peak else missing
        text += f": {there / 2**30:.2f} GiB, {why}"
    return Surprise(text, ("zero_optimization.reduce_bucket_size", fitted), saves)


def _kept_gathered(plan: MemoryPlan) -> Surprise | None:
    """No value is proposed: on a CPU a smaller distance did not lower the peak (docs/memory.md)."""
    there = [item.size for item in plan.items if item.name == GATHERED and plan.phase in item.when]
    if sum(there) < _GATHERED_MATTERS * plan.peak_bytes or not there:
        return None
    return Surprise(
        f"stage 3 shards weights, but {sum(there) / 2**30:.2f} GiB of them are whole on each device at the "
        "peak: what is used again within stage3_max_reuse_distance stays gathered"
    )


def _step(setup: Setup, plan: MemoryPlan) -> Surprise | None:
    if plan.phase not in (CONVERT, UPDATE):
        return None
    more = (plan.peak_bytes - plan.rest_bytes) / 2**30
    passing = [item.name for item in plan.items if plan.phase in item.when and item.size]
    return Surprise(
        f"the optimizer's step takes {more:.2f} GiB more than what rests ({', '.join(passing)}): adding up "
        "weights, gradients and optimizer states misses that"
    )


def _logits(plan: MemoryPlan) -> Surprise | None:
    there = sum(item.size for item in plan.items if "logits" in item.name and plan.phase in item.when)
    if there < _LOGITS_MATTER * plan.peak_bytes:
        return None
    return Surprise(
        f"logits take {there / 2**30:.2f} GiB at the peak, several bytes for each token and word of the "
        "vocabulary: they shrink with max_length and the micro-batch only"
    )


def _resume(plan: MemoryPlan) -> Surprise | None:
    if plan.host_phase != "resuming" or plan.host_fits is None:
        return None
    peak = plan.host_peak_bytes / 2**30
    return Surprise(
        f"a host needs most when a run is resumed, {peak:.2f} GiB: every rank reads its checkpoint at once"
    )


def _context(setup: Setup) -> Surprise | None:
    dims, longest = setup.model.dims, setup.max_length
    if dims.positions is None or longest <= dims.positions:
        return None
    table = dims.family in _TABLES_OF_POSITIONS
    what = "the first longer sample stops the run" if table else "it has learned nothing about those beyond"
    return Surprise(f"max_length {longest} is more than the {dims.positions} positions of the model: {what}")


def _saved(setup: Setup, plan: MemoryPlan, zero: ZeroOptions) -> int:
    return plan.peak_bytes - plan_memory(dataclasses.replace(setup, zero=zero)).peak_bytes
