"""Mixed-precision training of a linear loss, in float64 and numpy: what every engine must do.

loss = mean over ranks and micro-batches of sum(round(w) * x), so the gradient of a micro-batch is
its x. Written from the descriptions of the algorithms (loss scaling: tests/oracles/loss_scaler.py;
AdamW: Loshchilov and Hutter 2019, Algorithm 2; SGD: Sutskever et al. 2013 in PyTorch's form). Only
what the formats themselves round is rounded: weights and products to the 16-bit format, an
overflowing scaled gradient to inf. The x are multiples of 1/32 of few bits, so that sums and means
of them are exact in every format and all that is left is the fp32 arithmetic of the optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.loss_scaler import Scaler

Array = np.ndarray[Any, Any]
LARGEST = {"fp32": 3.4028235e38, "bf16": 3.3895314e38, "fp16": 65504.0}
LR, BETAS, EPS, WEIGHT_DECAY = 0.05, (0.9, 0.99), 1e-8, 0.1
MOMENTUM, DAMPENING = 0.9, 0.25


def round_to(precision: str, values: Array) -> Array:
    """To the nearest number of the format, ties to even, as float64."""
    if precision == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float64)
    single = values.astype(np.float32)
    if precision == "fp32":
        return single.astype(np.float64)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def loss_of(precision: str, masters: Array, x: Array) -> float:
    """What forward makes of the fp32 weights; ``x`` of shape [ranks, accumulation, elements]."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(round_to(precision, round_to(precision, masters) * x).sum(axis=-1).mean())


@dataclass
class AdamW:
    first: Any = 0.0
    second: Any = 0.0
    steps: int = 0

    def update(self, weights: Array, gradient: Array, lr: float) -> Array:
        self.steps += 1
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        corrected = self.first / (1 - BETAS[0] ** self.steps)
        spread = np.sqrt(self.second / (1 - BETAS[1] ** self.steps))
        return weights * (1 - lr * WEIGHT_DECAY) - lr * corrected / (spread + EPS)


@dataclass
class Momentum:
    """The first step takes the gradient whole, as PyTorch has it; dampening begins with the second."""

    buffer: Array | None = None

    def update(self, weights: Array, gradient: Array, lr: float) -> Array:
        damped = gradient if self.buffer is None else MOMENTUM * self.buffer + (1 - DAMPENING) * gradient
        self.buffer = damped
        return weights - lr * damped


class AtMinimum(Exception):
    """An overflow at the smallest loss scale."""


@dataclass
class Training:
    """One run. ``scaler``: of a dynamic scale; ``static_scale``: of one that stays, 1 without scaling."""

    precision: str
    weights: Array
    optimizer: AdamW | Momentum
    clipping: float
    accumulation: int
    scaler: Scaler | None = None
    static_scale: float = 1.0
    applied: int = field(default=0, init=False)

    @property
    def scale(self) -> float:
        return self.scaler.scale if self.scaler else self.static_scale

    def step(self, x: Array) -> dict[str, Any]:
        """One window; ``x`` of shape [ranks, accumulation, elements]. Raises AtMinimum."""
        lr, scale = LR * (1 - 0.03 * self.applied), self.scale
        loss = loss_of(self.precision, self.weights, x)
        with np.errstate(invalid="ignore", over="ignore"):
            finite = bool((np.abs(x * scale / self.accumulation) <= LARGEST[self.precision]).all())
        record = {"lr": lr, "scale": scale, "loss": loss, "skipped": not finite}
        if self.scaler:
            self._move_scale(overflow=not finite)
        if not finite:
            return {**record, "norm": math.inf, "clipped": None, "weights": self.weights.tolist()}
        gradient = x.mean(axis=(0, 1))
        norm = float(np.sqrt((gradient**2).sum()))
        factor = min(1.0, self.clipping / (norm + 1e-6)) if self.clipping else 1.0
        self.weights = self.optimizer.update(self.weights, gradient * factor, lr)
        self.applied += 1
        return {**record, "norm": norm, "clipped": norm * factor, "weights": self.weights.tolist()}

    def _move_scale(self, *, overflow: bool) -> None:
        assert self.scaler is not None
        at_floor = self.scaler.left == 1 and self.scaler.scale == self.scaler.minimum
        if overflow and at_floor:
            raise AtMinimum
        self.scaler.step(overflow)
