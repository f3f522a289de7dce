"""What a story means: verdicts, the worst first, each with its evidence and the next thing to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from dslaunch.observe.diagnose.facts import Place, Streak
from dslaunch.observe.diagnose.story import Story

Severity = Literal["error", "warning", "info"]

# As many overflows in a row as a healthy start from 2^16 can take: 16 halvings to 1, and the hysteresis.
LONGEST_DESCENT = 17
_MANY_IN_A_ROW = 6  # under fp16, in the middle of a run
_MANY_UNSCALED = 5  # where there is no scale that could come down
_RACE_LINES, _SAME_NORM_LINES = 3, 10
_FULL_RATE, _HIGH_RATE = 0.2, 0.05
_RATE_STEPS = 50


@dataclass(frozen=True)
class Verdict:
    """``name`` is for programs; ``next`` is one thing to try."""

    name: str
    severity: Severity
    title: str
    detail: str
    next: str
    evidence: tuple[Place, ...]


def judge(story: Story) -> list[Verdict]:
    """All that holds, the worst first; empty where nothing is wrong and nothing stands out."""
    found = [verdict for rule in _RULES for verdict in rule(story)]
    found += _ended(story, found)
    order: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda verdict: order[verdict.severity])


def _ended(story: Story, found: list[Verdict]) -> Iterator[Verdict]:
    """The verdict with which dslaunch's own watch ended the run, where the lines do not give it anyway."""
    if story.ended is None:
        return
    name, place = story.ended
    known, why = OWN_VERDICTS.get(name, (None, ""))
    if known is None or any(verdict.name == known for verdict in found):
        return
    advice = "see which samples that step had, and what diagnosis.json in the run directory says"
    yield Verdict(known, "error", f"the run was ended {_at(place, 'at')}: {name}", why, advice, (place,))


OWN_VERDICTS = {
    "forward non-finite": ("forward_nonfinite", "forward gives nan or inf: no loss scale can mend that"),
    "persistent skipping": ("persistent_skipping", "gradients are not finite, step after step"),
    "at minimum": ("at_minimum", "no smaller loss scale is left, and gradients still overflow"),
}


def _at_minimum(story: Story) -> Iterator[Verdict]:
    if story.minimum is None and story.stuck.count < 2:
        return
    evidence = _places(story.streaks[-1].first if story.streaks else None, story.minimum or story.stuck.first)
    floor = story.settings.get("min_loss_scale")
    value = f"{floor.value:g}" if floor else f"{story.scale:g}" if story.scale else "its floor"
    yield Verdict(
        "at_minimum",
        "error",
        f"the loss scale is at its minimum ({value}) and gradients still overflow",
        "no smaller scale can help: what is not finite comes from the model or the data, not from the scale",
        "find the first step whose loss is nan or inf; train in bf16 if the model was made in bf16 (LLaMA-2, "
        "T5, Gemma), else lower the learning rate and look at the batch of that step. A static scale or a "
        "larger minimum only hides it",
        evidence,
    )


def _forward(story: Story) -> Iterator[Verdict]:
    loss = story.loss
    if loss.first is None:
        return
    from_first = not math.isfinite(loss.first)
    if not (from_first or (loss.bad.count >= 2 and loss.bad_with_skips) or _is_known_forward(story)):
        return
    place = loss.first_place if from_first else loss.bad.first
    still = loss.bad.count > 0
    yield Verdict(
        "forward_nonfinite",
        "error" if still else "warning",
        f"the loss itself is not finite {'from the first line on' if from_first else _at(place)}:"
        " forward gives nan or inf",
        "the steps were skipped, so the weights are not what broke: no loss scale can mend a forward pass"
        if loss.bad_with_skips or _is_known_forward(story)
        else "a loss that is nan or inf at once comes from the weights, the data or the precision",
        "check the weights for nan and the labels of that batch (all ignored gives 0/0); under fp16, "
        "whose largest number is 65504, activations may pass it: use bf16 or fp32 then",
        _places(place, loss.bad.last if still else None),
    )


def _is_known_forward(story: Story) -> bool:
    """Whether the run's own watch, which sees each rank, ended it for the last losses that were read."""
    return story.loss.bad.count > 0 and story.ended is not None and story.ended[0] == "forward non-finite"


