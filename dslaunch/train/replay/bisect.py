"""Which samples of a micro-batch break it: the same batch with the others blanked out, by halves."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass


@dataclass(frozen=True)
class Guilt:
    """Indices of the samples that break the batch, each by itself; or only ``together``.

    ``any_sample``: it breaks without any of them: the fault is not in the data.
    """

    samples: tuple[int, ...]
    together: bool = False
    any_sample: bool = False


def bisect(count: int, *, can_be_empty: bool = True) -> Generator[tuple[int, ...], bool, Guilt]:
    """Yields sets of samples to try and is sent whether each breaks; all of them together do.

    Takes at most 2 k log2(count) + 1 tries for k guilty samples. Where a batch cannot be tried without any
    of its samples, any of them is to blame where each breaks by itself.
    """
    if can_be_empty and (yield ()):
        return Guilt((), any_sample=True)
    samples, together = yield from _search(tuple(range(count)))
    each = not can_be_empty and not together and len(samples) == count > 1
    return Guilt((), any_sample=True) if each else Guilt(tuple(sorted(samples)), together)


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
