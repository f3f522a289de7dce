"""Optimizers in float64, each from its paper: what N elements are after each gradient.

AdamW       Loshchilov and Hutter 2019, Algorithm 2      Adam       Kingma and Ba 2015, with L2
SGD         Sutskever et al. 2013, as torch documents it Lion       Chen et al. 2023, Algorithm 2
AdEMAMix    Pagliardini et al. 2024, Algorithm 1         Adafactor  Shazeer and Stern 2018, Algorithm 4
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def course(
    kind: str,
    start: Array,
    gradients: Sequence[Array],
    params: dict[str, Any],
    factors: Sequence[float] | None = None,
) -> list[Array]:
    """The weights after each step of ``params`` (lr, betas, ...); an array is one tensor.

    ``factors``: of the rates in each step.
    """
    weights, state, found = start.astype(np.float64).copy(), {}, []
    for step, gradient in enumerate(gradients, start=1):
        rates = [name for name in ("lr", "adam_lr") if name in params]
        now = params | {name: params[name] * (factors[step - 1] if factors else 1.0) for name in rates}
        weights = STEPS[kind](weights, np.asarray(gradient, dtype=np.float64), step, state, now)
        found.append(weights.copy())
    return found


def _average(state: dict[str, Any], name: str, value: Array, beta: float) -> Array:
    state[name] = beta * state.get(name, np.zeros_like(value)) + (1 - beta) * value
    result: Array = state[name]
    return result


def _adam_direction(g: Array, t: int, state: dict[str, Any], p: dict[str, Any]) -> Array:
    beta1, beta2 = p["betas"]
    first = _average(state, "m", g, beta1) / (1 - beta1**t)
    second = _average(state, "v", g * g, beta2) / (1 - beta2**t)
    return first / (np.sqrt(second) + p["eps"])


def _adamw(w: Array, g: Array, t: int, state: dict[str, Any], p: dict[str, Any]) -> Array:
    return w - p["lr"] * (_adam_direction(g, t, state, p) + p["weight_decay"] * w)


def _adam(w: Array, g: Array, t: int, state: dict[str, Any], p: dict[str, Any]) -> Array:
    return w - p["lr"] * _adam_direction(g + p["weight_decay"] * w, t, state, p)


def _sgd(w: Array, g: Array, t: int, state: dict[str, Any], p: dict[str, Any]) -> Array:
    g = g + p["weight_decay"] * w
    if not p["momentum"]:
        return w - p["lr"] * g
    state["m"] = g if t == 1 else p["momentum"] * state["m"] + (1 - p["dampening"]) * g
    return w - p["lr"] * (g + p["momentum"] * state["m"] if p["nesterov"] else state["m"])


def _lion(w: Array, g: Array, t: int, state: dict[str, Any], p: dict[str, Any]) -> Array:
    beta1, beta2 = p["betas"]
    direction = np.sign(beta1 * state.get("m", 0.0) + (1 - beta1) * g)
    _average(state, "m", g, beta2)
    return w - p["lr"] * (direction + p["weight_decay"] * w)


def _ademamix(w: Array, g: Array, t: int, state: dict[str, Any], p: dict[str, Any]) -> Array:
    beta1, beta2, beta3 = p["betas"]
    alpha = p["alpha"]
    if p.get("t_alpha"):
        alpha = min(t * alpha / p["t_alpha"], alpha)
    if p.get("t_beta3"):
        part, a, b = t / p["t_beta3"], math.log(beta1), math.log(beta3)
        beta3 = min(math.exp(a * b / ((1 - part) * b + part * a)), beta3) if part < 1 else beta3
    fast = _average(state, "m1", g, beta1) / (1 - beta1**t)
    slow = _average(state, "m2", g, beta3)
    second = _average(state, "v", g * g, beta2) / (1 - beta2**t)
    return w - p["lr"] * ((fast + alpha * slow) / (np.sqrt(second) + p["eps"]) + p["weight_decay"] * w)


def _adafactor(w: Array, g: Array, t: int, state: dict[str, Any], p: dict[str, Any]) -> Array:
    """As torch has it: lr caps the paper's relative step, rho_t = min(lr, 1/sqrt(t)); decay by lr."""
    eps1, eps2, beta2 = float(np.finfo(np.float32).eps), 1e-3, 1 - t ** p["beta2_decay"]
    rate = max(eps2, math.sqrt(float(np.mean(w * w)))) * min(p["lr"], 1 / math.sqrt(t))
    w = w * (1 - p["lr"] * p["weight_decay"])
    if g.ndim > 1:
        rows = _average(state, "r", np.mean(g * g, axis=-1, keepdims=True), beta2)
        columns = _average(state, "c", np.mean(g * g, axis=-2, keepdims=True), beta2)
        second = rows * columns / max(float(rows.mean()), eps1)
    else:
        second = _average(state, "v", g * g, beta2)
    update = g / np.sqrt(np.maximum(second, eps1 * eps1))
    return w - rate / max(1.0, math.sqrt(float(np.mean(update * update))) / p["d"]) * update


def _muon(w: Array, g: Array, t: int, state: dict[str, Any], p: dict[str, Any]) -> Array:
    """Matrices; the rest is AdamW's, at its own rate."""
    if g.ndim < 2:
        return _adamw(w, g, t, state, {**p, "lr": p["adam_lr"]})
    x = g + p["momentum"] * (_average(state, "m", g, p["momentum"]) - g)
    rows, columns = x.shape
    x = x.T if rows > columns else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = x.T if rows > columns else x
    return w * (1 - p["lr"] * p["weight_decay"]) - p["lr"] * math.sqrt(max(1.0, rows / columns)) * x


STEPS = {
    "Muon": _muon,
    "AdamW": _adamw,
    "Adam": _adam,
    "SGD": _sgd,
    "Lion": _lion,
    "AdEMAMix": _ademamix,
    "Adafactor": _adafactor,
}
