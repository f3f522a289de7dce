"""The ``scheduler`` block of DeepSpeed's JSON, for scripts of one's own: our worker needs none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import SchedulerPlan
from dslaunch.core.training_length import total_steps, warmup_steps

KINDS = ("linear", "cosine", "constant")
_DEFAULT_WARMUP_RATIO = 0.03
_LEAST_WARMUP = 2  # of DeepSpeed 0.19.8, whatever is written (runtime/lr_schedules.py)


def build_scheduler(flags: Mapping[str, Any], *, lr: float, train_batch_size: int) -> dict[str, Any]:
    """The block for gen-config's flags of these names (None where not given).

    Raises ConfigError where the length of the training is not said, or is less than one
    step or than the warm-up: ``total_num_steps`` is never 0.
    """
    kind = flags.get("scheduler")
    if kind is None:
        given = next(name for name, value in flags.items() if value is not None)
        raise ConfigError(
            f"--{given.replace('_', '-')} is for the scheduler block, and there is none",
            hint=f"add --scheduler {'|'.join(KINDS)}, or leave it out",
        )
    if kind == "wsd":
        raise ConfigError(
            "--scheduler wsd: DeepSpeed has no schedule with a stable part before the decay",
            hint="use a run file, whose worker has one, or linear, cosine or constant",
        )
    total = _total(flags, train_batch_size)
    warmup = max(_warmup(flags, total), _LEAST_WARMUP)
    if warmup >= total and kind != "constant":
        raise ConfigError(
            f"--scheduler {kind}: {total} step{'s in all are' if total > 1 else ' in all is'} not more than"
            f" {warmup} of warm-up"
            f" (DeepSpeed has at least {_LEAST_WARMUP})",
            hint="train longer, use a shorter warm-up, or --scheduler constant",
        )
    if kind == "cosine":
        ratios = {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0}
        return _block("WarmupCosineLR", {"total_num_steps": total, "warmup_num_steps": warmup, **ratios})
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": lr, "warmup_num_steps": warmup}
    if kind == "constant":
        return _block("WarmupLR", rates)
    return _block("WarmupDecayLR", {"total_num_steps": total, **rates})


def _block(name: str, params: dict[str, Any]) -> dict[str, Any]:
    # Left out, warmup_type is logarithmic: most of the rate is there after a few steps.
    return {"type": name, "params": {**params, "warmup_type": "linear"}}


def _total(flags: Mapping[str, Any], train_batch_size: int) -> int:
    samples, epochs, most = flags.get("num_samples"), flags.get("num_train_epochs"), flags.get("max_steps")
    if most is not None and (samples is not None or epochs is not None):
        raise ConfigError("--max-steps and --num-samples are both given", hint="keep one of the two")
    if most is None and samples is None:
        raise ConfigError(
            "--scheduler: how many steps the training has is not said",
            hint="add --num-samples N (and --num-train-epochs), or --max-steps N",
        )
    epochs = 1.0 if epochs is None else epochs
    if samples is None:
        return total_steps(1, train_batch_size, None, most)
    total = total_steps(samples, train_batch_size, epochs, None)
    if samples * epochs < train_batch_size:
        raise ConfigError(
            f"{samples} sample{'s' * (samples != 1)} x {epochs:g} epoch{'s' * (epochs != 1)} are fewer than"
            f" train_batch_size {train_batch_size}:"
            " no step would be whole",
            hint="use a smaller train_batch_size, or more epochs",
        )
    return total


def _warmup(flags: Mapping[str, Any], total: int) -> int:
    steps, ratio = flags.get("warmup_steps"), flags.get("warmup_ratio")
    if steps is not None and ratio is not None:
        raise ConfigError("--warmup-steps and --warmup-ratio are both given", hint="keep one of the two")
    if steps is None and ratio is None:
        ratio = _DEFAULT_WARMUP_RATIO
    return warmup_steps(SchedulerPlan(type="linear", warmup_steps=steps, warmup_ratio=ratio), total)
