"""What one optimizer step did."""

from __future__ import annotations

from typing import Any, Literal

import torch

SkipReason = Literal["overflow", "non-finite gradient"]


class PendingSum:
    """A small vector on its way through an all-reduce and, from a GPU, to the host.

    The copy to the host is queued at once, right behind the all-reduce. So reading it
    waits for these two alone: a plain ``tolist()`` would wait for all that was queued
    on the GPU since, the next step included.
    """

    def __init__(self, vector: torch.Tensor, work: Any) -> None:
        self._vector = vector
        self._values: list[float] | None = None
        if vector.device.type == "cpu":
            self._wait = work.wait
            return
        work.wait()  # with NCCL the stream waits, not this thread
        self._vector = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        self._vector.copy_(vector, non_blocking=True)
        copied = torch.Event(vector.device)
        copied.record()
        self._wait = copied.synchronize

    def values(self) -> list[float]:
        """The summed vector as floats. Only the first call waits."""
        if self._values is None:
            self._wait()
            self._values = [float(value) for value in self._vector.tolist()]
        return self._values


class StepResult:
    """The outcome of one optimizer step (one accumulation window).

    ``loss``: mean over the window, all ranks: per supervised token after
    ``backward_token_sum``, per micro-batch after ``backward``.
    ``grad_norm``: L2 norm of the averaged gradient over all ranks and parameters,
    unscaled, before clipping; inf where the step was skipped for it.
    ``grad_norm_clipped``: the norm that the optimizer saw; None where the step was skipped.
    ``loss_scale``: the scale that this step's gradients carried; 1.0 without fp16.
    ``lr``: the rate of the first parameter group that this step used (or would have).
    ``skipped``, ``skip_reason``: whether the weights were left as they were, and why.
    ``num_tokens``: supervised tokens in the window, over all ranks; None after ``backward``.
    ``flag``: whether any rank called ``step(flag=True)`` in this window.

    ``loss``, ``flag`` and the norms become floats on first access, which waits for this
    step's all-reduce (``grad_norm``: for the whole step); every rank may read or not read
    as it likes. A loop that acts on the flag of the step **before** the one it has just
    issued therefore never makes a GPU wait: that all-reduce is long done.
    """

    __slots__ = (
        "_clip",
        "_norm",
        "_window",
        "loss_scale",
        "lr",
        "num_tokens",
        "skip_reason",
        "skipped",
        "step",
    )

    def __init__(
        self,
        *,
        step: int,
        lr: float,
        loss_scale: float,
        skip_reason: SkipReason | None,
        num_tokens: int | None,
        gradient_clipping: float,
        grad_norm: torch.Tensor | float,
        window: PendingSum,
    ) -> None:
        self.step = step
        self.lr = lr
        self.loss_scale = loss_scale
        self.skipped = skip_reason is not None
        self.skip_reason = skip_reason
        self.num_tokens = num_tokens
        self._clip = gradient_clipping
        self._norm = grad_norm
        self._window = window

    @property
    def loss(self) -> float:
        return self._window.values()[0]

    @property
    def flag(self) -> bool:
        return self._window.values()[1] > 0

    @property
    def grad_norm(self) -> float:
        self._norm = float(self._norm)
        return self._norm

    @property
    def grad_norm_clipped(self) -> float | None:
        if self.skipped:
            return None
        norm = self.grad_norm
        # DeepSpeed's own coefficient (zero/stage_1_and_2.py, unscale_and_clip_grads).
        return norm * min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else norm

    def __repr__(self) -> str:
        why = f", skipped for {self.skip_reason}" if self.skipped else ""
        return (
            f"StepResult(step={self.step}, loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g}, "
            f"lr={self.lr:.6g}, loss_scale={self.loss_scale:g}{why})"
        )
