"""Supervised fine-tuning: the negative log-likelihood of the target tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

IGNORE_INDEX = -100


class TokenLoss(NamedTuple):
    """A sum over tokens and the number of tokens in it; divide only once all ranks are added up."""

    sum: torch.Tensor  # scalar, fp32, in nats
    count: torch.Tensor  # scalar, int64


def token_nll(logits: torch.Tensor, targets: torch.Tensor) -> TokenLoss:
    """Sum of ``-log p(target)`` over the supervised positions.

    ``logits``: [..., V], any float dtype. ``targets``: [...], int64, aligned with the
    logits (already shifted: ``targets[t]`` is what ``logits[t]`` predicts), and
    ``IGNORE_INDEX`` where nothing is trained. Logits of ignored positions may hold
    anything, inf and nan too: neither the value nor the gradient sees them. With no
    supervised position the sum is a zero that still has a graph, so that a rank
    without tokens can call backward like the others.

    Computed in fp32 as ``logsumexp(logits) - logits[target]``: forward builds no log-softmax
    of the whole vocabulary (backward does build the softmax, which is the gradient).
    Raises ValueError where the shapes do not fit.
    Source: cross entropy of the softmax, e.g. Goodfellow et al., Deep Learning, 6.2.2.3.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} differ before the vocabulary"
        )
    supervised = targets != IGNORE_INDEX
    # where(), not a product with the mask: 0 * nan would be nan, in the gradient as well.
    scores = torch.where(supervised.unsqueeze(-1), logits, logits.new_zeros(())).float()
    index = torch.where(supervised, targets, torch.zeros_like(targets)).unsqueeze(-1)
    nll = torch.logsumexp(scores, dim=-1) - scores.gather(-1, index).squeeze(-1)
    total = torch.where(supervised, nll, nll.new_zeros(())).sum()
    return TokenLoss(sum=total, count=supervised.sum())
