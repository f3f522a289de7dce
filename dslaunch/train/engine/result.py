"""What one optimizer step did."""

from __future__ import annotations

from typing import Any, Literal

import torch

SkipReason = Literal["overflow", "non-finite gradient"]

# What a rank says of itself in the window's vector: a sum of these.
NONFINITE_GRADIENT, NONFINITE_LOSS = 1, 2
COURSE = 4  # times a number that says which parameters had gradients


class Pending:
    """A small tensor on its way to the host; with ``work`` through an all-reduce before that.

    The copy to the host is queued at once. So reading it waits for these two alone: a plain
    ``tolist()`` would wait for all that was queued on the GPU since, the next step included.
    """

    def __init__(self, tensor: torch.Tensor, work: Any = None) -> None:
        self._tensor = tensor
        self._values: list[float] | None = None
        if tensor.device.type == "cpu":
            self._wait = work.wait if work is not None else _ready
            return
        if work is not None:
            work.wait()  # with NCCL the stream waits, not this thread
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._tensor.copy_(tensor, non_blocking=True)
        copied = torch.Event(tensor.device)
        copied.record()
        self._wait = copied.synchronize

    def values(self) -> list[float]:
        """The tensor's elements as floats. Only the first call waits."""
        if self._values is None:
            self._wait()
            self._values = [float(value) for value in self._tensor.flatten().tolist()]
        return self._values


def _ready() -> None:
    pass


class StepResult:
    """The outcome of one optimizer step (one accumulation window).

    ``loss``: mean over the window, all ranks: per supervised token after
    ``backward_token_sum``, per micro-batch after ``backward``.
    ``grad_norm``: L2 norm of the averaged gradient over all ranks and parameters,
    unscaled, before clipping; inf where the step was skipped for it.
    ``grad_norm_clipped``: the norm that the optimizer saw; None where the step was skipped.
    ``loss_scale``, ``next_loss_scale``: the scale that this step's gradients carried, and that of
    the next step; 1.0 without fp16.
    ``hysteresis``, ``next_hysteresis``: the overflows, this one included, that end in a lower scale,
    before and after the step; None where there is no dynamic loss scale of DeepSpeed.
    ``lr``: the rate of the first parameter group that this step used (or would have).
    ``skipped``, ``skip_reason``: whether the weights were left as they were, and why.
    ``num_tokens``: supervised tokens in the window, over all ranks; None after ``backward``.
    ``flag``: whether any rank called ``step(flag=True)`` in this window.
    ``nonfinite_ranks``: the ranks whose own gradients held inf or nan before they met the others';
    ``nonfinite_loss_ranks``: those whose forward gave inf or nan already. ``unlike_ranks``: those that
    had gradients of other parameters than rank 0, where DeepSpeed adds up by place.

    ``loss``, ``flag``, the ranks and the norms become floats on first access, which waits for this
    step's all-reduce (``grad_norm``: for DeepSpeed's norm); every rank may read or not read
    as it likes. A loop that acts on the flag of the step **before** the one it has just
    issued therefore never makes a GPU wait: that all-reduce is long done.
    """

    __slots__ = (
        "_clip",
        "_norm",
        "_window",
        "hysteresis",
        "loss_scale",
        "lr",
        "next_hysteresis",
        "next_loss_scale",
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
        next_loss_scale: float,
        skip_reason: SkipReason | None,
        num_tokens: int | None,
        gradient_clipping: float,
        grad_norm: torch.Tensor | float,
        window: Pending,
        hysteresis: int | None = None,
        next_hysteresis: int | None = None,
    ) -> None:
        self.step = step
        self.lr = lr
        self.loss_scale = loss_scale
        self.next_loss_scale = next_loss_scale
        self.hysteresis = hysteresis
        self.next_hysteresis = next_hysteresis
        self.skipped = skip_reason is not None
        self.skip_reason = skip_reason
        self.num_tokens = num_tokens
        self._clip = gradient_clipping
        self._norm = Pending(grad_norm) if isinstance(grad_norm, torch.Tensor) else float(grad_norm)
        self._window = window

    @property
    def loss(self) -> float:
        return self._window.values()[0]

    @property
    def flag(self) -> bool:
        return self._window.values()[1] > 0

    @property
    def nonfinite_ranks(self) -> tuple[int, ...]:
        return self._ranks(NONFINITE_GRADIENT)

    @property
    def nonfinite_loss_ranks(self) -> tuple[int, ...]:
        return self._ranks(NONFINITE_LOSS)

    @property
    def unlike_ranks(self) -> tuple[int, ...]:
        courses = [int(code) // COURSE for code in self._window.values()[2:]]
        return tuple(rank for rank, course in enumerate(courses) if course != courses[0])

    def _ranks(self, bit: int) -> tuple[int, ...]:
        return tuple(rank for rank, code in enumerate(self._window.values()[2:]) if int(code) & bit)

    @property
    def grad_norm(self) -> float:
        return self._norm.values()[0] if isinstance(self._norm, Pending) else self._norm

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
