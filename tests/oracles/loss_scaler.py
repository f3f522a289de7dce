"""The rule of a dynamic loss scale, written from its description, in plain Python.

On an overflow the hysteresis is used up first, then the scale is halved (not below
``minimum``); after ``window`` + 1 good steps from the start or from an overflow, and
then after every ``window`` more, it is doubled.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Scaler:
    scale: float
    window: int
    hysteresis: int = 1
    consecutive: bool = False
    minimum: float = 1.0

    def __post_init__(self) -> None:
        self.left = self.hysteresis
        self.good_since_overflow = 0

    def step(self, overflow: bool) -> bool:
        """Update for one step; returns whether the scale grew."""
        if overflow:
            self.good_since_overflow = 0
            if self.left > 1:
                self.left -= 1
            else:
                self.scale = max(self.scale / 2, self.minimum)
            return False
        if self.consecutive:
            self.left = self.hysteresis
        grows = self.good_since_overflow > 0 and self.good_since_overflow % self.window == 0
        self.good_since_overflow += 1
        if grows:
            self.scale *= 2
            self.left = self.hysteresis
        return grows


def course(scaler: Scaler, overflows: set[int], steps: int) -> list[float]:
    """The scale after each of ``steps`` steps."""
    scales = []
    for step in range(steps):
        scaler.step(step in overflows)
        scales.append(scaler.scale)
    return scales
