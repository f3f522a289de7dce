"""Whether the gradients of this rank are finite before they meet those of the other ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class LocalGradients:
    """Looks at every gradient of this rank as backward makes it.

    After the reduction inf and nan are everywhere, and which rank they came from is lost. A sum
    is not finite if one of its terms is not, and costs one pass over the gradient; it stays on
    the device. (The sum of huge finite numbers may overflow as well: what this finds is read only
    where DeepSpeed has skipped the step.)
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._sums: dict[torch.dtype, list[torch.Tensor]] = {}
        self._handles = [p.register_hook(self._see) for p in parameters if p.requires_grad]

    def _see(self, gradient: torch.Tensor) -> None:
        # Sums of fp16 must not overflow by themselves; bf16 is added up in fp32 inside of the kernel.
        dtype = torch.float32 if gradient.dtype == torch.float16 else gradient.dtype
        total = gradient.detach().sum(dtype=dtype)
        self._sums.setdefault(total.dtype, []).append(total)

    def take(self) -> torch.Tensor | None:
        """A scalar, finite if and only if all gradients since the last call were; None: there were none."""
        parts = [torch.stack(sums).sum(dtype=torch.float32) for sums in self._sums.values()]
        self._sums.clear()
        return torch.stack(parts).sum() if parts else None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
