"""Models of known architectures, by their config.json."""

from __future__ import annotations

from typing import Any

from dslaunch.config.memory.architectures import dimensions, parameters
from dslaunch.config.memory.setup import OptimizerCost, Setup, adapted
from dslaunch.config.memory.tensors import ModelFacts


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
    }


LLAMA_3_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA_3_70B = llama(8192, 28672, 80, 64, 8, 128256)
LLAMA_2_7B = llama(4096, 11008, 32, 32, 32, 32000)
LLAMA_2_13B = llama(5120, 13824, 40, 40, 40, 32000)
SMOLLM2_135M = {**llama(576, 1536, 30, 9, 3, 49152), "tie_word_embeddings": True}


def facts(config: dict[str, Any]) -> ModelFacts:
    return ModelFacts(parameters(config) or (), dimensions(config), "config.json")


def setup(config: dict[str, Any] = LLAMA_3_8B, method: Any = "full", **changes: Any) -> Setup:
    """bf16, stage 2 on eight devices, one sample of 4096 tokens, unless ``changes`` say otherwise."""
    model = facts(config)
    trained, frozen = adapted(model, method, r=16, bytes_each=2)
    values: dict[str, Any] = {
        "model": model,
        "trainable": trained,
        "frozen": frozen,
        "method": method,
        "lora_r": 0 if method == "full" else 16,
        "exclude_frozen": method != "full",
        "precision": "bf16",
        "zero_stage": 2,
        "world_size": 8,
        "ranks_per_host": 8,
        "micro_batch": 1,
        "accumulation": 1,
        "max_length": 4096,
        "optimizer": OptimizerCost(state=8, temporary=0, fused=True),
    }
    return Setup(**{**values, **changes})
