"""Rows that the model has no positions for are refused before the training, not in the middle of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.collate import Sample, collate
from dslaunch.train.data.context import ROW_MULTIPLE, check_context, row_width

LIMIT = 32
COMMON = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GPT = {"n_positions": LIMIT, "n_embd": 16, "n_layer": 1, "n_head": 2}

FIXED: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "n_head": 4, "rotary_dim": 4},
    "gpt_neo": {
        "max_position_embeddings": LIMIT, "hidden_size": 16, "num_layers": 1, "num_heads": 2,
        "attention_types": [[["global"], 1]], "intermediate_size": 16,
    },
    "opt": {**SMALL, "max_position_embeddings": LIMIT, "ffn_dim": 16, "word_embed_proj_dim": 16},
    "biogpt": {**SMALL, "max_position_embeddings": LIMIT},
    "mpt": {"max_seq_len": LIMIT, "d_model": 16, "n_heads": 2, "n_layers": 1},
}  # fmt: skip
ROTARY: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "max_position_embeddings": LIMIT},
    "gpt_neox": {**SMALL, "max_position_embeddings": LIMIT},
    "xglm": {
        "max_position_embeddings": LIMIT, "d_model": 16, "ffn_dim": 16, "num_layers": 1, "attention_heads": 2,
    },
}  # fmt: skip
ANY: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    "rwkv": {"hidden_size": 16, "num_hidden_layers": 2, "context_length": LIMIT},
}


def _config(kind: str) -> Any:
    return AutoConfig.for_model(kind, **COMMON, **{**FIXED, **ROTARY, **ANY}[kind])


def _run(config: Any, length: int) -> torch.Tensor:
    """The logits of one row, laid out as training lays it out; some of these models take no positions."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    sample = Sample(torch.arange(length).numpy() % 50, torch.ones(length, dtype=torch.bool).numpy())
    inputs = collate([[sample]], pad_token_id=0, packed=False).model_inputs()
    if config.model_type in ("bloom", "mpt", "mamba", "rwkv"):
        del inputs["position_ids"]
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits
    return logits


@pytest.mark.parametrize("kind", FIXED)
def test_a_fixed_table_is_refused_exactly_where_the_model_fails(kind: str) -> None:
    config = _config(kind)
    assert check_context(config, LIMIT) is None
    assert _run(config, LIMIT).isfinite().all()
    with pytest.raises(ConfigError, match=rf"data\.max_length must be at most {LIMIT}") as caught:
        check_context(config, LIMIT + ROW_MULTIPLE)
    assert caught.value.hint == f"set data.max_length: {LIMIT}"
    with pytest.raises((IndexError, RuntimeError)):
        _run(config, LIMIT + ROW_MULTIPLE)


@pytest.mark.parametrize("kind", ROTARY)
def test_computed_positions_run_on_and_are_noted(kind: str) -> None:
    config = _config(kind)
    assert check_context(config, LIMIT) is None
    note = check_context(config, LIMIT + ROW_MULTIPLE)
    assert note is not None and f"samples of up to {LIMIT + ROW_MULTIPLE} tokens" in note
    assert f"context of {LIMIT}" in note and "data.max_length" in note
    assert _run(config, LIMIT + ROW_MULTIPLE).isfinite().all()


@pytest.mark.parametrize("kind", ANY)
def test_models_without_positions_take_any_length(kind: str) -> None:
    config = _config(kind)
    assert check_context(config, 64 * LIMIT) is None
    assert _run(config, 4 * LIMIT).isfinite().all()


def test_packed_rows_count_by_row_for_a_table_and_by_sample_for_rotary_positions() -> None:
    """Padding of a packed row is a sample of its own, as long as the row may be."""
    assert check_context(_config("llama"), 4 * LIMIT, longest_sample=LIMIT) is None
    with pytest.raises(ConfigError, match=r"data\.max_length"):
        check_context(_config("gpt2"), 4 * LIMIT, longest_sample=LIMIT)


@pytest.mark.parametrize("length", [1, 8, 9, 63])
def test_row_width_is_what_collate_makes(length: int) -> None:
    sample = Sample(torch.ones(length).int().numpy(), torch.ones(length, dtype=torch.bool).numpy())
    batch = collate([[sample]], pad_token_id=0, packed=False)
    assert row_width(length) == batch.input_ids.shape[1]
