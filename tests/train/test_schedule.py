"""The learning rate: its values, its first and last step, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import SchedulerPlan
from dslaunch.train.schedule import build_scheduler_factory, lr_lambda


def values(total: int, **plan: Any) -> list[float]:
    factor = lr_lambda(SchedulerPlan(**plan), total)
    return [factor(step) for step in range(total)]


def test_constant() -> None:
    assert values(4, type="constant") == [1, 1, 1, 1]


def test_warmup_starts_at_a_share_and_never_at_zero() -> None:
    assert values(6, type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_falls_by_equal_parts_and_wastes_no_step() -> None:
    assert values(5, type="linear") == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert values(6, type="linear", warmup_steps=2) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])


def test_linear_towards_a_floor() -> None:
    factor = lr_lambda(SchedulerPlan(type="linear", min_lr_ratio=0.5), 4)
    assert [factor(step) for step in range(7)] == pytest.approx([1, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5])


def test_cosine_at_its_quarters() -> None:
    # (1 + cos(pi p)) / 2 at p = 0, 1/4, 1/2, 3/4
    root = math.sqrt(0.5)
    assert values(4, type="cosine") == pytest.approx([1, (1 + root) / 2, 0.5, (1 - root) / 2])
    low = [0.2 + 0.8 * v for v in values(4, type="cosine")]
    assert values(4, type="cosine", min_lr_ratio=0.2) == pytest.approx(low)


def test_wsd_is_stable_until_its_decay() -> None:
    # Warm-up 2, stable to step 4, then down by sixths of... a fall of 3 steps: 3/4, 2/4, 1/4.
    assert values(8, type="wsd", warmup_steps=2, decay_steps=3) == pytest.approx(
        [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    )
    assert values(8, type="wsd", decay_ratio=0.25)[5:] == pytest.approx([1, 2 / 3, 1 / 3])
    root = math.sqrt(0.5)
    assert values(5, type="wsd", decay_steps=3, decay_type="cosine")[1:] == pytest.approx(
        [1, (1 + root) / 2, 0.5, (1 - root) / 2]
    )
    assert values(5, type="wsd", decay_steps=3, decay_type="1-sqrt")[1:] == pytest.approx(
        [1, 0.5, 1 - root, 1 - math.sqrt(0.75)]
    )
    low = [0.2 + 0.8 * v for v in values(5, type="wsd", decay_steps=3)]
    assert values(5, type="wsd", decay_steps=3, min_lr_ratio=0.2) == pytest.approx(low)


def test_wsd_without_a_stable_part_is_linear_or_cosine() -> None:
    for warmup in (0, 1, 3):
        for kind in ("linear", "cosine"):
            whole = values(9, type="wsd", warmup_steps=warmup, decay_steps=9 - warmup, decay_type=kind)
            assert whole == values(9, type=kind, warmup_steps=warmup)


def test_wsd_agrees_with_transformers() -> None:
    """Second opinion: get_wsd_schedule, which counts the last stable step as the first of its decay."""
    from transformers import get_wsd_schedule

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_wsd_schedule(optimizer, 0, 4, num_stable_steps=3, decay_type="linear")
    theirs = []
    for _ in range(7):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert values(7, type="wsd", decay_steps=3)[:7] == pytest.approx(theirs)


def test_agrees_with_transformers_where_there_is_no_warmup() -> None:
    """Second opinion: get_linear_ and get_cosine_schedule_with_warmup."""
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    for kind, theirs in (
        ("linear", get_linear_schedule_with_warmup),
        ("cosine", get_cosine_schedule_with_warmup),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = theirs(optimizer, 0, 7)
        expected = []
        for _ in range(7):
            expected.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        assert values(7, type=kind) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_a_run_of_as_many_steps_as_the_warmup(kind: str, warmup: int) -> None:
    rates = values(5, type=kind, warmup_steps=warmup)
    assert all(0 < rate <= 1 for rate in rates)
    assert max(rates) == 1


def test_one_step() -> None:
    for kind in ("constant", "linear", "cosine", "wsd"):
        assert values(1, type=kind) == [1]


def test_ratio_is_rounded_up() -> None:
    assert values(10, type="constant", warmup_ratio=0.25)[:3] == pytest.approx([1 / 3, 2 / 3, 1])


def test_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps 6 is more than the 5 steps"):
        lr_lambda(SchedulerPlan(type="linear", warmup_steps=6), 5)
    with pytest.raises(ConfigError, match="2 steps of warm-up and 4 of decay are more than the 5 steps"):
        lr_lambda(SchedulerPlan(type="wsd", warmup_steps=2, decay_steps=4), 5)
    with pytest.raises(ConfigError, match="0 steps"):
        lr_lambda(SchedulerPlan(type="linear"), 0)


def test_each_group_keeps_its_own_base_and_a_resumed_schedule_goes_on() -> None:
    def optimizer() -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.01)]
        return torch.optim.SGD(groups)

    build = build_scheduler_factory(SchedulerPlan(type="linear", warmup_steps=2), 6)
    first = optimizer()
    schedule = build(first)
    seen = []
    for _ in range(6):
        seen.append([group["lr"] for group in first.param_groups])
        first.step()
        schedule.step()
        if len(seen) == 3:
            saved, saved_optimizer = schedule.state_dict(), first.state_dict()
    factors = [0.5, 1, 0.8, 0.6, 0.4, 0.2]
    assert seen == [pytest.approx([0.1 * f, 0.01 * f]) for f in factors]

    second = optimizer()
    resumed = build(second)
    resumed.load_state_dict(saved)
    second.load_state_dict(saved_optimizer)
    for expected in seen[3:]:
        assert [group["lr"] for group in second.param_groups] == expected
        second.step()
        resumed.step()
