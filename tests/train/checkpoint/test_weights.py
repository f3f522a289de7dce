"""After a checkpoint has been loaded, the weights are those that were saved, or the run stops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dslaunch.train.checkpoint.trained import are_same_sums, weight_sums
from tests.train.case_results import CaseResults, run_case_ranks

CELLS = ["0/fp32", "1/bf16", "2/fp32", "3/bf16", "3/fp32"]


@pytest.fixture(scope="module")
def ran(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_case_ranks("tests.train.checkpoint.ranks_weights", tmp_path_factory.mktemp("weights"), 2)


@pytest.mark.parametrize("cell", CELLS)
def test_weights_that_did_not_come_back_stop_the_run_on_every_rank(ran: CaseResults, cell: str) -> None:
    for rank in range(ran.world_size):
        result = ran.of_rank(rank, cell)
        assert (result["usual"], result["sums"]) == ("loaded {}", 2)
        for name in ("nothing", "on one rank"):
            if result[name]:
                assert result[name].startswith(
                    "EnvironmentNotReady: the trained weights are other ones after"
                )


def test_sums_tell_weights_apart_and_not_the_order_of_adding() -> None:
    layer = torch.nn.Linear(300, 200).to(torch.bfloat16)
    before = weight_sums(layer)
    assert before is not None
    assert are_same_sums(before, (before[0] + 1e-12, before[1] * (1 + 1e-12)))
    with torch.no_grad():
        layer.weight[7, 9] += 2**-6
    assert not are_same_sums(before, weight_sums(layer))
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    assert weight_sums(layer) is None and are_same_sums(None, before) and are_same_sums(before, None)


def test_frozen_weights_do_not_count() -> None:
    layer = torch.nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    expected = layer.bias.detach().double()
    assert weight_sums(layer) == pytest.approx((float(expected.sum()), float((expected**2).sum())))
