"""What the loop, the objectives and the checkpoints need of an engine, whichever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from dslaunch.train.engine.result import StepResult


class TrainingEngine(Protocol):
    """A model with its optimizer, spread over the ranks. Two fulfil it: ``Engine`` and ``TorchEngine``.

    What the members mean is told at ``Engine``. ``zero_stage`` is that which runs (0 with torch alone).
    """

    @property
    def kind(self) -> Literal["deepspeed", "torch"]: ...
    @property
    def precision(self) -> str: ...
    @property
    def module(self) -> torch.nn.Module: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def zero_stage(self) -> int: ...
    @property
    def global_step(self) -> int: ...
    @property
    def gradient_accumulation_steps(self) -> int: ...
    @property
    def skipped_steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def loss_scale(self) -> float: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward_token_sum(self, loss_sum: torch.Tensor, *, num_tokens: int) -> None: ...
    def step(self, *, flag: bool = False) -> StepResult | None: ...
    def train(self, mode: bool = True) -> None: ...
    def eval(self) -> None: ...

    def end_training(self) -> None:
        """Take everything off that follows a gradient, for passes that no step follows. For good.

        Parameters are gathered as before where they are partitioned; :meth:`backward_alone` takes the
        place of ``backward``.
        """

    def record_no_more(self) -> None:
        """Hold no further calls for a trace."""

    def backward_alone(self, loss: torch.Tensor) -> None:
        """Backward of ``loss`` as it is, after :meth:`end_training`. Collective at ZeRO stage 3."""

    def to_fp32(self) -> None:
        """Compute everything in fp32 from now on, after :meth:`end_training`. Not at ZeRO stage 3."""

    def save_state(self, folder: Path, *, trainable_only: bool) -> None:
        """Write weights, optimizer, schedule, loss scale and counters into ``folder``. Collective.

        ``trainable_only``: leave out the parameters that are not trained.
        """

    def load_state(self, folder: Path, *, trainable_only: bool) -> None:
        """Restore what :meth:`save_state` wrote. Collective. Raises ConfigError where nothing was loaded."""
