"""Tokenised data as units: what one row of a batch holds, packed or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dslaunch.core.plan import DataPlan
from dslaunch.train.data.collate import Batch, collate
from dslaunch.train.data.packing import Packs, one_sample_units, pack_samples


@dataclass(frozen=True)
class Corpus:
    """A data set cut into units. Per-unit counts are arrays [num_units] of int64.

    ``num_supervised``: trained tokens; ``lengths``: all tokens.
    """

    dataset: Any
    packs: Packs
    packed: bool
    pad_token_id: int
    num_supervised: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def fingerprint(self) -> str:
        """Changes whenever the tokens or their mask would."""
        return str(self.dataset.fingerprint)

    def batch(self, units: Sequence[int]) -> Batch:
        """One row a unit; -1 gives a row without targets."""
        rows = [[self.dataset[int(sample)] for sample in self.packs[unit]] for unit in units]
        return collate(rows, pad_token_id=self.pad_token_id, packed=self.packed)

    def count_supervised(self, units: np.ndarray[Any, Any]) -> int:
        """Trained tokens of ``units``, ignoring -1."""
        return int(self.num_supervised[units[units >= 0]].sum())

    def count_tokens(self, units: np.ndarray[Any, Any]) -> int:
        """All tokens of ``units``, padding not counted, ignoring -1."""
        return int(self.lengths[units[units >= 0]].sum())


def build_corpus(dataset: Any, data: DataPlan, *, pad_token_id: int, seed: int) -> Corpus:
    """Units of ``dataset``: packs of up to ``data.max_length`` tokens, or one sample each."""
    lengths = np.asarray(dataset.lengths)
    packs = pack_samples(lengths, data.max_length, seed) if data.packing else one_sample_units(len(dataset))
    return Corpus(
        dataset=dataset,
        packs=packs,
        packed=data.packing,
        pad_token_id=pad_token_id,
        num_supervised=packs.sum_per_unit(np.asarray(dataset.num_supervised)),
        lengths=packs.sum_per_unit(lengths),
    )
