"""Single forward and backward passes on an engine that trains no more."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dslaunch.losses.sft import TokenLoss
from dslaunch.train.engine import TrainingEngine
from dslaunch.train.fp32_modules import cast
from dslaunch.train.replay.anomaly import GradientWatch
from dslaunch.train.replay.measure import Range, measure
from dslaunch.train.replay.probe import Event, probing


class Objective(Protocol):
    """Runs the model on one of a window's micro-batches."""

    def token_loss(self, batch: Any) -> TokenLoss: ...


@dataclass(frozen=True)
class Pass:
    """``loss``: mean over the micro-batch's trained tokens."""

    events: list[Event]
    loss: float

    @property
    def breaks(self) -> bool:
        """Whether a step would be lost by it. An inf that nothing comes of does no harm."""
        gradients = (e.range for e in self.events if e.kind == "gradient of parameter")
        return not math.isfinite(self.loss) or any(not spread.is_finite for spread in gradients)


class Passes:
    """Runs micro-batches one at a time, each gradient looked at and forgotten.

    It ends the engine's training. At ZeRO stage 3 each call is collective.
    """

    def __init__(self, engine: TrainingEngine, objective: Objective) -> None:
        self._engine, self._objective = engine, objective
        self.world_size = engine.world_size
        self.zero_stage = engine.zero_stage
        self.precision = engine.precision
        self.module = engine.module
        engine.end_training()
        engine.train()

    def run(self, batch: Any, *, num_tokens: int, loss_scale: float) -> Pass:
        """One pass with a probe on it. ``num_tokens``: of the whole window, as in training."""
        with probing(self.module) as probe:
            loss = self._objective.token_loss(batch)
            probe.in_backward = True
            self._backward(loss.sum, num_tokens, loss_scale)
        return Pass(probe.events, float(loss.sum.detach()) / max(int(loss.count), 1))

    def run_with_module_in_fp32(
        self, batch: Any, name: str | None, *, num_tokens: int, loss_scale: float
    ) -> Range | None:
        """One pass, and beside it what module ``name`` gives in fp32, where it is a single layer.

        For stage 3, where the model cannot go to fp32: in its forward a layer's weights are whole.
        None where the module has others in it, or was not run; always with ``name`` None.
        """
        module = dict(self.module.named_modules()).get(name) if name is not None else None
        seen: list[torch.Tensor] = []

        def compute(layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if not seen:
                seen.append(_forward_in_fp32(layer, args, kwargs))

        alone = module is not None and next(module.children(), None) is None
        handle = module.register_forward_pre_hook(compute, with_kwargs=True) if module and alone else None
        try:
            self.run(batch, num_tokens=num_tokens, loss_scale=loss_scale)
        finally:
            if handle is not None:
                handle.remove()
        return measure(seen[0]) if seen and isinstance(seen[0], torch.Tensor) else None

    def find_anomaly(self, batch: Any, *, num_tokens: int, loss_scale: float) -> str | None:
        """The operation whose gradient is the first that is not finite, and its line; None where all are."""
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            loss = self._objective.token_loss(batch)
            watch = GradientWatch(loss.sum)
            try:
                self._backward(loss.sum, num_tokens, loss_scale)
            finally:
                for parameter in self.module.parameters():
                    parameter.grad = None
        return watch.found

    def to_fp32(self) -> None:
        """Take the model to fp32, for good. Not at stage 3, whose parameters are elsewhere."""
        self._engine.to_fp32()

    def _backward(self, loss_sum: torch.Tensor, num_tokens: int, loss_scale: float) -> None:
        self._engine.backward_alone(loss_sum.float() * (self.world_size / num_tokens * loss_scale))


@torch.no_grad()
def _forward_in_fp32(layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """What ``layer`` alone makes of these inputs in fp32; itself and its hooks are let be."""
    clone = copy.copy(layer)
    wide = {name: None if p is None else p.detach().float() for name, p in layer._parameters.items()}
    clone.__dict__["_parameters"] = wide
    return clone.forward(*cast(args, torch.float32), **cast(kwargs, torch.float32))
