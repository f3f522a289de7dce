"""The replay names the planted module, parameter, rank, micro-batch and sample; where nothing is, nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.train.case_results import CaseResults, run_case_ranks
from tests.train.replay.plants import ALONE, PLANTS, SOUND


@pytest.fixture(scope="session")
def traced(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_case_ranks("tests.train.replay.ranks_replay", tmp_path_factory.mktemp("planted"), 2)


@pytest.fixture(scope="session")
def traced_alone(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    out_dir = tmp_path_factory.mktemp("planted-alone")
    return run_case_ranks("tests.train.replay.ranks_replay", out_dir, 1, "alone")


@pytest.mark.parametrize("name", PLANTS)
def test_the_planted_fault_is_named(traced: CaseResults, name: str) -> None:
    plant, report = PLANTS[name], traced[name]
    first, *others = report["findings"]
    found: dict[str, Any] = {
        key: first[key] for key in plant.names if key not in ("samples", "together", "reaches")
    }
    found["samples"] = "any" if first["any_sample"] else [s["sample"] for s in first["samples"]]
    found["together"] = first["samples_together"]
    if "reaches" in plant.names:
        found["reaches"] = first["first_gradient"]["parameter"]
    assert found == plant.names, "\n".join(report["text"])
    assert [(f["rank"], f["micro_batch"]) for f in others] == list(plant.also)
    if not plant.fp32_modules:  # whose borders are taken off for good when all goes to fp32
        assert report["hooks_left"] == report["hooks_before"]


def test_twenty_faults_and_more_are_named_by_module_parameter_rank_and_sample() -> None:
    """Of all plants, those whose every part is a name: no "any sample", no fault without a parameter."""
    whole = [n.names for n in PLANTS.values() if n.names["samples"] != "any" and n.names["parameter"]]
    assert len(whole) >= 20
    assert {names["phase"] for names in whole} == {"forward", "backward"}
    assert {names["rank"] for names in whole} == {0, 1}


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_alone_finds_the_same(traced_alone: CaseResults, name: str) -> None:
    plant, report = PLANTS[name], traced_alone[name]
    (first,) = report["findings"]
    keys = ("phase", "module", "parameter", "cause", "rank", "micro_batch")
    assert {key: first[key] for key in keys} == {key: plant.names[key] for key in keys}
    assert first["also_micro_batches"] == [1]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_step_has_no_culprit(traced: CaseResults, name: str) -> None:
    assert traced[name]["findings"] == []
    assert "nothing went inf or nan" in traced[name]["text"][-1]


def test_gradients_that_overflow_in_their_sum_alone(traced: CaseResults) -> None:
    report = traced["sum"]
    assert report["findings"] == []
    assert report["sums"][0]["parameter"] == "blocks.1.plant.weight"
    assert report["sums"][0]["absmax_of_sum_at_most"] == 4 * 40000
    assert "every micro-batch is finite by itself" in "\n".join(report["text"])


def test_the_random_numbers_are_those_of_the_step(traced: CaseResults) -> None:
    """What one draw sets off, on one rank, is found though the generators have moved on."""
    (finding,) = traced["same draws"]["findings"]
    assert (finding["module"], finding["rank"], finding["micro_batch"]) == ("blocks.1.plant", 0, 0)


@pytest.mark.parametrize("stage", [2, 3])
def test_autograd_is_asked_where_it_is_wanted(traced: CaseResults, stage: int) -> None:
    (finding,) = traced[f"anomaly {stage}"]["findings"]
    said, _, place = finding["anomaly"].partition("; ")
    assert said == "LogBackward0 made nan out of finite gradients, for its input 0"
    assert re.fullmatch(r"it stands at \S+/planted.py:\d+ in forward: .*torch.log\(self.weight.*", place)
    assert "anomaly" not in traced["nan behind a where in the backward, stage 2 fp16"]["findings"][0]


def test_a_step_that_goes_well_costs_no_hook(traced: CaseResults) -> None:
    off = traced["off"]
    assert off["before"] == off["after"]
    assert off["suspect"] is None
