"""Which samples of a micro-batch break it: the same batch with the others blanked out, by halves."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass

from dslaunch.train.data.collate import IGNORED, Batch
from dslaunch.train.replay.window import SamplePlace


@dataclass(frozen=True)
class Guilt:
    """Indices of the samples that break the batch, each by itself; or only ``together``.

    ``any_sample``: it breaks without any of them: the fault is not in the data.
    """

    samples: tuple[int, ...]
    together: bool = False
    any_sample: bool = False


def bisect(count: int) -> Generator[tuple[int, ...], bool, Guilt]:
    """Yields sets of samples to try and is sent whether each breaks; all of them together do.

    Takes at most 2 k log2(count) + 1 tries for k guilty samples.
    """
    if (yield ()):
        return Guilt((), any_sample=True)
    samples, together = yield from _search(tuple(range(count)))
    return Guilt(tuple(sorted(samples)), together)


def _search(items: tuple[int, ...]) -> Generator[tuple[int, ...], bool, tuple[tuple[int, ...], bool]]:
    """The guilty among ``items``, which break."""
    if len(items) <= 1:
        return items, False
    half = (len(items) + 1) // 2
    guilty: tuple[int, ...] = ()
    together = False
    for part in (items[:half], items[half:]):
        if (yield part):
            found, only_together = yield from _search(part)
            guilty, together = guilty + found, together or only_together
    # Neither half breaks by itself: what is too much is the sum of both.
    return (guilty, together) if guilty else (items, True)


def keep_only(batch: Batch, places: Sequence[SamplePlace], kept: Collection[int], filler: int) -> Batch:
    """``batch`` with the samples that are not ``kept`` made of the token ``filler``, and not trained on.

    Everything keeps its place and its shape, so that dropout draws the same.
    """
    ids, targets = batch.input_ids.clone(), batch.targets.clone()
    for index, place in enumerate(places):
        if index not in kept:
            ids[place.row, place.start : place.stop] = filler
            targets[place.row, place.start : place.stop] = IGNORED
    return dataclasses.replace(batch, input_ids=ids, targets=targets)
