"""What a published ``text_config`` leaves out: transformers 4 wrote there only what differs from the class.

The sizes are the defaults of the config classes of ``transformers`` 5 (configuration_*.py of each
family). A config.json that describes a decoder at its top level has them all written.
"""

from __future__ import annotations

from collections.abc import Mapping

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8}
_QWEN2 = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
}
_GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}
CLASS_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "gemma": {
        **_GEMMA2,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": _GEMMA2,
    "gemma3_text": {**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072},
    "phi": {
        **_LLAMA,
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
    },
    "phi3": {
        **_LLAMA,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
    },
}
