"""Token cross entropy of a one-layer language model and its gradient, by hand, in float64.

Independent of torch: numpy, the closed form of the gradient of a softmax, and the
definition of the global token mean. logits = E[token] W^T + b.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
IGNORE = -100


class Weights(NamedTuple):
    embedding: Array  # [V, H]
    weight: Array  # [V, H]
    bias: Array  # [V]


class Truth(NamedTuple):
    loss: float  # nats per supervised token, over all samples
    num_tokens: int
    gradient: Weights
    norm: float  # L2 of the whole gradient


def token_mean(weights: Weights, samples: list[tuple[list[int], list[int]]]) -> Truth:
    """``samples``: (input ids, targets aligned with them, IGNORE where nothing is trained)."""
    d_embedding, d_weight, d_bias = (np.zeros_like(w) for w in weights)
    total, count = 0.0, 0
    for ids, targets in samples:
        for token, target in zip(ids, targets, strict=True):
            if target == IGNORE:
                continue
            hidden = weights.embedding[token]
            logits = weights.weight @ hidden + weights.bias
            top = logits.max()
            exponentials = np.exp(logits - top)
            total += np.log(exponentials.sum()) + top - logits[target]
            count += 1
            delta = exponentials / exponentials.sum()
            delta[target] -= 1.0
            d_embedding[token] += weights.weight.T @ delta
            d_weight += np.outer(delta, hidden)
            d_bias += delta
    gradient = Weights(d_embedding / count, d_weight / count, d_bias / count)
    norm = float(np.sqrt(sum(float((g * g).sum()) for g in gradient)))
    return Truth(loss=total / count, num_tokens=count, gradient=gradient, norm=norm)
