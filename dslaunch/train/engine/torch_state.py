"""What an engine on torch alone keeps of itself in a checkpoint. Nothing in it is pickled.

``model.safetensors`` holds the weights by name, ``optimizer.safetensors`` the optimizer's tensors as
``<parameter>::<key>``, ``engine.json`` the rest: the optimizer's numbers, its groups, the schedule,
GradScaler's state and the counters.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from dslaunch.core.errors import ConfigError

if TYPE_CHECKING:
    from dslaunch.train.engine.torch_engine import TorchEngine

MODEL, OPTIMIZER, ENGINE = "model.safetensors", "optimizer.safetensors", "engine.json"


@dataclass
class Counters:
    """Windows that ended, and those of them that left the weights as they were."""

    global_steps: int = 0
    skipped_steps: int = 0

    def add(self, *, applied: bool) -> None:
        self.global_steps += 1
        self.skipped_steps += not applied


def save(engine: TorchEngine, folder: Path, *, trainable_only: bool) -> None:
    """Write the three files; the optimizer's tensors are named by the parameters that they belong to."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = dict(engine.module.named_parameters())
    kept = {n: p for n, p in parameters.items() if p.requires_grad or not trainable_only}
    save_file({name: p.detach().contiguous() for name, p in kept.items()}, folder / MODEL)
    state = engine.optimizer.state_dict()
    names = _names(engine)
    tensors, numbers = {}, {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{names[index]}::{key}"] = value.contiguous()
            else:
                numbers[f"{names[index]}::{key}"] = value
    save_file(tensors, folder / OPTIMIZER)
    rest = {
        "optimizer": numbers,
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]}
                         for group in state["param_groups"]],
        "lr_scheduler": engine.lr_scheduler.state_dict(),  # its functions are None there
        "scaler": engine.scaler.state_dict(),
        "counters": asdict(engine.counters),
    }  # fmt: skip
    (folder / ENGINE).write_text(json.dumps(rest, allow_nan=False), encoding="utf-8")


def load(engine: TorchEngine, folder: Path, *, trainable_only: bool) -> None:
    """The inverse of :func:`save`. Raises ConfigError where a file does not fit the engine."""
    try:
        weights = load_file(folder / MODEL)
        tensors = load_file(folder / OPTIMIZER)
        rest = json.loads((folder / ENGINE).read_text(encoding="utf-8"))
        _load_weights(engine, weights, trainable_only=trainable_only)
        engine.optimizer.load_state_dict(_optimizer_state(engine, tensors, rest))
        engine.lr_scheduler.load_state_dict(rest["lr_scheduler"])
        engine.scaler.load_state_dict(rest["scaler"])
        engine.counters = Counters(**rest["counters"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{folder} is not what this engine saved: {type(error).__name__}: {error}"
        ) from error


@torch.no_grad()
def _load_weights(engine: TorchEngine, weights: dict[str, torch.Tensor], *, trainable_only: bool) -> None:
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad or not trainable_only:
            parameter.copy_(weights[name])


def _optimizer_state(
    engine: TorchEngine, tensors: dict[str, torch.Tensor], rest: dict[str, Any]
) -> dict[str, Any]:
    indices = {name: index for index, name in enumerate(_names(engine))}
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **rest["optimizer"]}.items():
        name, _, entry = key.rpartition("::")
        state.setdefault(indices[name], {})[entry] = value
    groups = [{**group, "params": [indices[name] for name in group["params"]]}
              for group in rest["param_groups"]]  # fmt: skip
    return {"state": state, "param_groups": groups}


def _names(engine: TorchEngine) -> list[str]:
    """The name of each parameter in the order in which the optimizer counts them."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    return [names[id(p)] for group in engine.optimizer.param_groups for p in group["params"]]
