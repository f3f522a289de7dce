"""OptimizerPlan -> what ``initialize(optimizer=...)`` takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.core.plan import OptimizerPlan
from dslaunch.train.optimizers.ademamix import AdEMAMix
from dslaunch.train.optimizers.lion import Lion
from dslaunch.train.optimizers.muon import build_muon

_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdEMAMix": AdEMAMix,
    "Lion": Lion,
    # DeepSpeed makes these, but for engine torch.
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adafactor": torch.optim.Adafactor,
}
_OF_BITSANDBYTES = ("AdamW8bit", "PagedAdamW8bit")


def build_optimizer(
    plan: OptimizerPlan, model: torch.nn.Module
) -> Callable[..., torch.optim.Optimizer] | None:
    """As :func:`build_torch_optimizer`; None where the config names it."""
    return None if plan.made_by == "deepspeed" else build_torch_optimizer(plan, model)


def build_torch_optimizer(
    plan: OptimizerPlan, model: torch.nn.Module
) -> Callable[..., torch.optim.Optimizer]:
    """A callable that makes the optimizer of parameters or groups of ``model``.

    Raises EnvironmentNotReady where its package is missing.
    """
    if plan.type == "Muon":
        return build_muon(model, plan.params)
    kind = _from_bitsandbytes(plan.type) if plan.type in _OF_BITSANDBYTES else _KINDS[plan.type]
    params = {key: tuple(v) if isinstance(v, list) else v for key, v in plan.params.items()}
    return functools.partial(kind, **params)


def _from_bitsandbytes(name: str) -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise EnvironmentNotReady(
            f"optimizer.type {name} needs bitsandbytes: {error}",
            hint="pip install bitsandbytes (constraints.txt has the version), or use AdamW",
        ) from None
    return getattr(bitsandbytes.optim, name)