def _race(story: Story) -> Iterator[Verdict]:
    race = story.norm.longest_race
    if race.count < _RACE_LINES:
        return
    on = story.settings.get("overlap_comm")
    said = {
        None: "",
        0.0: "; the log says overlap_comm is off, so look at the data as well",
        1.0: "; the log says it is on",
    }
    yield Verdict(
        "overlap_race",
        "error",
        f"loss 0 with a gradient norm that is nan or never changes, {race.count} lines in a row",
        "known from ZeRO stages 1 and 2 with overlap_comm: buffers are used again while being reduced"
        + said[on.value if on else None],
        'set "overlap_comm": false in zero_optimization (or a larger reduce_bucket_size) and go back to '
        "a checkpoint before the first of these lines. The transformers Trainer also shows a nan loss as 0: "
        "logging_nan_inf_filter=False tells",
        _places(race.first, race.last),
    )


def _same_norm(story: Story) -> Iterator[Verdict]:
    run = story.norm.longest_same
    if run.count < _SAME_NORM_LINES or story.norm.longest_race.count >= _RACE_LINES:
        return
    norm = story.norm_series.points[-1].mean if story.norm_series.points else math.nan
    zero = norm == 0
    yield Verdict(
        "norm_constant",
        "error" if zero else "warning",
        f"the gradient norm is {'0' if zero else 'exactly the same'} in {run.count + 1} lines in a row",
        "no gradient reaches the trained weights"
        if zero
        else "gradients of different batches never have one norm",
        "look whether the trained parameters require gradients and are in the graph (adapters, checkpointing "
        "without enable_input_require_grads)"
        if zero
        else 'set "overlap_comm": false, and look whether the logged norm is the clipped one',
        _places(run.first, run.last),
    )


def _skipping(story: Story) -> Iterator[Verdict]:
    """Skipped steps that go on, or are too many. One verdict at most."""
    streak = _worst_streak(story)
    if streak is not None:
        ends = "it goes on where the log ends" if not _is_over(story, streak) else "then it went on"
        scale = ""
        if streak.scale_from is not None and streak.scale_to is not None:
            scale = f", the scale fell from {streak.scale_from:g} to {streak.scale_to:g}"
        unscaled = streak.scale_from is None
        yield Verdict(
            "persistent_skipping",
            "warning" if _is_over(story, streak) else "error",
            f"{streak.count} steps in a row were skipped {_at(streak.first)}{scale}; {ends}",
            "bf16 and static scales have nothing to lower: a skip means a gradient that is not finite"
            if unscaled
            else "more than a scale that is too high explains: gradients are not finite at any scale",
            "look at the loss and the batches of these steps; "
            + ("lower the learning rate or clip" if unscaled else "try bf16, or a lower learning rate"),
            _places(streak.first, streak.last),
        )
        return
    yield from _too_often(story)


def _worst_streak(story: Story) -> Streak | None:
    last = story.streaks[-1] if story.streaks else None
    for streak in filter(None, (last, story.longest)):
        least = _MANY_UNSCALED if streak.scale_from is None else _MANY_IN_A_ROW
        if streak.at_start and streak.scale_from is not None:
            least = LONGEST_DESCENT + 1
            if streak.scale_from > 2**16:
                least += round(math.log2(streak.scale_from)) - 16
        if streak.count >= least:
            return streak
    return None


def _too_often(story: Story) -> Iterator[Verdict]:
    steps, skipped = _counted(story)
    rest = story.num_streaks - 1
    if story.streaks and story.streaks[0].at_start:
        steps, skipped = steps - story.streaks[0].count, skipped - story.streaks[0].count
    unscaled = story.unscaled.count
    if steps >= _RATE_STEPS and skipped / steps >= _HIGH_RATE and story.num_after_growth <= rest / 2:
        rate = skipped / steps
        severity: Severity = "error" if rate >= _FULL_RATE else "warning"
        yield Verdict(
            "persistent_skipping",
            severity,
            f"{skipped} of {steps} steps were skipped ({rate:.0%})",
            "a healthy scale overflows about once in loss_scale_window steps, when it has doubled; these come"
            " without a doubling before them",
            "look at the losses and batches of the skipped steps; try bf16, or a lower learning rate",
            _ends(story),
        )
    elif unscaled:
        yield Verdict(
            "persistent_skipping",
            "warning",
            f"{unscaled} step{'s' * (unscaled > 1)} skipped without a dynamic loss scale",
            "under bf16 each skip is a gradient that is nan or inf; a static scale may be too high",
            "look at the batches of these steps",
            _places(story.unscaled.first, story.unscaled.last),
        )


