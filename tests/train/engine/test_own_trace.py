"""A loop of one's own that ends for nan, on two ranks: named, kept, run again, and free while off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.case_results import CaseResults
from tests.train.engine.cases_own_trace import BAD_MICRO_BATCH, BAD_ROW, BAD_STEP

PLANT = "blocks.1.plant"


def seen(results: CaseResults, case: str) -> dict[str, Any]:
    """What rank 0 saw; the other rank must have been told the same."""
    mine, other = results.of_rank(0, f"trace/{case}"), results.of_rank(1, f"trace/{case}")
    assert (mine["events"], mine["error"]) == (other["events"], other["error"])
    assert other["said"] == []  # rank 0 alone speaks
    return mine


@pytest.mark.parametrize("stage", [2, 3])
def test_module_parameter_rank_and_row_are_named_before_the_step_raises(
    two_ranks: CaseResults, stage: int
) -> None:
    result = seen(two_ranks, f"kept/{stage}")
    error = result["error"]
    assert (error["verdict"], error["step"]) == ("forward non-finite", BAD_STEP)
    culprit = error["culprit"]
    assert (culprit["module"], culprit["parameter"]) == (PLANT, f"{PLANT}.weight")
    assert (culprit["rank"], culprit["micro_batch"], culprit["phase"]) == (1, BAD_MICRO_BATCH, "forward")
    assert culprit["samples"] == [{"row": BAD_ROW}]
    assert culprit["cause"] == "computation"
    assert f"  samples  row {BAD_ROW} of the micro-batch" in result["said"]
    (traced,) = [event for event in result["events"] if event["kind"] == "nonfinite_traced"]
    assert traced["message"] == culprit["message"]
    assert result["report"]["findings"][0]["position"] == {"row": BAD_ROW, "token": 4}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_step_is_kept_and_can_be_run_again_by_hand(two_ranks: CaseResults, stage: int) -> None:
    result = seen(two_ranks, f"kept/{stage}")
    shares = ["weights-0.safetensors", *(["weights-1.safetensors"] if stage == 3 else [])]
    assert result["files"] == ["rank-0.pt", "rank-1.pt", "report.json", *shares, "window.json"]
    assert f"replay(engine, '{result['where']}/nonfinite/step-{BAD_STEP}')" in result["error"]["hint"]
    again, report = result["again"], result["report"]
    assert again["has_loss"]
    assert again["losses"] == report["losses"]  # the weights are those of the run, to the last bit
    assert again["findings"] == report["findings"]
    assert f"was kept with zero_stage {stage}, and this engine has 1" in result["refused"]


def test_the_diagnosis_names_the_culprit_and_diagnose_reads_it(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "kept/2")
    assert result["diagnosis"]["culprit"] == result["error"]["culprit"]
    assert [step["loss"] for step in result["diagnosis"]["steps"]][-1] == "nan"
    found = result["diagnosed"]
    assert found["num_losses"] == BAD_STEP
    assert [step for step, _ in found["loss"]] == [1, BAD_STEP]
    assert found["verdicts"][0]["name"] == "forward_nonfinite"
    assert found["verdicts"][0]["next"].startswith(f"traced: {result['error']['culprit']['message']}; ")


def test_a_gradient_is_traced_with_the_loss_that_the_model_gives(two_ranks: CaseResults) -> None:
    culprit = seen(two_ranks, "backward")["error"]["culprit"]
    assert (culprit["module"], culprit["phase"], culprit["rank"]) == (PLANT, "backward", 1)
    assert culprit["samples"] == [{"row": BAD_ROW}]
    assert culprit["report"] is None  # there is no run_dir


def test_the_engine_on_torch_alone_is_watched_and_traced_as_well(two_ranks: CaseResults) -> None:
    for rank in range(two_ranks.world_size):
        result = two_ranks.of_rank(rank, "trace/torch")
        assert (result["verdict"], result["step"]) == ("forward non-finite", BAD_STEP)
        assert (result["culprit"]["module"], result["culprit"]["rank"]) == (PLANT, 1)
        assert result["culprit"]["samples"] == [{"row": BAD_ROW}]
        assert result["kinds"] == ["step_skipped", "nonfinite_traced", "verdict"]
        assert not result["records"]


def test_without_the_loss_what_breaks_for_any_gradient_is_found_and_the_rest_is_said(
    two_ranks: CaseResults,
) -> None:
    result = seen(two_ranks, "without-loss")
    assert result["error"]["verdict"] == "persistent skipping"
    culprit = result["error"]["culprit"]
    assert (culprit["module"], culprit["phase"], culprit["samples"]) == (
        PLANT,
        "backward",
        [{"row": BAD_ROW}],
    )
    assert "the loss is computed outside of the model" in result["said"][-1]
    assert "trace_loss=" in result["said"][-1]


def test_a_batch_that_was_written_into_is_not_traced(two_ranks: CaseResults) -> None:
    result = seen(two_ranks, "written-into")
    assert result["error"]["culprit"] is None
    assert "not traced: the tensors of its micro-batches have been written into since" in result["said"]
    assert not result["records"], "a script that goes on keeps no further batches"


def test_it_is_off_unless_asked_for_and_costs_nothing(two_ranks: CaseResults) -> None:
    assert seen(two_ranks, "stop")["error"]["culprit"] is None
    unwatched, watched, tracing = two_ranks.of_rank(0, "trace/off")
    assert unwatched == watched
    assert (watched["held"], tracing["held"]) == (False, True)
    assert tracing["hooks"] == watched["hooks"]
