"""The gradient of a window is the global token mean, however the batch is cut and sharded.

Truth: tests/oracles/linear_softmax.py, float64 and by hand, on the weights that the
engine started from. Tolerance 1e-6 relative to the whole gradient's norm: fp32 has
6e-8 per operation and a logit here is a sum of 5 products.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.linear_softmax import Truth, Weights, token_mean
from tests.train.case_results import CaseResults
from tests.train.rank_cases import HIDDEN, SAMPLES, VOCABULARY

SHAPES = ((VOCABULARY, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
CUTS = [("two", 1), ("two", 4), ("one", 1), ("one", 8)]  # ranks, micro batch
CELLS = [pytest.param(stage, *cut, id=f"stage{stage}-{cut[0]}rank-micro{cut[1]}")
         for stage in (0, 1, 2, 3) for cut in CUTS]  # fmt: skip


def weights(flat: list[list[float]]) -> Weights:
    return Weights(*(np.array(values).reshape(shape) for values, shape in zip(flat, SHAPES, strict=True)))


def distance(a: Weights, b: Weights) -> float:
    return float(np.sqrt(sum(((x - y) ** 2).sum() for x, y in zip(a, b, strict=True))))


def cell(request: pytest.FixtureRequest, stage: int, ranks: str, micro: int) -> tuple[dict, Truth]:
    results: CaseResults = request.getfixturevalue(f"{ranks}_rank{'s' if ranks == 'two' else ''}")
    value = results[f"gradient/{stage}/{micro}"]
    return value, token_mean(weights(value["start"]), SAMPLES)


@pytest.mark.parametrize(("stage", "ranks", "micro"), CELLS)
def test_gradient_is_the_global_token_mean(
    request: pytest.FixtureRequest, stage: int, ranks: str, micro: int
) -> None:
    value, truth = cell(request, stage, ranks, micro)
    assert distance(weights(value["gradients"]), truth.gradient) < 1e-6 * truth.norm


@pytest.mark.parametrize(("stage", "ranks", "micro"), CELLS)
def test_update_is_minus_the_gradient(
    request: pytest.FixtureRequest, stage: int, ranks: str, micro: int
) -> None:
    value, truth = cell(request, stage, ranks, micro)
    start, end = weights(value["start"]), weights(value["end"])
    expected = Weights(*(w - g for w, g in zip(start, truth.gradient, strict=True)))
    # SGD with lr 1; weights are about 1, so each is rounded to 6e-8.
    assert max(np.abs(e - x).max() for e, x in zip(end, expected, strict=True)) < 3e-7


@pytest.mark.parametrize(("stage", "ranks", "micro"), CELLS)
def test_loss_norm_and_count_are_global(
    request: pytest.FixtureRequest, stage: int, ranks: str, micro: int
) -> None:
    value, truth = cell(request, stage, ranks, micro)
    assert value["loss"] == pytest.approx(truth.loss, rel=1e-6)
    assert value["grad_norm"] == pytest.approx(truth.norm, rel=1e-6)
    assert value["grad_norm_clipped"] == value["grad_norm"]  # clipping 0: none
    assert value["num_tokens"] == truth.num_tokens == 23


def test_a_per_micro_batch_mean_would_be_noticed() -> None:
    """The samples are ragged enough that the common mistake is far outside the tolerance."""
    generator = np.random.default_rng(0)
    start = Weights(*(generator.normal(size=shape) for shape in SHAPES))
    truth = token_mean(start, SAMPLES)
    means = [token_mean(start, [s]) for s in SAMPLES if any(t != -100 for t in s[1])]
    wrong = Weights(*(sum(part) / len(means) for part in zip(*(m.gradient for m in means), strict=True)))
    assert distance(wrong, truth.gradient) > 0.05 * truth.norm


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_is_the_mean_over_micro_batches_and_ranks(two_ranks: CaseResults, stage: int) -> None:
    # Gradients 1, 11 on rank 0 and 3, 13 on rank 1: mean 7. Loss 0 * x + 3 each: mean 3.
    assert two_ranks[f"mean/{stage}"] == {"end": [-7.0], "loss": 3.0, "num_tokens": None}
