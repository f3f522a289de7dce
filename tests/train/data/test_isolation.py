"""On real (tiny) models: packed samples do not see each other, padding changes nothing, leaks are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.collate import Batch, Sample, collate
from dslaunch.train.data.isolation import check_packing_isolation

VOCAB = 96


def tiny_llama(**options: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return build(LlamaForCausalLM, config)


def tiny_gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return build(
        GPT2LMHeadModel,
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0),
    )


def tiny_bloom() -> torch.nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return build(BloomForCausalLM, BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4))


def build(kind: Any, config: Any) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: torch.nn.Module = kind(config)
    return model


def samples(*lengths: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(rng.integers(1, VOCAB, length, dtype=np.int32), np.arange(length) > 0) for length in lengths
    ]


def losses(model: torch.nn.Module, batch: Batch) -> tuple[float, int]:
    with torch.no_grad():
        logits = model.eval()(**batch.model_inputs()).logits
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).double(), batch.targets.flatten(), reduction="sum"
    )
    return float(total), int((batch.targets != -100).sum())


@pytest.mark.parametrize(
    "make",
    [
        tiny_llama,
        lambda: tiny_llama(attn_implementation="eager"),
        lambda: tiny_llama(attention_dropout=0.2),
        lambda: tiny_llama().to(torch.bfloat16),
        tiny_gpt2,
    ],
    ids=["sdpa", "eager", "dropout", "bf16", "gpt2"],
)
def test_isolated_models_pass(make: Any) -> None:
    check_packing_isolation(make(), VOCAB, "cpu")


def test_gradient_checkpointing_passes() -> None:
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    check_packing_isolation(model, VOCAB, "cpu")


def test_a_model_that_ignores_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="BloomForCausalLM see each other") as caught:
        check_packing_isolation(tiny_bloom(), VOCAB, "cpu")
    assert caught.value.hint is not None
    assert "packing: false" in caught.value.hint


def test_the_default_cache_leaks_and_is_found() -> None:
    """The reason for use_cache=False; when this fails, upstream has changed."""
    model = tiny_llama()

    class WithCache(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            return model(**{**inputs, "use_cache": True})

    with pytest.raises(ConfigError, match="see each other"):
        check_packing_isolation(WithCache(), VOCAB, "cpu")


def test_the_check_leaves_no_trace() -> None:
    model = tiny_llama(attention_dropout=0.2)
    for training in (True, False):
        model.train(training)
        next(model.children()).training = not training  # a part that is kept in another mode
        modes = [module.training for module in model.modules()]
        state = torch.get_rng_state()
        check_packing_isolation(model, VOCAB, "cpu")
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in model.modules()] == modes
        assert all(p.grad is None for p in model.parameters())


def test_packed_padded_and_alone_have_the_same_loss() -> None:
    units = samples(7, 12, 3, 9)
    for model in (tiny_llama(), tiny_gpt2()):
        packed = losses(model, collate([units[:2], units[2:]], pad_token_id=0, packed=True))
        padded = losses(model, collate([[unit] for unit in units], pad_token_id=0, packed=False))
        alone = [
            losses(model, collate([[unit]], pad_token_id=0, packed=False, pad_to_multiple_of=1))
            for unit in units
        ]
        assert packed[1] == padded[1] == sum(count for _, count in alone) == 27
        assert packed[0] == pytest.approx(padded[0], rel=1e-6)
        assert packed[0] == pytest.approx(sum(loss for loss, _ in alone), rel=1e-6)


def test_the_pad_id_changes_no_loss() -> None:
    units = [[unit] for unit in samples(5, 11)]
    model = tiny_gpt2()
    first, other = (losses(model, collate(units, pad_token_id=pad, packed=False)) for pad in (0, 7))
    assert first == other


def test_empty_rows_are_finite() -> None:
    units = [samples(5), []]
    for packed in (True, False):
        batch = collate(units, pad_token_id=0, packed=packed)
        for model in (tiny_llama(), tiny_llama(attn_implementation="eager")):
            assert torch.isfinite(model(**batch.model_inputs()).logits).all()
