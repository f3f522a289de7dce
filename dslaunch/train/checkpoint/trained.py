"""Which parameters of a model are trained: those are what a checkpoint holds."""

from __future__ import annotations

import math

import torch


def trainable_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of each parameter that requires a gradient (also when partitioned)."""
    return {
        name: tuple(getattr(p, "ds_shape", p.shape))
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def has_frozen(module: torch.nn.Module) -> bool:
    """Whether any parameter requires no gradient."""
    return any(not p.requires_grad for p in module.parameters())


@torch.no_grad()
def weight_sums(module: torch.nn.Module) -> tuple[float, float] | None:
    """(sum, sum of squares) of the trained weights that this rank holds, in float64.

    At stage 3 that is its share of each. None where they are not in memory (NVMe), or not finite.
    """
    total, squares = 0.0, 0.0
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        held = held_values(parameter)
        if held is None:
            return None
        total += float(held.sum(dtype=torch.float64))
        squares += float(torch.linalg.vector_norm(held, dtype=torch.float64)) ** 2
    return (total, squares) if math.isfinite(total + squares) else None


def are_same_sums(saved: tuple[float, float] | None, here: tuple[float, float] | None) -> bool:
    """Whether two :func:`weight_sums` can be of the same weights, added up in any order."""
    if saved is None or here is None:
        return True
    norm = math.sqrt(saved[1])
    return abs(here[1] - saved[1]) <= 1e-9 * saved[1] and abs(here[0] - saved[0]) <= 1e-9 * norm


def held_values(parameter: torch.Tensor) -> torch.Tensor | None:
    """What this rank holds of ``parameter``: all of it, or at stage 3 its share; None: it is on NVMe."""
    share = getattr(parameter, "ds_tensor", None)
    if share is None:
        return parameter
    if share.status.name != "AVAILABLE":
        return None
    # The last share is as long as the others: what fills it up is no weight, and may be anything.
    start = parameter.ds_zero_partition_rank * share.ds_numel  # type: ignore[attr-defined]
    rest = max(0, parameter.ds_numel - start)  # type: ignore[attr-defined]
    held: torch.Tensor = share.flatten()[:rest]
    return held
