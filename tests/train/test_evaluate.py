"""Held-out loss against a float64 mean over the tokens, on one and on two ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dslaunch.train.data.collate import Sample
from dslaunch.train.evaluate import perplexity
from tests.support.ranks import check_ranks, run_ranks
from tests.train.rank_evaluate import CASES, TableModel

SCRIPT = Path(__file__).with_name("rank_evaluate.py")


@pytest.fixture(scope="module", params=[1, 2])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank of a world of this size found."""
    results = run_ranks([SCRIPT], world_size=request.param)
    check_ranks(results)
    return [json.loads(result.stdout) for result in results]


def token_mean(model: TableModel, samples: list[Sample]) -> tuple[float, int]:
    """Sample by sample and token by token, without batches, in float64."""
    table = torch.log_softmax(model.table.weight.detach().double(), dim=-1)
    losses = [
        -float(table[int(sample.input_ids[t - 1]), int(sample.input_ids[t])])
        for sample in samples
        for t in range(1, len(sample.input_ids))
        if sample.completion_mask[t]
    ]
    return sum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("case", [name for name, (samples, _, _) in CASES.items() if samples])
def test_the_loss_is_the_mean_over_all_tokens(found: list[dict[str, Any]], case: str) -> None:
    loss, num_tokens = token_mean(TableModel(), CASES[case][0])
    for of_rank in found:
        assert of_rank[f"usual/{case}"] == [
            pytest.approx(loss, rel=1e-6),
            num_tokens,
            pytest.approx(math.exp(loss), rel=1e-5),
        ]


def test_an_empty_set_has_no_loss(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        loss, num_tokens, ppl = of_rank["usual/empty"]
        assert math.isnan(loss) and num_tokens == 0 and math.isnan(ppl)


def test_a_broken_model_has_nan_and_a_hopeless_one_inf(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        loss, num_tokens, ppl = of_rank["nan/uneven"]
        assert math.isnan(loss) and num_tokens > 0 and math.isnan(ppl)
        loss, _, ppl = of_rank["far off/uneven"]
        assert math.isfinite(loss) and ppl == math.inf


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert math.isfinite(perplexity(709.0)) and perplexity(710.0) == math.inf
    assert perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
