"""NEFTune: uniform noise on the embeddings while training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dslaunch.train.data.collate import Batch


class EmbeddingNoise:
    """Adds uniform noise from -a to a to what the input embeddings put out, a = alpha / sqrt(L d).

    L: tokens of the sample (of each by itself in a packed row, padding not counted); d: hidden
    size. Only within :meth:`on`, and only in train mode: evaluation, generation and export see
    no noise. It comes from the device's random numbers, which a checkpoint keeps.
    Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning", Algorithm 1.
    """

    def __init__(self, model: Any, alpha: float) -> None:
        self._alpha = alpha
        self._scale: torch.Tensor | None = None
        model.get_input_embeddings().register_forward_hook(self._add)

    @contextmanager
    def on(self, batch: Batch, device: torch.device) -> Iterator[None]:
        """Forward passes in the ``with`` block are those of ``batch``."""
        self._scale = (self._alpha / sample_lengths(batch).sqrt()).to(device).unsqueeze(-1)
        try:
            yield
        finally:
            self._scale = None

    def _add(self, module: torch.nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self._scale is None or not module.training:
            return None
        noise = torch.empty_like(output).uniform_(-1, 1)
        return output + noise * (self._scale / math.sqrt(output.shape[-1])).to(output.dtype)


def sample_lengths(batch: Batch) -> torch.Tensor:
    """Tokens of the sample that each position belongs to, float32 [B, T]; inf for padding.

    Of packed rows, whose padding looks like one more sample that nothing attends to, that counts as one.
    """
    if batch.attention_mask is not None:
        lengths = batch.attention_mask.sum(dim=1, keepdim=True).float().expand(batch.input_ids.shape)
        return torch.where(batch.attention_mask, lengths, torch.inf)
    sample = (batch.position_ids.flatten() == 0).cumsum(0) - 1  # a row begins with a sample
    return torch.bincount(sample)[sample].float().view(batch.position_ids.shape)
