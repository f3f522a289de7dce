"""train_batch_size = micro batch x accumulation x world size: solved exactly or refused."""

from __future__ import annotations

from dataclasses import dataclass

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import BatchPlan

TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_LARGEST_CHOSEN_MICRO = 8


@dataclass(frozen=True)
class BatchSolution:
    """The sizes, and for each one that was not given the reason for its value."""

    batch: BatchPlan
    reasons: dict[str, str]


def solve_batch_sizes(
    *,
    train_batch_size: int | None,
    train_micro_batch_size_per_gpu: int | None,
    gradient_accumulation_steps: int | None,
    world_size: int,
) -> BatchSolution:
    """The three sizes from train_batch_size alone or from any two, for ``world_size`` ranks.

    All sizes are > 0. Raises ConfigError, with the nearest sizes that work,
    where nothing divides exactly or too few are given. Never rounds.
    """
    train, micro, steps = train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps
    if train is not None and micro is not None and steps is not None:
        _check_three(train, micro, steps, world_size)
        return _solution(train, micro, steps, world_size, {})
    if train is not None and micro is not None:
        found = _divide(train, MICRO, micro, world_size, ACCUMULATION)
        why = f"train_batch_size {train} / (micro batch {micro} x world_size {world_size})"
        return _solution(train, micro, found, world_size, {ACCUMULATION: why})
    if train is not None and steps is not None:
        found = _divide(train, ACCUMULATION, steps, world_size, MICRO)
        why = f"train_batch_size {train} / (accumulation {steps} x world_size {world_size})"
        return _solution(train, found, steps, world_size, {MICRO: why})
    if micro is not None and steps is not None:
        why = f"micro batch {micro} x accumulation {steps} x world_size {world_size}"
        return _solution(micro * steps * world_size, micro, steps, world_size, {TRAIN: why})
    if train is not None:
        return _choose_micro(train, world_size)
    raise _too_few(micro, steps)


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The multiples of ``unit`` next to ``value``, below and above; 0 is not one."""
    below = value // unit * unit
    return [below, below + unit] if below > 0 else [unit]


def _solution(train: int, micro: int, steps: int, world_size: int, reasons: dict[str, str]) -> BatchSolution:
    batch = BatchPlan(
        train_batch_size=train,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
        world_size=world_size,
    )
    return BatchSolution(batch, reasons)


def _divide(train: int, given: str, size: int, world_size: int, wanted: str) -> int:
    unit = size * world_size
    if train % unit == 0:
        return train // unit
    near = " or ".join(f"{n} ({wanted} {n // unit})" for n in nearest_multiples(train, unit))
    raise ConfigError(
        f"{TRAIN} {train} is not a multiple of {given} {size} x world_size {world_size} (= {unit})",
        hint=f"use {TRAIN} {near}, or leave {TRAIN} out and set {wanted}",
    )


def _check_three(train: int, micro: int, steps: int, world_size: int) -> None:
    product = micro * steps * world_size
    if product == train:
        return
    fits = f", {ACCUMULATION} {train // (micro * world_size)}" if train % (micro * world_size) == 0 else ""
    raise ConfigError(
        f"{TRAIN} {train} is not {MICRO} {micro} x {ACCUMULATION} {steps} x world_size {world_size}"
        f" (= {product})",
        hint=f"use {TRAIN} {product}{fits}, or leave one of the three out",
    )


def _choose_micro(train: int, world_size: int) -> BatchSolution:
    if train % world_size:
        near = " or ".join(map(str, nearest_multiples(train, world_size)))
        raise ConfigError(
            f"{TRAIN} {train} is not a multiple of world_size {world_size}",
            hint=f"use {TRAIN} {near}",
        )
    per_rank = train // world_size
    micro = _LARGEST_CHOSEN_MICRO
    while per_rank % micro:
        micro //= 2
    steps = per_rank // micro
    return _solution(
        train,
        micro,
        steps,
        world_size,
        {
            MICRO: f"largest power of two up to {_LARGEST_CHOSEN_MICRO} that divides"
            f" {train} / {world_size} ranks",
            ACCUMULATION: f"train_batch_size {train} / (micro batch {micro} x world_size {world_size})",
        },
    )


def _too_few(micro: int | None, steps: int | None) -> ConfigError:
    given = MICRO if micro is not None else ACCUMULATION if steps is not None else None
    other = ACCUMULATION if given == MICRO else MICRO
    if given is None:
        return ConfigError(
            f"no batch size is given: {TRAIN}, {MICRO} and {ACCUMULATION} are all missing",
            hint=f"set {TRAIN}, or two of the three",
        )
    return ConfigError(f"{given} alone does not say the batch size", hint=f"set {TRAIN} or {other} too")
