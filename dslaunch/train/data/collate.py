"""Samples to the tensors of one micro-batch. Targets come from masks, never from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IGNORED = -100


class Sample(NamedTuple):
    """One tokenised sample: ``input_ids`` int32 [L]; ``completion_mask`` bool [L], True = trained."""

    input_ids: npt.NDArray[np.int32]
    completion_mask: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """One micro-batch; B rows of T tokens.

    ``input_ids``, ``position_ids``, ``targets``: int64 [B, T]. ``targets`` is
    aligned with the logits (already shifted): at position t it holds the token
    that follows t in the same sample if that token is trained, else -100.
    ``attention_mask``: bool [B, T], True = a real token; None for packed rows,
    which the model must tell apart by ``position_ids``.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    targets: torch.Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``."""
        mask = self.attention_mask
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            attention_mask=None if mask is None else mask.to(device),
            targets=self.targets.to(device),
        )

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a transformers causal LM.

        ``use_cache`` must be False: with a cache, transformers 5.24 builds no
        block-diagonal mask from restarting positions, and packed samples see
        each other without a word.
        """
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
            "use_cache": False,
        }

    def in_one_row(self) -> Batch:
        """The same tokens as a single row, one row after the other. Packed batches only."""
        assert self.attention_mask is None
        return replace(
            self,
            input_ids=self.input_ids.reshape(1, -1),
            position_ids=self.position_ids.reshape(1, -1),
            targets=self.targets.reshape(1, -1),
        )


def lay_out_for(model: torch.nn.Module, batch: Batch) -> Batch:
    """``batch`` as ``model``'s attention needs it to keep packed samples apart.

    FlashAttention looks for restarting positions only in a batch of one row
    (transformers/modeling_flash_attention_utils.py, _is_packed_sequence); with
    more rows packed samples would see each other. It costs it nothing: attention
    is computed per sample. Other kinds get their mask from the positions of each
    row, and one long row would only make that mask larger.
    """
    kind = str(getattr(getattr(model, "config", None), "_attn_implementation", None))
    return batch.in_one_row() if batch.attention_mask is None and "flash" in kind else batch


def collate(
    units: Sequence[Sequence[Sample]], *, pad_token_id: int, packed: bool, pad_to_multiple_of: int = 8
) -> Batch:
    """Lay each unit's samples out in one row, padded on the right to a common length.

    An empty unit (no samples) gives a row without a target. Without packing, a
    unit has at most one sample. ``pad_token_id`` may be any id of the
    vocabulary, also the EOS: what is padding is decided by position.

    Packed rows: positions restart at 0 with each sample, and with the padding,
    which thereby is a sample of its own that nothing attends to.
    Padded rows: positions come from the attention mask's running sum.
    """
    assert packed or all(len(unit) <= 1 for unit in units)
    longest = max((sum(len(s.input_ids) for s in unit) for unit in units), default=0)
    width = max(1, -(-longest // pad_to_multiple_of)) * pad_to_multiple_of
    shape = (len(units), width)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    targets = np.full(shape, IGNORED, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    for row, unit in enumerate(units):
        used = _fill_row(unit, input_ids[row], positions[row], targets[row])
        positions[row, used:] = np.arange(width - used)
        # An empty row keeps one visible token: attention over nothing at all is NaN.
        mask[row, : max(used, 1)] = True
    if not packed:
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        attention_mask=None if packed else torch.from_numpy(mask),
        targets=torch.from_numpy(targets),
    )


def _fill_row(
    unit: Sequence[Sample],
    input_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
) -> int:
    """Write a unit's samples into views of one row; returns the tokens used."""
    start = 0
    for sample in unit:
        length = len(sample.input_ids)
        stop = start + length
        input_ids[start:stop] = sample.input_ids
        positions[start:stop] = np.arange(length)
        # The last position predicts nothing: the next token belongs to another sample.
        targets[start : stop - 1] = np.where(sample.completion_mask[1:], sample.input_ids[1:], IGNORED)
        start = stop
    return start
