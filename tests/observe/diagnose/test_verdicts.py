"""Each verdict from a log that has it, and none from one that has not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.observe.diagnose.logs import hf, megatron_line, names, overflow_line, read, zero_log

AT_MINIMUM = "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."


def test_a_normal_start_and_a_saw_tooth(tmp_path: Path) -> None:
    made = zero_log({1, 2, 3, 40, 60, 81}, 100)
    found = read(tmp_path, made.lines)
    assert names(found) == ["warm_up_descent", "saw_tooth"]
    assert not found.is_wrong
    start, saw_tooth = found.verdicts
    assert "at 3 places and up to 1 in a row" in saw_tooth.title
    assert [place.step for place in start.evidence] == [1, 3]
    lines = "\n".join(made.lines).split("\n")
    for place in start.evidence:
        assert "OVERFLOW" in lines[place.line - 1]


@pytest.mark.parametrize(("power", "hysteresis", "count"), [(16, 2, 17), (16, 1, 16), (32, 2, 33)])
def test_as_many_as_a_start_can_take(power: int, hysteresis: int, count: int, tmp_path: Path) -> None:
    """Field report 1: 17 in a row from 2^16 with hysteresis 2 are a descent; the next one is fatal."""
    made = zero_log(set(range(1, count + 1)), count + 20, power=power, hysteresis=hysteresis, window=1000)
    assert names(read(tmp_path, made.lines)) == ["warm_up_descent"]
    dead = [*zero_log(set(range(1, count + 1)), count, power=power, hysteresis=hysteresis).lines,
            AT_MINIMUM]  # fmt: skip
    found = read(tmp_path, dead)
    assert found.is_wrong and names(found)[0] == "at_minimum"
    assert found.verdicts[0].evidence[-1].line == "\n".join(dead).count("\n") + 1


def test_stuck_at_the_minimum_of_an_old_deepspeed(tmp_path: Path) -> None:
    lines = [
        overflow_line(before, max(1, before // 2), step=i) for i, before in enumerate([4, 2, 1, 1, 1, 1])
    ]
    assert names(read(tmp_path, lines))[0] == "at_minimum"


def test_skipping_that_does_not_end(tmp_path: Path) -> None:
    found = read(tmp_path, zero_log({*range(200, 212)}, 211, power=16, window=1000).lines)
    assert names(found)[0] == "persistent_skipping" and found.is_wrong
    assert found.verdicts[0].title.startswith("12 steps in a row were skipped from step 200")


def test_steps_of_a_run_that_was_started_again_count_each_time(tmp_path: Path) -> None:
    """A job that crashed in its step 60, four times in one log: 16 of 240 steps, not of 60."""
    lines = []
    for step in range(1, 61):
        if step % 13 == 0:
            lines.append(overflow_line(2 ** (17 - step // 13), 2 ** (16 - step // 13)))
        lines.append(f"step {step} loss: {5 - step / 50:.4f} grad_norm: {1.5 + step % 7 / 10:.3f}")
    titles = [read(tmp_path, lines * times).verdicts[0].title for times in (1, 4)]
    assert titles == ["4 of 60 steps were skipped (7%)", "16 of 240 steps were skipped (7%)"]
    bars = [
        line
        for index, each in enumerate(lines, 1)
        for line in (each, "step 1 loss: 4.1")[: 1 + (index == 40)]
    ]
    assert read(tmp_path, bars).verdicts[0].title == "4 of 60 steps were skipped (7%)"


def test_skipping_that_came_back_is_a_warning(tmp_path: Path) -> None:
    found = read(tmp_path, zero_log({*range(200, 212)}, 400, power=16, window=1000).lines)
    assert [(v.name, v.severity) for v in found.verdicts] == [("persistent_skipping", "warning")]
    assert not found.is_wrong
    made = zero_log({*range(200, 212)}, 211, power=16, window=1000).lines
    for count, is_wrong in ((1, True), (2, False)):  # a loss alone may be the skipped step's own
        found = read(tmp_path, [*made, *["{'loss': 2.0, 'learning_rate': 1e-05}"] * count])
        assert (names(found), found.is_wrong) == (["persistent_skipping"], is_wrong)


def test_skipping_in_bf16(tmp_path: Path) -> None:
    skip = "[Rank 0] [deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated."
    good = [hf(2.0 - i / 100, 1 + i / 50) for i in range(20)]
    found = read(tmp_path, [*good, *[skip] * 6])
    assert names(found) == ["persistent_skipping"] and found.is_wrong
    assert "from line 21" in found.verdicts[0].title
    for count, severity in ((4, "warning"), (5, "error")):
        found = read(tmp_path, [*good, *[skip] * count])
        assert [(v.name, v.severity) for v in found.verdicts] == [("persistent_skipping", severity)]
    found = read(tmp_path, [*good, skip, *good])
    assert [(v.name, v.severity) for v in found.verdicts] == [("persistent_skipping", "warning")]


def test_skipping_now_and_then_but_too_often(tmp_path: Path) -> None:
    """Every fourth step, and the scale never doubles in between: no saw-tooth."""
    found = read(tmp_path, zero_log(set(range(4, 100, 4)), 100, power=32, window=1000).lines)
    assert names(found) == ["persistent_skipping"] and found.is_wrong
    assert "of 99 steps" in found.verdicts[0].title
    early = zero_log(set(range(4, 48, 4)), 48, power=32, window=1000)
    assert names(read(tmp_path, early.lines)) == ["warm_up_descent", "saw_tooth"]  # so few have no rate


def test_as_often_behind_a_doubling_is_a_saw_tooth(tmp_path: Path) -> None:
    """A window of 10: 8 % of the steps, each at the scale that has just doubled."""
    made = zero_log(set(range(12, 100, 12)), 100, window=10)
    assert made.growths == [step - 1 for step in range(12, 100, 12)]
    assert names(read(tmp_path, made.lines)) == ["saw_tooth"]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_forward_from_the_first_line(value: str, tmp_path: Path) -> None:
    lines = []
    for i in range(4):
        lines += [overflow_line(2.0 ** (16 - i), 2.0 ** (15 - i), step=i), hf(value, "nan")]
    found = read(tmp_path, lines)
    assert names(found)[0] == "forward_nonfinite" and found.is_wrong


def test_forward_in_the_middle_while_steps_are_skipped(tmp_path: Path) -> None:
    lines = [hf(2.0, 1 + i / 10) for i in range(12)]
    for i in range(4):
        lines += [overflow_line(2.0 ** (16 - i), 2.0 ** (15 - i), step=60 * i), hf("nan", "nan")]
    found = read(tmp_path, lines)
    assert names(found)[0] == "forward_nonfinite"
    assert found.verdicts[0].evidence[0].line == 14


def test_a_loss_that_becomes_nan(tmp_path: Path) -> None:
    lines = [megatron_line(i, 3.0, 1.0, 1 + i / 9) for i in range(1, 31)]
    lines += [megatron_line(i, float("nan"), 1.0, float("nan")) for i in range(31, 41)]
    found = read(tmp_path, lines)
    assert names(found) == ["loss_nan"] and found.is_wrong
    assert "from step 31" in found.verdicts[0].title
    assert [place.line for place in found.verdicts[0].evidence] == [31, 40]


def test_a_single_nan_is_a_warning(tmp_path: Path) -> None:
    lines = [hf("nan" if i == 10 else 2.0, 1 + i / 10) for i in range(20)]
    assert [(v.name, v.severity) for v in read(tmp_path, lines).verdicts] == [("loss_nan", "warning")]


@pytest.mark.parametrize("norm", ["nan", "1.0"])
def test_the_overlap_race(norm: str, tmp_path: Path) -> None:
    lines = ['        "overlap_comm": true,', *[hf(2.0, 1 + i / 10) for i in range(9)], *[hf(0.0, norm)] * 5]
    found = read(tmp_path, lines)
    assert names(found)[0] == "overlap_race" and found.is_wrong
    assert "the log says it is on" in found.verdicts[0].detail


def test_a_norm_that_never_changes(tmp_path: Path) -> None:
    assert names(read(tmp_path, [hf(2.0 - i / 100, 0.5) for i in range(12)])) == ["norm_constant"]
    found = read(tmp_path, [hf(2.0 - i / 100, 0.0) for i in range(12)])
    assert names(found) == ["norm_constant"] and found.is_wrong


def test_a_loss_that_grows(tmp_path: Path) -> None:
    losses = [3 - i / 40 for i in range(40)] + [2 + i / 10 for i in range(40)]
    found = read(tmp_path, [hf(loss, 1 + i / 7) for i, loss in enumerate(losses)])
    assert names(found) == ["diverging"] and found.is_wrong
    for top, verdicts in ((27, []), (33, ["diverging"])):  # from 20: half of it is much
        losses = [30 - i / 4 for i in range(40)] + [20 + (top - 20) * i / 40 for i in range(40)] + [top] * 8
        assert names(read(tmp_path, [hf(loss, 1 + i / 7) for i, loss in enumerate(losses)])) == verdicts


def test_nothing_wrong(tmp_path: Path) -> None:
    draw = random.Random(1)
    found = read(tmp_path, [hf(2 + draw.random(), 1 + draw.random()) for _ in range(500)])
    assert names(found) == [] and found.num_losses == 500


def test_several_verdicts_the_worst_first(tmp_path: Path) -> None:
    made = zero_log({1, 2, 3}, 60, window=1000)
    lines = [*made.lines, *[hf(0.0, "nan")] * 4]
    found = read(tmp_path, lines)
    assert [v.severity for v in found.verdicts] == sorted(
        (v.severity for v in found.verdicts), key="error warning info".index
    )
    assert names(found) == ["overlap_race", "warm_up_descent"]


def test_megatron_tells_the_scale_and_the_skips(tmp_path: Path) -> None:
    lines, scale = [], 65536.0
    for step in range(1, 101):
        skipped = step in (1, 2, 70)
        scale = scale / 2 if skipped else scale * 2 if step == 60 else scale
        lines.append(megatron_line(step, 3 - step / 100, scale, 1 + step % 5 / 10, int(skipped)))
    found = read(tmp_path, lines)
    assert found.course.overflow_steps == (1, 2, 70)
    assert found.course.growths == () and found.course.last_scale == scale
    assert names(found) == ["warm_up_descent", "saw_tooth"]
