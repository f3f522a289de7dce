"""Which parameters of a model are trained: those are what a checkpoint holds."""

from __future__ import annotations

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
