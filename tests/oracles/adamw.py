"""AdamW on one number, from the paper's algorithm (Loshchilov and Hutter, 2019, Algorithm 2), in float64."""

from __future__ import annotations

import math


def trajectory(
    start: float,
    gradients: list[float],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> list[float]:
    """The weight after each step."""
    weight, first, second = start, 0.0, 0.0
    course = []
    for step, gradient in enumerate(gradients, start=1):
        weight -= lr * weight_decay * weight
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient * gradient
        corrected = first / (1 - betas[0] ** step)
        spread = math.sqrt(second / (1 - betas[1] ** step))
        weight -= lr * corrected / (spread + eps)
        course.append(weight)
    return course
