"""The constructors as judge: each argument of each optimizer and schedule with each of many values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dslaunch.config.check import Target, check_config
from dslaunch.config.schema.optimizers import NEEDED, OPTIMIZERS, SCHEDULES, TORCH_SCHEDULES, Optimizer
from dslaunch.core.devices import lookup_device

VALUES: list[Any] = [
    True, 0, 1, -1, 0.5, 1.5, 2, 100, "1e-4", "x", None, [], [0.9], [0.9, 0.99], [0.9, 1.5], [1.0, 0.9],
    [-0.1, 0.9], ["a", "b"], [None, 0.1], [0.9, 0.9, 0.9], {"a": 1},
]  # fmt: skip
# DeepSpeed takes these out before it calls torch.
NOT_TORCHS = {"adam_w_mode", "torch_adam", "fp32_optimizer_states", "set_grad_none", "bias_correction"}
BASE: dict[str, Any] = {
    "total_num_steps": 20, "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "T_max": 5, "T_0": 5, "base_lr": 1e-4,
    "max_lr": 1e-3, "gamma": 0.9, "milestones": [2], "step_size": 3,
}  # fmt: skip
# The number of parameter groups, and of steps, is the script's.
OTHERS = ("expected 1", "same length as optimizer.param_groups", "Tried to step")
# Accepted without a check of the value, which then means something else: a type, a rate that rises, no steps.
LENIENT = {"type", "range"}


def errors(section: dict[str, Any]) -> list[str]:
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, **section}
    findings = check_config(
        json.dumps(config), Target(world_size=1, devices=(lookup_device("cpu"),))
    ).findings
    return [finding.code for finding in findings if finding.severity == "error"]


def optimizer_says(optimizer: Optimizer, params: dict[str, Any]) -> str | None:
    """What torch's own raises for two steps; None where it takes them."""
    import torch

    weights = [torch.nn.Parameter(torch.ones(size)) for size in (8, 4)]
    try:
        built = getattr(torch.optim, optimizer.name)(weights, **params)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            built.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if all(weight.isfinite().all() for weight in weights) else "not finite"


def schedule_says(name: str, params: dict[str, Any]) -> str | None:
    """What the schedule raises for four steps; None where it takes them."""
    import torch
    from deepspeed.runtime import lr_schedules

    weight = torch.nn.Parameter(torch.ones(4))
    adam = torch.optim.AdamW([weight], lr=1e-3)
    try:
        constructor = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
        built = constructor(adam, **params)
        for _ in range(4):
            weight.grad = torch.ones(4)
            adam.step()
            built.step(*((8,) if name == "ReduceLROnPlateau" else ()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def compare(label: str, said: str | None, codes: list[str]) -> list[str]:
    """A disagreement in words."""
    if said is not None and not codes and not any(text in said for text in OTHERS):
        return [f"{label}: refused ({said.splitlines()[0]}), no error here"]
    return [f"{label}: accepted, {codes} here"] if said is None and set(codes) - LENIENT else []


FROM_TORCH = [o for o in OPTIMIZERS.values() if o.from_torch or o.name in ("Adam", "AdamW", "Adagrad")]


@pytest.mark.parametrize("optimizer", FROM_TORCH, ids=[optimizer.name for optimizer in FROM_TORCH])
def test_arguments_of_an_optimizer(optimizer: Optimizer) -> None:
    adam, wrong = optimizer.name in ("Adam", "AdamW"), []
    skipped = NOT_TORCHS | ({"amsgrad"} if optimizer.name == "Adagrad" else set())
    for key in sorted(optimizer.params - skipped):
        for value in VALUES:
            params = {"lr": 1e-3, key: value}
            written = {**params, "torch_adam": True} if adam else params
            codes = errors({"optimizer": {"type": optimizer.name, "params": written}})
            wrong += compare(f"{key} = {value}", optimizer_says(optimizer, params), codes)
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore")  # torch's words on schedules that are stepped past their end
@pytest.mark.parametrize("name", [*SCHEDULES, *TORCH_SCHEDULES])
def test_arguments_of_a_schedule(name: str) -> None:
    base = {key: BASE[key] for key in NEEDED.get(name, ()) if key in BASE}
    base |= {"total_steps": 10} if name == "OneCycleLR" else {}
    wrong = []
    for key in sorted({**SCHEDULES, **TORCH_SCHEDULES}[name]):
        for value in VALUES:
            params = {**base, key: value}
            codes = errors({"scheduler": {"type": name, "params": params}})
            wrong += compare(f"{key} = {value}", schedule_says(name, params), codes)
    assert not wrong, "\n".join(wrong)
