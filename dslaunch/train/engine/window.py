"""What an accumulation window gathers, and its one all-reduce."""

from __future__ import annotations

import torch

from dslaunch.train.engine.result import COURSE, NONFINITE_GRADIENT, NONFINITE_LOSS, Pending


class Window:
    """Adds up the micro-batches of one accumulation window on this rank.

    All stays on the device, in float64 where the device has it, and meets the other ranks in one
    small vector at the end of the window: [loss, flag, what rank 0 says of itself, rank 1, ...].
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self._clear()

    def _clear(self) -> None:
        self._loss: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None
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

    def add_gradients(self, witness: torch.Tensor | None) -> None:
        """Add a scalar that is finite if and only if a micro-batch's gradients on this rank were."""
        if witness is not None:
            self._gradients = witness if self._gradients is None else self._gradients + witness

    def flag(self, raised: bool) -> None:
        """Keep ``raised`` for the window's end; once up it stays up."""
        self._flag = self._flag or raised

    def reduce(self, course: int = 0) -> Pending:
        """Start the all-reduce and begin a new window. Collective. ``course``: see ``LocalGradients``."""
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        vector = torch.zeros(2 + world_size, dtype=self._dtype, device=self._device)
        for value, bit in ((self._loss, NONFINITE_LOSS), (self._gradients, NONFINITE_GRADIENT)):
            if value is not None:
                vector[2 + rank] += bit * ~torch.isfinite(value)
        if self._dtype == torch.float64:
            vector[2 + rank] += course * COURSE
        if self._loss is not None:
            vector[0] = self._loss
        vector[1] = float(self._flag)
        self._clear()
        return Pending(vector, torch.distributed.all_reduce(vector, async_op=True))
