"""The gradient is the global token mean, however the batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dslaunch.losses.sft import token_nll
from tests.train.rank_cases import (
    RANK,
    SAMPLES,
    STAGES,
    WORLD_SIZE,
    Case,
    OneWeight,
    TinyLM,
    config,
    engine_for,
    gradient,
    master,
)

Values = Callable[[Any], list[float]]


def rows(indices: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples as one padded micro-batch (ids, targets)."""
    chosen = [SAMPLES[i] for i in indices]
    width = max(len(ids) for ids, _ in chosen)
    ids = torch.tensor([s + [0] * (width - len(s)) for s, _ in chosen])
    targets = torch.tensor([t + [-100] * (width - len(t)) for _, t in chosen])
    return ids, targets


def windows(micro: int) -> int:
    """How many micro-batches of ``micro`` a rank has of all eight samples."""
    return len(SAMPLES) // (micro * WORLD_SIZE)


def token_mean(engine: Any, micro: int, values: Values, gradients: Values) -> dict[str, Any]:
    """One window over all samples, by either engine. ``values``, ``gradients``: how to read a parameter's."""
    accumulation = windows(micro)
    num_tokens = sum(target != -100 for _, targets in SAMPLES for target in targets)
    start = [values(p) for p in engine.module.parameters()]
    for k in range(accumulation):
        first = (k * WORLD_SIZE + RANK) * micro
        ids, targets = rows(range(first, first + micro))
        loss = token_nll(engine(ids), targets)
        engine.backward_token_sum(loss.sum, num_tokens=num_tokens)
        if k < accumulation - 1:
            assert engine.step() is None
    grads = [gradients(p) for p in engine.module.parameters()]
    result = engine.step()
    assert result is not None
    return {
        "start": start,
        "gradients": grads,
        "end": [values(p) for p in engine.module.parameters()],
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "grad_norm_clipped": result.grad_norm_clipped,
        "num_tokens": result.num_tokens,
    }


def mean_of_two(engine: Any, values: Values) -> dict[str, Any]:
    """``backward``: rank r, micro-batch k has gradient 1 + 2r + 10k; 2 x 2 of them."""
    for k in range(2):
        engine.backward(engine(torch.tensor([1.0 + 2 * RANK + 10 * k])) + 3.0)
        result = engine.step()
    assert result is not None
    return {"end": values(engine.module.w), "loss": result.loss, "num_tokens": result.num_tokens}


def token_mean_gradient(stage: int, micro: int) -> dict[str, Any]:
    with engine_for(TinyLM(), config(stage, micro=micro, accumulation=windows(micro))) as engine:
        return token_mean(engine, micro, master, gradient)


def mean_of_micro_batches(stage: int) -> dict[str, Any]:
    with engine_for(OneWeight(), config(stage, accumulation=2)) as engine:
        return mean_of_two(engine, master)


def token_mean_cases() -> dict[str, Case]:
    micros = (1, len(SAMPLES) // WORLD_SIZE)
    return {
        f"gradient/{stage}/{micro}": lambda s=stage, m=micro: token_mean_gradient(s, m)  # type: ignore[misc]
        for stage in STAGES
        for micro in micros
    }


def all_cases() -> dict[str, Case]:
    mean: dict[str, Case] = {
        f"mean/{stage}": lambda s=stage: mean_of_micro_batches(s)  # type: ignore[misc]
        for stage in STAGES
    }
    return {**token_mean_cases(), **mean}
