"""Every verdict by a planted fault, in a loop of one's own on two ranks: what is said, where and when."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracles.loss_scaler import Scaler
from tests.train.case_results import CaseResults


def seen(results: CaseResults, case: str) -> dict[str, Any]:
    """What rank 0 saw; the other rank must have seen the same."""
    mine, other = results.of_rank(0, f"watch/{case}"), results.of_rank(1, f"watch/{case}")
    assert (mine["events"], mine["error"], mine["steps"]) == (
        other["events"], other["error"], other["steps"]
    )  # fmt: skip
    assert other["said"] == []  # rank 0 alone speaks
    return mine


def verdicts(result: dict[str, Any]) -> list[tuple[int, str]]:
    return [(event["step"], event["verdict"]) for event in result["events"] if event["kind"] == "verdict"]


def kinds(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in result["events"] if event["kind"] == kind]


def test_warm_up_descent_is_one_line(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "descent")
    assert verdicts(result) == [(3, "warm-up descent")]
    assert result["error"] is None
    (line,) = result["said"]
    assert "the loss scale went from 256 to 64: normal" in line


def test_sporadic_saw_tooth_is_said_once_and_is_normal(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "saw-tooth")
    assert [v for v in verdicts(result) if v[1] != "norm constant"] == [
        (3, "warm-up descent"),
        (31, "sporadic saw-tooth"),
    ]
    assert (result["error"], result["steps"]) == (None, 45)


def test_forward_non_finite_stops_in_the_very_step_and_names_the_rank(two_ranks: CaseResults) -> None:
    error = seen(two_ranks, "forward")["error"]
    assert (error["verdict"], error["step"], error["exit_code"]) == ("forward non-finite", 3, 76)
    assert error["message"].startswith("step 3 has loss nan on rank 1: forward itself gives it")


def test_a_loss_of_inf_may_be_let_pass(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "forward-let-pass")
    assert (result["error"], result["steps"], verdicts(result)) == (None, 5, [])
    assert kinds(result, "step_skipped")[0]["ranks"] == [1]


def test_a_loss_alone_that_is_nan_stops_one_step_later_never_more(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "loss-alone")
    assert (result["error"]["verdict"], result["error"]["step"]) == ("forward non-finite", 2)
    assert result["steps"] == 2  # step 3 raised


def test_persistent_skipping_in_bf16_where_deepspeed_is_silent(two_ranks: CaseResults) -> None:
    error = seen(two_ranks, "persistent")["error"]
    assert (error["verdict"], error["step"], error["exit_code"]) == ("persistent skipping", 3, 76)
    assert "(non-finite gradient on ranks 0, 1)" in error["message"]


def test_persistent_skipping_with_a_static_scale(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "persistent-static")
    assert (result["error"]["verdict"], result["error"]["step"]) == ("persistent skipping", 3)
    assert len(result["said"]) == 3
    assert "a static loss_scale may be too high" in result["error"]["hint"]


def test_persistent_skipping_with_a_dynamic_scale_that_falls_in_vain(two_ranks: CaseResults) -> None:
    """Neither the minimum (the scale is far from it) nor a descent (steps were good before)."""
    result, scaler = seen(two_ranks, "persistent-dynamic"), Scaler(256.0, 1000, 2)
    error = result["error"]
    assert (error["verdict"], error["step"], error["exit_code"]) == ("persistent skipping", 6, 76)
    scales = []
    for step in range(1, 7):
        scaler.step(step > 2)
        scales += [scaler.scale] if step > 2 else []
    assert [skip["next_loss_scale"] for skip in kinds(result, "step_skipped")] == scales
    assert scales == [256, 128, 64, 32]
    assert ", while the loss scale went from 256 to 32; watch.max" in error["message"]
    assert "a smaller loss scale did not help" in error["hint"] and "static" not in error["hint"]
    assert [(event["step"], event["verdict"]) for event in kinds(result, "verdict")] == [
        (6, "persistent skipping")
    ]
    assert len(result["said"]) == 4


def test_a_descent_that_does_not_end_is_persistent_skipping_too(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "persistent-at-start")
    assert (result["error"]["verdict"], result["error"]["step"]) == ("persistent skipping", 4)
    assert "from 256 to 16" in result["error"]["message"]
    assert verdicts(result) == [(4, "persistent skipping")] and result["said"] == []


def test_loss_0_and_a_norm_that_does_not_change(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "silence")
    assert verdicts(result) == [(5, "loss 0"), (5, "norm constant")]
    assert (result["error"], result["steps"]) == (None, 8)
    assert ["overlap_comm" in line for line in result["said"]] == [True, True]


def test_at_minimum_leaves_a_diagnosis_and_the_events(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "files")
    error = result["error"]
    assert (error["verdict"], error["step"], error["exit_code"]) == ("at minimum", 2, 76)
    assert result["files"] == ["diagnosis.json", "events.jsonl"]
    assert result["kinds"] == ["step_skipped", "verdict"]
    diagnosis = result["diagnosis"]
    assert (diagnosis["kind"], diagnosis["verdict"]) == ("at minimum", error["message"])
    assert "bf16" in diagnosis["advice"]
    assert [step["next_loss_scale"] for step in diagnosis["steps"]] == [2]
    assert result["diagnosed"]["verdicts"][0]["name"] == "at_minimum"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_rank_whose_gradient_it_was_is_named(two_ranks: CaseResults, stage: int) -> None:
    """Its loss is finite, and after the reduction all ranks hold inf."""
    result = seen(two_ranks, f"one-rank/{stage}")
    (skip,) = kinds(result, "step_skipped")
    assert (skip["step"], skip["ranks"]) == (2, [1])
    assert result["error"] is None
    assert "on rank 1; the weights are as before" in result["said"][0]


def test_every_overflow_growth_and_hysteresis_change_is_an_event(two_ranks: CaseResults) -> None:
    """Against the oracle of the scale: overflow at step 1, then good ones; window 2, hysteresis 2."""
    result, scaler, expected = seen(two_ranks, "moves"), Scaler(256.0, 2, 2), []
    for step in range(1, 6):
        scale, left = scaler.scale, scaler.left
        scaler.step(step == 1)
        if step == 1:
            expected.append(("step_skipped", step, [1], scaler.scale))
        if scaler.scale > scale:
            expected.append(("loss_scale_grew", step, "all", scaler.scale))
        if scaler.left != left:
            expected.append(("hysteresis_changed", step, [1] if step == 1 else "all", scaler.scale))
    moves = [event for event in result["events"] if event["kind"] != "verdict"]
    found = [(e["kind"], e["step"], e["ranks"], e.get("next_loss_scale", e["loss_scale"])) for e in moves]
    assert found == expected and len(found) == 4


def test_it_can_be_turned_off(two_ranks: CaseResults) -> None:
    assert seen(two_ranks, "off") == {"events": [], "error": None, "steps": 3, "said": []}


def test_limits_that_are_none_are_refused(two_ranks: CaseResults) -> None:
    assert "did you mean max_skipped_in_a_row?" in two_ranks["watch/limit"]
    assert "it must be a whole number of at least 1" in two_ranks["watch/limit-0"]
