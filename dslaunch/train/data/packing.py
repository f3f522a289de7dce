"""Which samples share a row: packs, as a table from unit to samples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dslaunch.train.data.order import seeded_permutation

Int64Array = npt.NDArray[np.int64]

# Best-fit decreasing within one window of this many samples. Large enough that
# the last, half-empty packs of a window do not matter.
WINDOW = 131_072


@dataclass(frozen=True)
class Packs:
    """Units and their samples, as compressed rows.

    Unit ``i`` holds samples ``members[offsets[i]:offsets[i + 1]]``, in that order.
    ``offsets`` [num_units + 1] and ``members`` [num_samples] are int64.
    """

    offsets: Int64Array
    members: Int64Array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, unit: int) -> Int64Array:
        """The sample ids of ``unit``; none for the empty unit -1."""
        if unit < 0:
            return self.members[:0]
        return self.members[self.offsets[unit] : self.offsets[unit + 1]]

    def sum_per_unit(self, per_sample: npt.NDArray[Any]) -> Int64Array:
        """Add up a per-sample count [num_samples] over each unit: [num_units]."""
        totals = np.concatenate(([0], np.cumsum(per_sample[self.members], dtype=np.int64)))
        sums: Int64Array = totals[self.offsets[1:]] - totals[self.offsets[:-1]]
        return sums


def one_sample_units(num_samples: int) -> Packs:
    """Units without packing: unit ``i`` is sample ``i``."""
    return Packs(np.arange(num_samples + 1, dtype=np.int64), np.arange(num_samples, dtype=np.int64))


def pack_samples(lengths: npt.NDArray[Any], max_length: int, seed: int) -> Packs:
    """Put samples of ``lengths`` tokens [num_samples] into rows of at most ``max_length``.

    The samples are shuffled by ``seed``, then best-fit decreasing runs within
    windows of ``WINDOW`` samples, so that the packs do not follow the order of
    the file. Every sample is in exactly one pack. A second or two for 10^6.
    Raises ValueError if a sample is longer than ``max_length`` or is empty.
    """
    if len(lengths) and (int(lengths.max()) > max_length or int(lengths.min()) < 1):
        raise ValueError(f"sample lengths must lie between 1 and {max_length}")
    order = seeded_permutation(len(lengths), seed, "packs")
    # One array a window: a hundred million samples would not fit as Python numbers.
    sizes = [np.zeros(1, dtype=np.int64)]
    members = [np.empty(0, dtype=np.int64)]
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        packs = _best_fit_decreasing(window, lengths[window], max_length)
        sizes.append(np.fromiter((len(pack) for pack in packs), dtype=np.int64))
        members.append(np.fromiter(chain.from_iterable(packs), dtype=np.int64))
    return Packs(np.cumsum(np.concatenate(sizes)), np.concatenate(members))


def _best_fit_decreasing(samples: Int64Array, lengths: npt.NDArray[Any], max_length: int) -> list[list[int]]:
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(max_length + 1)]  # free tokens -> packs
    # Bit r is set while some pack has exactly r free tokens: the smallest gap
    # that fits is then the lowest set bit at or above the length.
    rooms = 0
    for sample, length in zip(samples[by_length].tolist(), lengths[by_length].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = max_length, len(packs)
            packs.append([])
        packs[pack].append(sample)
        room -= length
        with_room[room].append(pack)
        rooms |= 1 << room
    return packs
