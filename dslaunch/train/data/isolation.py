"""Does this very model keep packed samples apart? Asked of the model, not of its name.

transformers builds a block-diagonal mask from restarting ``position_ids`` only
without a cache and without an attention mask, and some models (those with
convolutions, recurrent state or ALiBi among them) leak even then, silently.
"""

from __future__ import annotations

import numpy as np
import torch

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.collate import Batch, Sample, collate

# Two rows whose boundaries lie at different places, the second one padded.
_ROWS = ((7, 9, 5), (4, 6))
_SEED = 20


def check_packing_isolation(
    model: torch.nn.Module, tokenizer_vocab_size: int, device: torch.device | str
) -> None:
    """Change tokens of the first sample of packed rows; no bit of the others' logits may change.

    Runs ``model`` (a transformers causal LM) on a tiny packed batch, in train
    and in eval mode, without gradients. Modes, random number generators and
    gradients are as before afterwards. Under ZeRO-3 every rank must
    call it. Raises ConfigError when samples see each other.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for training in (True, False):
            model.train(training)
            worst = _largest_change(model, tokenizer_vocab_size, device)
            if worst > 0:
                _refuse(model, training, worst)
    finally:
        for module, was_training in modes:
            module.training = was_training


def _refuse(model: torch.nn.Module, training: bool, worst: float) -> None:
    mode = "train" if training else "eval"
    raise ConfigError(
        f"data.packing: samples packed into one row of {type(model).__name__} see each other: "
        f"a changed token of one moves another's logits by up to {worst:.3g} (in {mode} mode)",
        hint="set data.packing: false for this model",
    )


def _largest_change(model: torch.nn.Module, vocab_size: int, device: torch.device | str) -> float:
    """The largest change of any logit outside the samples whose tokens were changed."""
    usual = _logits(model, _probe_batch(vocab_size, changed=False).to(device))
    other = _logits(model, _probe_batch(vocab_size, changed=True).to(device))
    worst = 0.0
    for row, lengths in enumerate(_ROWS):
        outside = slice(lengths[0], sum(lengths))
        before, after = usual[row, outside], other[row, outside]
        if not torch.equal(before, after):
            # Not a number, and so never equal, is a difference as well.
            difference = (before.double() - after.double()).abs().nan_to_num(nan=float("inf"))
            worst = max(worst, float(difference.max()))
    return worst


def _logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    devices = [batch.input_ids.device] if batch.input_ids.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED)  # the same dropout in both runs
        logits: torch.Tensor = model(**batch.model_inputs()).logits
    return logits


def _probe_batch(vocab_size: int, *, changed: bool) -> Batch:
    ids = np.arange(1, 1 + sum(sum(row) for row in _ROWS), dtype=np.int32) * 31 % vocab_size
    units, start = [], 0
    for row in _ROWS:
        unit = []
        for index, length in enumerate(row):
            sample = ids[start : start + length].copy()
            if changed and index == 0:
                # The first token, and those next to the border, where convolutions leak.
                sample[[0, -2, -1]] = (sample[[0, -2, -1]] + vocab_size // 2) % vocab_size
            unit.append(Sample(sample, np.ones(length, dtype=np.bool_)))
            start += length
        units.append(unit)
    return collate(units, pad_token_id=0, packed=True)
