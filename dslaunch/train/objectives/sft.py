"""Supervised fine-tuning: from a micro-batch to the summed loss of its answer tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from dslaunch.losses.sft import IGNORE_INDEX, TokenLoss, token_nll
from dslaunch.train.data.collate import Batch, lay_out_for
from dslaunch.train.embedding_noise import EmbeddingNoise


class SftObjective:
    """Runs the model on a batch and gives (sum, count) of the negative log-likelihood.

    ``forward``: the engine (or a bare model); ``model``: the module whose
    signature tells whether it can leave positions out of its output head, and
    whose kind of attention decides how packed rows are laid out. ``noise``: on its embeddings.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        model: torch.nn.Module,
        device: torch.device,
        *,
        noise: EmbeddingNoise | None = None,
    ) -> None:
        self._noise = noise
        self._forward = forward
        self._model = model
        self._device = device
        self._keeps_logits = takes_logits_to_keep(model)

    def token_loss(self, batch: Batch) -> TokenLoss:
        """(sum, count) over the supervised positions of ``batch`` on this rank; see ``losses.sft``.

        Positions that no row supervises never reach the output head, which for
        a small model is most of the work. The choice is made on the CPU, before
        the batch moves: it costs no wait for the device.
        """
        batch = lay_out_for(self._model, batch)
        targets = batch.targets
        inputs = batch.to(self._device).model_inputs()
        if self._keeps_logits:
            kept = supervised_positions(targets)
            targets = targets[:, kept]
            inputs["logits_to_keep"] = kept.to(self._device)
        with self._noise.on(batch, self._device) if self._noise is not None else nullcontext():
            logits = self._forward(**inputs).logits
        return token_nll(logits, targets.to(self._device))


def supervised_positions(targets: torch.Tensor) -> torch.Tensor:
    """The columns of ``targets`` [B, T] that hold a target in any row, [K] int64; [0] where none does.

    At least one: every rank must run the whole model, also on an empty batch.
    """
    columns = (targets != IGNORE_INDEX).any(dim=0).nonzero().squeeze(-1)
    return columns if len(columns) else torch.zeros(1, dtype=torch.int64)


def takes_logits_to_keep(model: torch.nn.Module) -> bool:
    """Whether the model's forward computes logits for chosen positions only."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # beneath a peft adapter
    return "logits_to_keep" in inspect.signature(base.forward).parameters
