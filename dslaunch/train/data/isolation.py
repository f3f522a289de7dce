"""Does this very model keep packed samples apart? Asked of the model, not of its name.

transformers builds a block-diagonal mask from restarting ``position_ids`` only
without a cache and without an attention mask, and some models (those with
convolutions, recurrent state or ALiBi among them) leak even then, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.collate import Batch, Sample, collate, lay_out_for

# Two rows whose boundaries lie at different places, the second one padded.
_ROWS = ((7, 9, 5), (4, 6))
_SEED = 20
# Where experts are chosen per token, a changed token changes how many rows each expert's matrix
# product has, and with it the rounding of all the others. Rounding counts as a leak from here on:
_ROUNDING_OF_SEEN = 1e-3  # of what a change moves in positions that may see it,
_ROUNDING_OF_UNSEEN = 10.0  # or times what it moves in positions before it, which no model looks back from,
_ALWAYS_A_LEAK = 0.25  # but never more than this, again of the former.

Part = Literal["first", "last"]


def check_packing_isolation(
    model: torch.nn.Module, tokenizer_vocab_size: int, device: torch.device | str
) -> None:
    """Change tokens of the first sample of packed rows; no bit of the others' logits may change.

    Of a mixture of experts, which rounds differently with every other token in
    the batch, no more than rounding may change.

    Runs ``model`` (a transformers causal LM) on a tiny packed batch, laid out as
    training lays it out, in train and in eval mode, without gradients. Modes,
    random number generators and gradients are as before afterwards. Under ZeRO-3
    every rank must call it. Raises ConfigError when samples see each other.
    """
    modes = [(module, module.training) for module in model.modules()]
    routed = chooses_experts(model)
    try:
        for training in (True, False):
            model.train(training)
            if routed:
                _turn_dropout_off(model)
            moved = _largest_moves(model, tokenizer_vocab_size, device, measure_rounding=routed)
            if not moved.others <= moved.permitted:
                _refuse(model, training, moved.others)
    finally:
        for module, was_training in modes:
            module.training = was_training


def chooses_experts(model: torch.nn.Module) -> bool:
    """Whether any layer of ``model`` sends tokens to experts (a module named so, as in transformers)."""
    return any(name.rsplit(".", 1)[-1] in ("experts", "router") for name, _ in model.named_modules())


def _turn_dropout_off(model: torch.nn.Module) -> None:
    # Inside an expert it is drawn for as many tokens as came there, so equal seeds do not make it equal.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.training = False


def _refuse(model: torch.nn.Module, training: bool, worst: float) -> None:
    mode = "train" if training else "eval"
    raise ConfigError(
        f"data.packing: samples packed into one row of {type(model).__name__} see each other: "
        f"a changed token of one moves another's logits by up to {worst:.3g} (in {mode} mode)",
        hint="set data.packing: false for this model",
    )


class _Moves:
    """The largest moves of any logit. ``others``: outside the changed samples; ``permitted``: of those."""

    def __init__(self, others: float, permitted: float) -> None:
        self.others = others
        self.permitted = permitted


def _largest_moves(
    model: torch.nn.Module, vocab_size: int, device: torch.device | str, *, measure_rounding: bool
) -> _Moves:
    """What changing the first sample of each row does elsewhere, and what of it rounding may explain."""

    def logits(changed: Part | None) -> torch.Tensor:
        return _logits(model, _probe_batch(vocab_size, changed).to(device))

    usual, first = logits(None), logits("first")
    others = _largest_move(usual, first, lambda row: range(row[0], sum(row)))
    if not measure_rounding:
        return _Moves(others, 0.0)
    # Positions of the changed sample whose own token is as it was: they rightly see the change before them.
    seen = _largest_move(usual, first, lambda row: range(1, row[0] - 2))
    unseen = _largest_move(usual, logits("last"), lambda row: range(sum(row) - row[-1]))
    rounding = max(_ROUNDING_OF_SEEN * seen, _ROUNDING_OF_UNSEEN * unseen)
    return _Moves(others, min(rounding, _ALWAYS_A_LEAK * seen))


def _largest_move(
    before: torch.Tensor, after: torch.Tensor, where: Callable[[tuple[int, ...]], range]
) -> float:
    """The largest difference of two logits [tokens, V] at the positions ``where`` gives for each row."""
    worst = 0.0
    for start, row in _row_starts():
        positions = [start + position for position in where(row)]
        one, other = before[positions], after[positions]
        if not torch.equal(one, other):
            # Not a number, and so never equal, is a difference as well.
            difference = (one.double() - other.double()).abs().nan_to_num(nan=float("inf"))
            worst = max(worst, float(difference.max()))
    return worst


def _row_starts() -> Iterator[tuple[int, tuple[int, ...]]]:
    width = _probe_batch(2, None).input_ids.shape[1]
    return ((index * width, row) for index, row in enumerate(_ROWS))


def _logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The logits of all positions, row after row: [rows * width, V]."""
    devices = [batch.input_ids.device] if batch.input_ids.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED)  # the same dropout in all runs
        logits: torch.Tensor = model(**lay_out_for(model, batch).model_inputs()).logits
    return logits.flatten(0, 1)


def _probe_batch(vocab_size: int, changed: Part | None) -> Batch:
    ids = np.arange(1, 1 + sum(sum(row) for row in _ROWS), dtype=np.int32) * 31 % vocab_size
    units, start = [], 0
    for row in _ROWS:
        unit = []
        for index, length in enumerate(row):
            sample = ids[start : start + length].copy()
            if (changed == "first" and index == 0) or (changed == "last" and index == len(row) - 1):
                # The first token, and those next to the border, where convolutions leak.
                places = [0, -2, -1]
                sample[places] = (sample[places] + vocab_size // 2) % vocab_size
            unit.append(Sample(sample, np.ones(length, dtype=np.bool_)))
            start += length
        units.append(unit)
    return collate(units, pad_token_id=0, packed=True)
