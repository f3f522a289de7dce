"""Packs hold every sample once, fit, and are well filled."""

from __future__ import annotations

import numpy as np
import pytest

from dslaunch.train.data import packing
from dslaunch.train.data.packing import one_sample_units, pack_samples


def lognormal_lengths(count: int, longest: int = 512, seed: int = 0) -> np.ndarray:
    draws = np.random.default_rng(seed).lognormal(np.log(128), 0.6, count)
    return np.clip(draws, 1, longest).astype(np.int64)


@pytest.mark.parametrize("window", [1000, 1 << 20])
def test_every_sample_once_and_no_pack_too_long(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW", window)
    lengths = lognormal_lengths(5000)
    packs = pack_samples(lengths, 512, seed=1)
    assert sorted(packs.members.tolist()) == list(range(5000))
    totals = packs.sum_per_unit(lengths)
    assert len(totals) == len(packs)
    assert totals.max() <= 512
    assert totals.sum() == lengths.sum()
    assert totals.tolist() == [int(lengths[packs[i]].sum()) for i in range(len(packs))]


def test_packs_are_well_filled() -> None:
    lengths = lognormal_lengths(20_000)
    assert lengths.sum() / (len(pack_samples(lengths, 512, seed=0)) * 512) > 0.98


def test_the_smallest_gap_that_fits_is_taken() -> None:
    # 7 and 6 open packs with gaps 3 and 4; 4 fits only the second, 3 then fills the first.
    packs = pack_samples(np.array([3, 4, 6, 7]), 10, seed=0)
    assert sorted(sorted(packs[i].tolist()) for i in range(len(packs))) == [[0, 3], [1, 2]]


def test_seed_decides() -> None:
    lengths = lognormal_lengths(500)
    first, again, other = (pack_samples(lengths, 512, seed) for seed in (0, 0, 1))
    assert first.members.tolist() == again.members.tolist()
    assert first.members.tolist() != other.members.tolist()


def test_edges() -> None:
    assert len(pack_samples(np.array([], dtype=np.int64), 8, seed=0)) == 0
    assert len(pack_samples(np.array([8, 8]), 8, seed=0)) == 2
    for bad in ([9], [0]):
        with pytest.raises(ValueError, match="between 1 and 8"):
            pack_samples(np.array(bad), 8, seed=0)


def test_one_sample_units() -> None:
    units = one_sample_units(3)
    assert [units[i].tolist() for i in range(3)] == [[0], [1], [2]]
    assert units[-1].tolist() == []
    assert units.sum_per_unit(np.array([5, 6, 7])).tolist() == [5, 6, 7]
