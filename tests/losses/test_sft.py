"""token_nll against hand-checked numbers, a float64 oracle, and hostile inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dslaunch.losses.sft import token_nll
from tests.oracles.linear_softmax import Weights, token_mean

LOGITS = [[[1, 2, 0.5], [0, -1, 3], [2, 2, 2]], [[0.1, 0.2, 0.3], [5, -5, 0], [1, 0, -1]]]
TARGETS = [[1, 2, -100], [0, 1, 2]]


def test_known_case() -> None:
    """Token mean 2.829312, computed apart from this code in float64; the rows' own means give 2.401948."""
    loss = token_nll(torch.tensor(LOGITS), torch.tensor(TARGETS))
    assert loss.count.item() == 5
    assert (loss.sum / loss.count).item() == pytest.approx(2.829312, abs=1e-6)
    rows = [token_nll(torch.tensor(x), torch.tensor(t)) for x, t in zip(LOGITS, TARGETS, strict=True)]
    assert (sum(r.sum / r.count for r in rows) / 2).item() == pytest.approx(2.401948, abs=1e-6)


def test_value_and_gradient_against_float64() -> None:
    """A one-layer model; the oracle has the closed form of the gradient. fp32: 1e-6 of the norm."""
    generator = np.random.default_rng(1)
    weights = Weights(generator.normal(size=(7, 4)), generator.normal(size=(7, 4)), generator.normal(size=7))
    samples = [([1, 2, 3], [2, -100, 6]), ([0, 6, 5], [-100, 5, 1])]
    truth = token_mean(weights, samples)
    tensors = [torch.tensor(w, dtype=torch.float32, requires_grad=True) for w in weights]
    embedding, weight, bias = tensors
    logits = embedding[torch.tensor([s[0] for s in samples])] @ weight.T + bias
    loss = token_nll(logits, torch.tensor([s[1] for s in samples]))
    mean = loss.sum / loss.count
    mean.backward()
    assert mean.item() == pytest.approx(truth.loss, rel=1e-6)
    errors = [np.abs(t.grad.double().numpy() - g).max() for t, g in zip(tensors, truth.gradient, strict=True)]
    assert max(errors) < 1e-6 * truth.norm


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_ignored_positions_may_hold_anything(poison: float) -> None:
    clean = torch.tensor(LOGITS, requires_grad=True)
    token_nll(clean, torch.tensor(TARGETS)).sum.backward()
    dirty = torch.tensor(LOGITS)
    dirty[0, 2] = poison
    dirty.requires_grad_()
    loss = token_nll(dirty, torch.tensor(TARGETS))
    loss.sum.backward()
    assert loss.sum.item() == token_nll(clean, torch.tensor(TARGETS)).sum.item()
    assert torch.equal(dirty.grad, clean.grad)


def test_no_supervised_token_is_a_zero_with_a_graph() -> None:
    logits = torch.tensor([[1.0, math.inf]], requires_grad=True)
    loss = token_nll(logits, torch.tensor([-100]))
    loss.sum.backward()
    assert (loss.sum.item(), loss.count.item()) == (0.0, 0)
    assert torch.equal(logits.grad, torch.zeros(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """4000 tokens of log(8) each: 8317.77, which fp16 sums would put out of shape and bf16 too."""
    logits = torch.zeros(4000, 8, dtype=dtype)
    loss = token_nll(logits, torch.zeros(4000, dtype=torch.long))
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == pytest.approx(4000 * math.log(8), rel=1e-6)


def test_far_logits_stay_finite() -> None:
    loss = token_nll(torch.tensor([[6e4, 0.0], [0.0, 6e4]]), torch.tensor([0, 0]))
    assert loss.sum.item() == 6e4


def test_uniform_logits_prompt_and_padding() -> None:
    """Vocabulary 4, prompt 2, answer 3, padding 2: 3 ln 4, whatever stands in prompt and padding."""
    targets = torch.tensor([[-100, 0, 1, 2, -100, -100]])
    logits = torch.zeros(1, 6, 4)
    assert token_nll(logits, targets).sum.item() == pytest.approx(3 * math.log(4))
    logits[0, 4:] = torch.tensor([5.0, -3.0, 2.0, 9.0])
    assert token_nll(logits, targets).sum.item() == pytest.approx(3 * math.log(4))


def test_shapes_and_targets_are_checked() -> None:
    with pytest.raises(ValueError, match="differ before the vocabulary"):
        token_nll(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))
    for wrong in (5, -1):
        with pytest.raises((IndexError, RuntimeError)):
            token_nll(torch.zeros(1, 5), torch.tensor([wrong]))
