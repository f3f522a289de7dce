"""Held-out loss: the token mean over the whole evaluation set, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from dslaunch.train.data.collate import Batch
from dslaunch.train.data.packing import Packs
from dslaunch.train.dist import all_reduce_sum
from dslaunch.train.objectives.sft import SftObjective


class EvalResult(NamedTuple):
    """``loss``: mean over all ``num_tokens`` supervised tokens, nan where there are none.

    ``perplexity``: its exponential.
    """

    loss: float
    num_tokens: int
    perplexity: float


def run_evaluation(
    engine: Any, objective: SftObjective, batches: Iterator[Batch], device: torch.device
) -> EvalResult:
    """Evaluate; collective. Every rank must have the same number of batches (empty ones are fine).

    Random state and train mode are left as they were, so that evaluating more
    or less often does not change the training.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    engine.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                loss = objective.token_loss(batch)
                total += loss.sum.double()  # stays on the device: nothing is waited for between batches
                count += loss.count
    finally:
        engine.train()
    loss_sum, num_tokens = all_reduce_sum([float(total), float(count)], device)
    mean = loss_sum / num_tokens if num_tokens else math.nan
    return EvalResult(mean, int(num_tokens), perplexity(mean))


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats; inf where that is too large for a float, nan for nan."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def eval_batches(
    packs: Packs,
    unit_lengths: Any,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    collate_units: Callable[[list[int]], Batch],
) -> Iterator[Batch]:
    """This rank's batches. Units of like length go together, which saves padding.

    All ranks get equally many: the missing ones are empty (unit -1), so no rank
    waits in a forward pass that another does not make.
    """
    order = np.argsort(-np.asarray(unit_lengths), kind="stable")
    per_round = micro_batch_size * world_size
    padded = np.full(-(-len(packs) // per_round) * per_round, -1, dtype=np.int64)
    padded[: len(order)] = order
    for units in padded.reshape(-1, world_size, micro_batch_size)[:, rank]:
        yield collate_units(units.tolist())
