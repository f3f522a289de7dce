"""Seeded orders that no library version can change.

numpy promises no stable stream for ``Generator.permutation``, and a run that
resumes after an upgrade must see its data in the order in which it began.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def seeded_permutation(length: int, seed: int, *purpose: str | int) -> npt.NDArray[np.int64]:
    """A permutation of ``range(length)``, [length], fixed by ``seed`` and ``purpose`` for ever.

    Sorts the numbers by the output of splitmix64 (Steele, Lea and Flood 2014,
    "Fast splittable pseudorandom number generators", section 4) from a start
    that SHA-256 derives from the seed and the purpose.
    """
    text = "\0".join(str(part) for part in (seed, *purpose))
    start = np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))
    with np.errstate(over="ignore"):
        z = (np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) + start
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.argsort(z, kind="stable").astype(np.int64, copy=False)
