"""How many samples of each source an epoch has, and which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dslaunch.core.plan import DataSource
from dslaunch.train.data.order import seeded_permutation


def resolve_weights(sources: Sequence[DataSource]) -> list[float] | None:
    """The sources' weights as shares that add up to 1; None where no source has one.

    Resolving a run file has seen to it that all have one or none has, and that each is positive.
    """
    weights = [source.weight for source in sources]
    if all(weight is None for weight in weights):
        return None
    shares = [weight for weight in weights if weight is not None]
    assert len(shares) == len(sources) and all(0 < share < float("inf") for share in shares), weights
    return [share / sum(shares) for share in shares]


def draw_counts(total: int, shares: Sequence[float]) -> list[int]:
    """Split ``total`` by ``shares`` into whole numbers that add up to it (largest remainders first)."""
    exact = [total * share for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def draw_mix(sizes: Sequence[int], counts: Sequence[int], seed: int) -> npt.NDArray[np.int64]:
    """Which samples an epoch has: ids into the sources laid end to end, [sum(counts)], in seeded order.

    Of each source, ``counts[i]`` samples without replacement; once every sample
    was taken, again from all of them.
    """
    parts, start = [], 0
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        rounds = -(-count // size)
        drawn = [seeded_permutation(size, seed, "mix", index, turn) for turn in range(rounds)]
        parts.append(start + np.concatenate([np.empty(0, np.int64), *drawn])[:count])
        start += size
    together = np.concatenate(parts)
    return together[seeded_permutation(len(together), seed, "mix order")]
