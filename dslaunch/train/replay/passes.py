"""Single forward and backward passes on an engine that trains no more."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dslaunch.train.data.collate import Batch
from dslaunch.train.engine import TrainingEngine
from dslaunch.train.objectives.sft import SftObjective
from dslaunch.train.replay.probe import Event, probing


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

    def __init__(self, engine: TrainingEngine, objective: SftObjective) -> None:
        self._engine, self._objective = engine, objective
        self.world_size = engine.world_size
        self.zero_stage = engine.zero_stage
        self.precision = engine.precision
        self.module = engine.module
        engine.end_training()
        engine.train()

    def run(self, batch: Batch, *, num_tokens: int, loss_scale: float) -> Pass:
        """One pass with a probe on it. ``num_tokens``: of the whole window, as in training."""
        with probing(self.module) as probe:
            loss = self._objective.token_loss(batch)
            probe.in_backward = True
            self._backward(loss.sum, num_tokens, loss_scale)
        return Pass(probe.events, float(loss.sum.detach()) / max(int(loss.count), 1))

    def find_anomaly(self, batch: Batch, *, num_tokens: int, loss_scale: float) -> str | None:
        """What autograd's anomaly mode says of a pass: the operation whose gradient is nan first."""
        with torch.autograd.set_detect_anomaly(True):
            try:
                loss = self._objective.token_loss(batch)
                self._backward(loss.sum, num_tokens, loss_scale)
            except RuntimeError as error:
                return str(error)
            finally:
                for parameter in self.module.parameters():
                    parameter.grad = None
        return None

    def to_fp32(self) -> None:
        """Take the model to fp32, for good. Not at stage 3, whose parameters are elsewhere."""
        self._engine.to_fp32()

    def _backward(self, loss_sum: torch.Tensor, num_tokens: int, loss_scale: float) -> None:
        self._engine.backward_alone(loss_sum.float() * (self.world_size / num_tokens * loss_scale))
