"""On real (tiny) models: packed samples do not see each other, padding changes nothing, leaks are found."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dslaunch.core.errors import ConfigError
from dslaunch.train.data import isolation
from dslaunch.train.data.collate import Batch, Sample, collate
from dslaunch.train.data.isolation import check_packing_isolation
from dslaunch.train.objectives.sft import SftObjective

VOCAB = 96
WIDE_VOCAB = 384


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


def tiny_mixtral(**options: Any) -> torch.nn.Module:
    """Wide enough that a matrix product rounds differently with another number of rows."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WIDE_VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        **options,
    )
    return build(MixtralForCausalLM, config)


class WithCache(torch.nn.Module):
    """The same model called with a cache, as transformers does by default."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**{**inputs, "use_cache": True})


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


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_MIXTURE = {"num_experts_per_tok": 2, "head_dim": 8}
_STATES = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
           "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
           "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}  # fmt: skip
_MAMBA = {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8}


def tiny(family: str, **options: Any) -> torch.nn.Module:
    """A random model of a family of transformers, by the name of its classes."""
    import transformers

    config = getattr(transformers, f"{family.removesuffix('Text')}{'Text' * family.endswith('Text')}Config")
    kind = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    return build(kind, config(**{**_SIZES, **options}))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("GptOss", {**_MIXTURE, "num_local_experts": 4, "sliding_window": 8}),
        ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64}),
        ("Qwen3Next", {**_MIXTURE, **_STATES}),
        ("Mamba2", _MAMBA),
    ],
)
def test_models_that_leak_whatever_the_mask_are_refused(family: str, options: dict[str, Any]) -> None:
    """Sinks, convolutions and recurrent states; when one passes, upstream keeps its samples apart."""
    with pytest.raises(ConfigError, match=f"{family}ForCausalLM see each other"):
        check_packing_isolation(tiny(family, **options), VOCAB, "cpu")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", {"head_dim": 8}),
        ("Gemma3Text", {"head_dim": 8, "sliding_window": 8}),
        ("Gemma2", {"head_dim": 8, "sliding_window": 8, "attn_implementation": "eager"}),
        ("Llama", {"attn_implementation": "flex_attention"}),
    ],
)
def test_other_families_and_flex_attention_pass(family: str, options: dict[str, Any]) -> None:
    check_packing_isolation(tiny(family, **options), VOCAB, "cpu")


def test_the_default_cache_leaks_and_is_found() -> None:
    """The reason for use_cache=False; when this fails, upstream has changed."""
    with pytest.raises(ConfigError, match="see each other"):
        check_packing_isolation(WithCache(tiny_llama()), VOCAB, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_may_move_others_by_rounding_and_not_by_more(dtype: torch.dtype) -> None:
    model = tiny_mixtral().to(dtype)
    check_packing_isolation(model, WIDE_VOCAB, "cpu")
    with pytest.raises(ConfigError, match="see each other"):
        check_packing_isolation(WithCache(model), WIDE_VOCAB, "cpu")


class Whispers(torch.nn.Module):
    """Moves every logit by ``amount`` times the ids of the whole batch; looks routed with ``experts``."""

    def __init__(self, amount: float, *, experts: bool) -> None:
        super().__init__()
        self.model = tiny_llama()
        self.amount = amount
        if experts:
            self.experts = torch.nn.Identity()

    def forward(self, **inputs: Any) -> Any:
        logits = self.model(**inputs).logits
        return SimpleNamespace(logits=logits + self.amount * inputs["input_ids"].sum())


def test_a_dense_model_must_agree_in_every_bit_and_experts_but_for_rounding() -> None:
    check_packing_isolation(Whispers(1e-7, experts=True), VOCAB, "cpu")
    for amount, experts in ((1e-7, False), (1e-2, True)):
        with pytest.raises(ConfigError, match="see each other"):
            check_packing_isolation(Whispers(amount, experts=experts), VOCAB, "cpu")


def test_dropout_inside_experts_is_no_leak() -> None:
    """Each expert draws its own mask for the tokens that came to it, whose number a changed token changes."""

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList([torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)])
            self.table = torch.nn.Embedding(VOCAB, 8)
            self.mix = tiny_llama()

        def forward(self, **inputs: Any) -> Any:
            hidden = self.table(inputs["input_ids"])
            logits = self.mix(**inputs).logits
            for index, expert in enumerate(self.experts):
                chosen = inputs["input_ids"] % 2 == index
                logits[chosen] = logits[chosen] + expert(hidden[chosen]).sum(-1, keepdim=True)
            return SimpleNamespace(logits=logits)

    model = build(lambda _: Experts(), None)
    check_packing_isolation(model, VOCAB, "cpu")
    assert all(module.training for module in model.modules())


def flash_stand_in(q: Any, k: Any, v: Any, *, causal: bool, softmax_scale: float, **_: Any) -> torch.Tensor:
    """flash_attn_func in plain torch: [B, T, heads, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def flash_varlen_stand_in(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float = 1.0,
    causal: bool = True,
) -> torch.Tensor:
    """flash_attn_varlen_func in plain torch: [tokens, heads, d], each sequence by itself."""
    bounds = cu_seqlens_q.tolist()
    parts = [
        flash_stand_in(q[None, a:b], k[None, a:b], v[None, a:b], causal=causal, softmax_scale=softmax_scale)
        for a, b in itertools.pairwise(bounds)
    ]
    return torch.cat(parts, dim=1)[0]


@pytest.fixture
def flash_llama(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A model on transformers' own FlashAttention path, with the two kernels replaced."""
    from transformers import modeling_flash_attention_utils as upstream

    kernels = (flash_stand_in, flash_varlen_stand_in, None, None, None)
    monkeypatch.setattr(upstream, "_lazy_imports", lambda *_, **__: kernels)
    monkeypatch.setattr(upstream, "_loaded_implementation", None)
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    return model


def test_flash_attention_packs_in_one_row(flash_llama: torch.nn.Module) -> None:
    check_packing_isolation(flash_llama, VOCAB, "cpu")


def test_flash_attention_leaks_in_several_rows(
    flash_llama: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for one row; when this fails, upstream has changed."""
    monkeypatch.setattr(isolation, "lay_out_for", lambda _, batch: batch)
    with pytest.raises(ConfigError, match="see each other"):
        check_packing_isolation(flash_llama, VOCAB, "cpu")


def test_the_objective_has_the_same_loss_with_flash_attention(flash_llama: torch.nn.Module) -> None:
    units = samples(7, 12, 3, 9)
    batch = collate([units[:2], units[2:], []], pad_token_id=0, packed=True)
    flash, usual = (
        SftObjective(model, model, torch.device("cpu")).token_loss(batch)
        for model in (flash_llama, tiny_llama())
    )
    assert int(flash.count) == int(usual.count) == 27
    assert flash.sum.item() == pytest.approx(usual.sum.item(), rel=1e-6)


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
