"""Whether the gradients of this rank are finite before they meet the other ranks', and whose they are."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

COURSES = 2**48  # with two bits more it is exact in float64


class LocalGradients:
    """Looks at every gradient of this rank as backward makes it.

    After the reduction inf and nan are everywhere, and which rank they came from is lost. A sum
    is not finite if one of its terms is not, and costs one pass over the gradient; it stays on
    the device. (The sum of huge finite numbers may overflow as well: what this finds is read only
    where DeepSpeed has skipped the step.)

    The sums are written into one vector that is kept. A tensor for each would lie between the gradients
    in the heap, which the allocator then cannot hand back in one piece: the page faults of that cost
    more than the sums (docs/numerics.md, "What watching costs").
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        trained = [p for p in parameters if p.requires_grad]
        self._size = len(trained) + 1  # one more: the first holds what did not fit
        self._sums: dict[torch.dtype, _Sums] = {}
        self._order: dict[torch.dtype, int] = {}
        self._came: set[int] = set()
        self._handles = [p.register_hook(functools.partial(self._see, i)) for i, p in enumerate(trained)]

    def _see(self, index: int, gradient: torch.Tensor) -> None:
        self._came.add(index)
        self._order[gradient.dtype] = hash((self._order.get(gradient.dtype, 0), index))
        gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient._values()
        # Sums of fp16 must not overflow by themselves; bf16 is added up in fp32 inside of the kernel.
        dtype = torch.float32 if gradient.dtype == torch.float16 else gradient.dtype
        if dtype not in self._sums:
            self._sums[dtype] = _Sums(torch.zeros(self._size, dtype=dtype, device=gradient.device))
        self._sums[dtype].add(gradient)

    def take(self) -> torch.Tensor | None:
        """A scalar, finite if and only if all gradients since the last call were; None: there were none."""
        parts = [sums.take() for sums in self._sums.values() if sums.count]
        return torch.stack(parts).sum() if parts else None

    def take_course(self, *, ordered: bool) -> int:
        """A number that two ranks share if since the last call the same parameters had gradients.

        ``ordered``: and in the same order, those of each dtype. Hashes of whole numbers alone: those of
        None and of texts are others in each process.
        """
        orders = tuple(sorted((str(dtype), order) for dtype, order in self._order.items()))
        course = hash(tuple(order for _, order in orders) if ordered else frozenset(self._came))
        self._order, self._came = {}, set()
        return course % COURSES

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Sums:
    """Sums of gradients, in a vector of at least two that is made once."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector
        self.count = 0

    def add(self, gradient: torch.Tensor) -> None:
        """Write the sum of all elements into the next place."""
        if self.count == len(self._vector):  # a parameter was met more than once
            self._vector[0] = self._vector.sum()
            self.count = 1
        torch.sum(gradient, dim=None, dtype=self._vector.dtype, out=self._vector[self.count])
        self.count += 1

    def take(self) -> torch.Tensor:
        """The sum of them, in fp32, and begin anew."""
        total = self._vector[: self.count].sum(dtype=torch.float32)
        self.count = 0
        return total
