"""The value range of a tensor, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Range:
    """``low``, ``high`` and ``absmax`` are of the finite values; None where there is none.

    ``first_bad``: the index of the first value that is nan or inf. ``limit``: the largest
    finite number of ``dtype``.
    """

    shape: tuple[int, ...]
    dtype: str
    limit: float
    low: float | None
    high: float | None
    absmax: float | None
    num_nan: int
    num_inf: int
    first_bad: tuple[int, ...] | None = None

    @property
    def is_finite(self) -> bool:
        return not (self.num_nan or self.num_inf)

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``share_nonfinite`` is the share of all values."""
        count = 1
        for size in self.shape:
            count *= size
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "limit": self.limit,
            "min": self.low,
            "max": self.high,
            "absmax": self.absmax,
            "num_nan": self.num_nan,
            "num_inf": self.num_inf,
            "share_nonfinite": (self.num_nan + self.num_inf) / max(count, 1),
            "first_bad": None if self.first_bad is None else list(self.first_bad),
        }


@torch.no_grad()
def measure(tensor: torch.Tensor) -> Range:
    """The range of a floating-point tensor. Waits for the device."""
    tensor = tensor.detach()
    bad = ~torch.isfinite(tensor)
    num_bad = int(bad.sum())
    num_nan = int(torch.isnan(tensor).sum()) if num_bad else 0
    finite = tensor[~bad] if num_bad else tensor
    low = high = None
    if finite.numel():
        low, high = (float(value) for value in torch.aminmax(finite))
    first = tuple(int(i) for i in bad.nonzero()[0]) if num_bad else None
    return Range(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        limit=float(torch.finfo(tensor.dtype).max),
        low=low,
        high=high,
        absmax=None if low is None or high is None else max(abs(low), abs(high)),
        num_nan=num_nan,
        num_inf=num_bad - num_nan,
        first_bad=first,
    )
