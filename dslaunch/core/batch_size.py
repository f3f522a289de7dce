"""train_batch_size = micro batch x accumulation x world size: solved exactly or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt, prod

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import BatchPlan

TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
WORLD = "world_size"
_LARGEST_CHOSEN_MICRO = 8
_LARGEST_DIVIDED = 10**10  # no real batch; looking for the divisors of a number far larger takes for ever


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


def nearest_sizes(sizes: Mapping[str, int], wanted: str | None) -> list[tuple[str, dict[str, int]]]:
    """What changes, and all four sizes with it, for sizes of which no exact batch can be made.

    ``sizes`` by name, without ``wanted``: the size that follows from the others (None:
    all are given). One size changes at a time, to the nearest values that divide.
    """
    found = []
    for name, given in sizes.items():
        others = {other: size for other, size in sizes.items() if other != name}
        for value in _nearest_values(name, given, others, wanted):
            whole = {**others, name: value}
            if wanted is not None:
                factors = prod(size for other, size in whole.items() if other != TRAIN)
                whole[wanted] = whole[TRAIN] // factors
            found.append((name, whole))
    return found


def _nearest_values(name: str, given: int, others: Mapping[str, int], wanted: str | None) -> list[int]:
    factors = prod(size for other, size in others.items() if other != TRAIN)
    if name == TRAIN:
        return [factors] if wanted is None else nearest_multiples(given, factors)
    if others[TRAIN] % factors:
        return []
    quotient = others[TRAIN] // factors
    return [quotient] if wanted is None else _nearest_divisors(quotient, given)


def _nearest_divisors(value: int, near: int) -> list[int]:
    """The divisors of ``value`` next to ``near``, below and above."""
    if value > _LARGEST_DIVIDED:
        return []
    low = {n for n in range(1, isqrt(value) + 1) if value % n == 0}
    divisors = sorted(low | {value // n for n in low})
    below = [n for n in divisors if n < near]
    above = [n for n in divisors if n > near]
    return below[-1:] + above[:1]


def ways_out(sizes: Mapping[str, int], wanted: str | None) -> str:
    """:func:`nearest_sizes` in words, for a hint.

    ``train_batch_size 96 (gradient_accumulation_steps 3) or 128 (...), or world_size ...``
    """
    by_name: dict[str, list[str]] = {}
    for name, whole in nearest_sizes(sizes, wanted):
        follows = f" ({wanted} {whole[wanted]})" if wanted is not None else ""
        by_name.setdefault(name, []).append(f"{whole[name]}{follows}")
    return ", or ".join(f"{name} {' or '.join(values)}" for name, values in by_name.items())


def _divide(train: int, given: str, size: int, world_size: int, wanted: str) -> int:
    unit = size * world_size
    if train % unit == 0:
        return train // unit
    raise ConfigError(
        f"{TRAIN} {train} is not a multiple of {given} {size} x world_size {world_size} (= {unit})",
        hint=f"use {ways_out({TRAIN: train, given: size, WORLD: world_size}, wanted)}",
    )


def _check_three(train: int, micro: int, steps: int, world_size: int) -> None:
    product = micro * steps * world_size
    if product == train:
        return
    sizes = {TRAIN: train, MICRO: micro, ACCUMULATION: steps, WORLD: world_size}
    raise ConfigError(
        f"{TRAIN} {train} is not {MICRO} {micro} x {ACCUMULATION} {steps} x world_size {world_size}"
        f" (= {product})",
        hint=f"use {ways_out(sizes, None)}, or leave one of the three out",
    )


def _choose_micro(train: int, world_size: int) -> BatchSolution:
    if train % world_size:
        near = nearest_multiples(train, world_size)
        ranks = _nearest_divisors(train, world_size)
        raise ConfigError(
            f"{TRAIN} {train} is not a multiple of world_size {world_size}",
            hint=f"use {TRAIN} {_or(near)}, or {WORLD} {_or(ranks)}",
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


def _or(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _too_few(micro: int | None, steps: int | None) -> ConfigError:
    given = MICRO if micro is not None else ACCUMULATION if steps is not None else None
    other = ACCUMULATION if given == MICRO else MICRO
    if given is None:
        return ConfigError(
            f"no batch size is given: {TRAIN}, {MICRO} and {ACCUMULATION} are all missing",
            hint=f"set {TRAIN}, or two of the three",
        )
    return ConfigError(f"{given} alone does not say the batch size", hint=f"set {TRAIN} or {other} too")
