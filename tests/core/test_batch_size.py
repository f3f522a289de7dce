"""The batch triangle: solved exactly, or refused with sizes that work."""

from __future__ import annotations

import itertools
import re

import pytest

from dslaunch.core.batch_size import (
    ACCUMULATION,
    MICRO,
    TRAIN,
    WORLD,
    nearest_multiples,
    nearest_sizes,
    solve_batch_sizes,
)
from dslaunch.core.errors import ConfigError


def solve(
    train: int | None = None, micro: int | None = None, steps: int | None = None, world: int = 1
) -> tuple[int, int, int]:
    batch = solve_batch_sizes(
        train_batch_size=train,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
        world_size=world,
    ).batch
    return batch.train_batch_size, batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps


def test_any_two_sizes_give_the_third() -> None:
    for micro, steps, world in itertools.product((1, 2, 3, 8), (1, 5, 16), (1, 2, 7)):
        train = micro * steps * world
        expected = (train, micro, steps)
        assert solve(train, micro, None, world) == expected
        assert solve(train, None, steps, world) == expected
        assert solve(None, micro, steps, world) == expected
        assert solve(train, micro, steps, world) == expected


@pytest.mark.parametrize(
    ("train", "world", "micro", "steps"),
    [(256, 8, 8, 4), (12, 1, 4, 3), (7, 7, 1, 1), (6, 1, 2, 3), (8, 1, 8, 1), (100, 4, 1, 25), (64, 2, 8, 4)],
)
def test_the_total_alone_takes_the_largest_power_of_two_up_to_eight(
    train: int, world: int, micro: int, steps: int
) -> None:
    assert solve(train, world=world) == (train, micro, steps)


def test_the_choice_carries_its_reason() -> None:
    solution = solve_batch_sizes(
        train_batch_size=24,
        train_micro_batch_size_per_gpu=None,
        gradient_accumulation_steps=None,
        world_size=2,
    )
    assert "largest power of two up to 8" in solution.reasons["train_micro_batch_size_per_gpu"]
    assert solution.batch.train_micro_batch_size_per_gpu == 4


def test_what_does_not_divide_names_both_neighbours() -> None:
    with pytest.raises(ConfigError) as caught:
        solve(256, micro=2, world=7)
    assert caught.value.message == (
        "train_batch_size 256 is not a multiple of train_micro_batch_size_per_gpu 2 x world_size 7 (= 14)"
    )
    assert caught.value.hint is not None
    assert "252 (gradient_accumulation_steps 18) or 266 (gradient_accumulation_steps 19)" in caught.value.hint


def test_the_hint_names_each_size_that_could_change() -> None:
    with pytest.raises(ConfigError) as caught:
        solve(100, micro=8, world=4)
    assert caught.value.hint == (
        "use train_batch_size 96 (gradient_accumulation_steps 3) or 128 (gradient_accumulation_steps 4),"
        " or train_micro_batch_size_per_gpu 5 (gradient_accumulation_steps 5)"
        " or 25 (gradient_accumulation_steps 1)"
    )
    with pytest.raises(ConfigError) as caught:
        solve(256, steps=4, world=7)
    assert (caught.value.hint or "").endswith(
        "or world_size 4 (train_micro_batch_size_per_gpu 16) or 8 (train_micro_batch_size_per_gpu 8)"
    )


@pytest.mark.parametrize("given", [MICRO, ACCUMULATION])
def test_every_batch_that_is_named_is_exact_and_changes_one_size(given: str) -> None:
    """And none lies nearer: of every size that may change, the next values that divide are named."""
    wanted = ACCUMULATION if given == MICRO else MICRO
    refused = 0
    for train, size, world in itertools.product(range(1, 40), (1, 2, 3, 8), (1, 2, 5)):
        if train % (size * world) == 0:
            continue
        refused += 1
        sizes = {TRAIN: train, given: size, WORLD: world}
        found = nearest_sizes(sizes, wanted)
        assert any(name == TRAIN for name, _ in found)
        for name, whole in found:
            assert whole[TRAIN] == whole[MICRO] * whole[ACCUMULATION] * whole[WORLD]
            assert [key for key in sizes if whole[key] != sizes[key]] == [name]
        for name in sizes:
            exact = [n for n in range(1, 81) if divides({**sizes, name: n})]
            named = [whole[name] for changed, whole in found if changed == name]
            below = [n for n in exact if n < sizes[name]][-1:]
            above = [n for n in exact if n > sizes[name]][:1]
            assert named == below + above
    assert refused > 100


def divides(sizes: dict[str, int]) -> bool:
    factors = [size for name, size in sizes.items() if name != TRAIN]
    return sizes[TRAIN] % (factors[0] * factors[1]) == 0


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world", "part"),
    [
        (100, None, 8, 2, "not a multiple of gradient_accumulation_steps 8 x world_size 2 (= 16)"),
        (9, None, None, 2, "train_batch_size 9 is not a multiple of world_size 2"),
        (1, None, None, 2, "train_batch_size 1 is not a multiple of world_size 2"),
        (64, 4, 4, 2, "x world_size 2 (= 32)"),
        (None, None, None, 2, "no batch size is given"),
    ],
)
def test_refusals(train: int | None, micro: int | None, steps: int | None, world: int, part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)) as caught:
        solve(train, micro, steps, world)
    assert caught.value.hint


def test_three_inconsistent_sizes_offer_each_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        solve(64, 4, 4, 2)
    assert caught.value.hint == (
        "use train_batch_size 32, or train_micro_batch_size_per_gpu 8, or gradient_accumulation_steps 8,"
        " or world_size 4, or leave one of the three out"
    )


@pytest.mark.parametrize(("value", "unit", "near"), [(10, 4, [8, 12]), (3, 4, [4]), (8, 4, [8, 12])])
def test_nearest_multiples(value: int, unit: int, near: list[int]) -> None:
    assert nearest_multiples(value, unit) == near


@pytest.mark.parametrize(
    ("micro", "steps", "message", "hint"),
    [
        (4, None, "train_micro_batch_size_per_gpu alone does not say the batch size",
         "set train_batch_size or gradient_accumulation_steps too"),
        (None, 4, "gradient_accumulation_steps alone does not say the batch size",
         "set train_batch_size or train_micro_batch_size_per_gpu too"),
    ],
)  # fmt: skip
def test_one_factor_alone_asks_for_another(
    micro: int | None, steps: int | None, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        solve(None, micro=micro, steps=steps)
    assert (caught.value.message, caught.value.hint) == (message, hint)