def _loss_nan(story: Story) -> Iterator[Verdict]:
    loss = story.loss
    if loss.first is None or not math.isfinite(loss.first) or loss.num_bad_runs == 0:
        return
    if loss.bad.count == 0:
        yield Verdict(
            "loss_nan",
            "warning",
            f"the loss was nan or inf {loss.num_bad_runs} time{'s' * (loss.num_bad_runs > 1)} and came back",
            "single batches give a loss that is not finite",
            "look for batches without any label, and for overlong or damaged samples",
            (),
        )
    elif not (loss.bad_with_skips or _is_known_forward(story)):
        yield Verdict(
            "loss_nan",
            "error",
            f"the loss is nan or inf {_at(loss.bad.first)} and stays so",
            "it was finite before and no step was seen to be skipped: a step has put nan into the weights",
            "go back to a checkpoint before it; clip gradients, lower the learning rate, and keep overflow "
            "checks on (bf16.check_grad_overflow; fp32 at stage 0 has none)",
            _places(loss.bad.first, loss.bad.last),
        )


def _diverging(story: Story) -> Iterator[Verdict]:
    loss = story.loss
    mean = loss.recent_mean
    if mean is None or loss.bad.count or loss.best_place is None:
        return
    if mean - loss.best_mean < max(1.0, 0.5 * abs(loss.best_mean)):
        return
    yield Verdict(
        "diverging",
        "error",
        f"the loss grows: {loss.best_mean:.4g} {_at(loss.best_place, 'at')}, {mean:.4g} at the end"
        " (means of 8 lines)",
        "training has left what it had reached",
        "go back to a checkpoint before the rise, then take half the learning rate, a longer warm-up, or "
        "clipping at 1.0",
        _places(loss.best_place, loss.last_place),
    )


def _warm_up(story: Story) -> Iterator[Verdict]:
    first = story.streaks[0] if story.streaks else None
    if first is None or not first.at_start or first.scale_from is None or _worst_streak(story) is first:
        return
    if any(verdict.severity == "error" for verdict in _too_often(story)):
        return
    over = _is_over(story, first)
    yield Verdict(
        "warm_up_descent",
        "info",
        f"{first.count} overflow{'s' * (first.count > 1)} at the start, from scale {first.scale_from:g} to "
        f"{first.scale_to:g}: normal" + ("" if over else ", not over where the log ends"),
        "a dynamic scale begins too high and is halved until gradients fit",
        "nothing to do; fp16.initial_scale_power near the scale that it came to saves these steps",
        _places(first.first, first.last),
    )


def _saw_tooth(story: Story) -> Iterator[Verdict]:
    last = story.streaks[-1] if any(_at_minimum(story)) else None
    later = [s for s in story.streaks if not s.at_start and s.scale_from is not None and s is not last]
    if not later or any(_skipping(story)):
        return
    count = story.num_streaks - (1 if story.streaks[0].at_start else 0) - (last is not None)
    yield Verdict(
        "saw_tooth",
        "info",
        f"overflows now and then, at {count} place{'s' * (count > 1)} and up to "
        f"{max(s.count for s in later)} in a row: normal",
        "the scale doubles after each quiet window until it is too high, and is halved again",
        "nothing to do; a larger fp16.loss_scale_window makes them rarer",
        _places(later[0].first, later[-1].last),
    )


def _is_over(story: Story, streak: Streak) -> bool:
    """Whether good steps followed."""
    return streak is not story.streaks[-1] or story.good_since_overflow >= 2


def _counted(story: Story) -> tuple[int, int]:
    """(steps, skipped ones) as the log counts them."""
    if story.last_step is None or story.first_step is None:
        return 0, 0
    skipped = story.num_skipped if story.num_skipped is not None else story.num_overflows
    seen = story.last_step - story.first_step + 1 + story.again.count
    return story.last_step if story.num_skipped is not None else seen, skipped


def _ends(story: Story) -> tuple[Place, ...]:
    return _places(story.streaks[0].first, story.streaks[-1].last) if story.streaks else ()


def _places(*places: Place | None) -> tuple[Place, ...]:
    found: list[Place] = []
    for place in places:
        if place is not None and all((place.file, place.line) != (p.file, p.line) for p in found):
            found.append(place)
    return tuple(found)


def _at(place: Place | None, word: str = "from") -> str:
    if place is None:
        return ""
    return f"{word} step {place.step}" if place.step is not None else f"{word} line {place.line}"


_RULES: tuple[Callable[[Story], Iterator[Verdict]], ...] = (
    _at_minimum, _forward, _race, _skipping, _loss_nan, _diverging, _same_norm, _warm_up, _saw_tooth,
)  # fmt: skip
