"""Models with rotary positions of several kinds, and what their tables must hold, by formula in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096,
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 512}  # fmt: skip
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
NAMES = ("llama", "llama3", "qwen2-linear", "neox-partial")


def save(root: Path) -> None:
    """One random model of each of NAMES, in fp32, under ``root``."""
    from transformers import (
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    LlamaForCausalLM(LlamaConfig(**_SIZES, head_dim=64)).save_pretrained(root / "llama")
    LlamaForCausalLM(LlamaConfig(**_SIZES, head_dim=64, rope_parameters=_LLAMA3)).save_pretrained(
        root / "llama3"
    )
    Qwen2ForCausalLM(Qwen2Config(**_SIZES, rope_parameters=_LINEAR)).save_pretrained(root / "qwen2-linear")
    sizes = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
    neox = GPTNeoXConfig(**{**sizes, "hidden_size": 64}, rope_parameters=_PARTIAL)
    GPTNeoXForCausalLM(neox).save_pretrained(root / "neox-partial")


def expected(name: str) -> torch.Tensor:
    """inv_freq in float64 (RoFormer, eq. 15; Llama 3.1's rule for its scaling)."""
    if name == "llama":
        return plain(64, 10000.0)
    if name == "llama3":
        return _llama3(plain(64, _LLAMA3["rope_theta"]))  # type: ignore[arg-type]
    if name == "qwen2-linear":
        return plain(16, 10000.0) / 4.0
    return plain(8, 10000.0)  # a quarter of a head of 32


def plain(size: int, theta: float) -> torch.Tensor:
    """One frequency for each pair of a head's ``size`` rotated places, [size / 2]."""
    return theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)


def _llama3(frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by 8, short ones stay, those between are blended."""
    found = []
    for frequency in frequencies.tolist():
        wave = 2 * math.pi / frequency
        share = min(max((512 / wave - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        found.append((1 - share) * frequency / 8.0 + share * frequency)
    return torch.tensor(found, dtype=torch.float64)
