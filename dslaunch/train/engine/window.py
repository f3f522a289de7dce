"""What an accumulation window gathers, and its one all-reduce."""

from __future__ import annotations

import torch

from dslaunch.train.engine.result import PendingSum


class Window:
    """Adds up the micro-batches of one accumulation window on this rank.

    The loss stays on the device, in float64 where the device has it, and meets the
    other ranks in one small vector [loss, flag] at the end of the window.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self._clear()

    def _clear(self) -> None:
        self._loss: torch.Tensor | None = None
        self._flag = False
        self.num_tokens: int | None = None

    def add(self, loss_share: torch.Tensor, *, num_tokens: int | None) -> None:
        """Add a micro-batch's part of the window's loss (detached scalar).

        Raises ValueError where ``num_tokens`` is not that of the window's other micro-batches.
        """
        if self._loss is None:
            self._loss = torch.zeros((), dtype=self._dtype, device=self._device)
            self.num_tokens = num_tokens
        elif num_tokens != self.num_tokens:
            raise ValueError(
                f"num_tokens changed inside an accumulation window, from {self.num_tokens} to {num_tokens}; "
                "it counts the supervised tokens of the whole window over all ranks"
            )
        self._loss += loss_share.to(self._dtype)

    def flag(self, raised: bool) -> None:
        """Keep ``raised`` for the window's end; once up it stays up."""
        self._flag = self._flag or raised

    def reduce(self) -> PendingSum:
        """Start the all-reduce and begin a new window. Collective."""
        flag = torch.full((), float(self._flag), dtype=self._dtype, device=self._device)
        loss = self._loss if self._loss is not None else torch.zeros_like(flag)
        vector = torch.stack([loss, flag])
        self._clear()
        return PendingSum(vector, torch.distributed.all_reduce(vector, async_op=True))
