"""config.json -> the parameters of the model, for the common decoder families.

Names, shapes and order are those of ``transformers`` 5 at run time (modeling_*.py of each family),
where the experts of a mixture are one tensor for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dslaunch.config.memory.tensors import Dimensions, Tensor
from dslaunch.core.errors import ConfigError

Config = Mapping[str, Any]
Tensors = Iterator[Tensor]


@dataclass(frozen=True)
class Family:
    """How a model_type is built. ``defaults``: what its config class fills in where config.json is silent."""

    layer: Callable[[Config, str], Tensors]
    defaults: Mapping[str, Any]
    whole: Callable[[Config, Family], Tensors]
    gated: bool = True
    qk_norm: bool = False
    renamed: Mapping[str, str] | None = None  # our word -> the family's


def parameters(config: Config) -> tuple[Tensor, ...] | None:
    """The parameters of the model of ``config`` (a parsed config.json); None: not a family of the table.

    Raises ConfigError where a size is missing.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    return tuple(family.whole(_Sizes(config, family), family))


def dimensions(config: Config) -> Dimensions:
    """The sizes of the decoder of ``config``; of an unknown family by the usual names.

    Raises ConfigError where one is missing.
    """
    family = FAMILIES.get(str(config.get("model_type")), _UNKNOWN)
    sizes = _Sizes(config, family)
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    return Dimensions(
        vocab=sizes["vocab_size"],
        hidden=hidden,
        intermediate=_active_intermediate(sizes),
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=_kv_heads(sizes),
        head_dim=_head_dim(sizes),
        gated=family.gated,
        qk_norm=family.qk_norm,
        family=str(config.get("model_type", "")),
        experts_per_token=int(sizes["num_experts_per_tok"]) if num_experts(sizes) else 0,
        positions=next((n for key in _POSITIONS if type(n := sizes.get(key)) is int and n > 0), None),
    )


def check_sizes(config: Config, source: str) -> None:
    """Raise ConfigError for a size in ``config`` with which there is no model, by its key in ``source``."""
    family = FAMILIES.get(str(config.get("model_type")), _UNKNOWN)
    names = {ours: theirs for ours, theirs in (family.renamed or {}).items() if theirs in config}
    for key, (least, most) in _LIMITS.items():
        written = names.get(key, key)
        if (value := config.get(written)) is None:
            continue
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(
                f"{source}: {written} is {_shown(value)}, not a whole number from {least} to {most:,}",
                hint="compare the file with that of the original model",
            )
    if not isinstance(config.get("mlp_only_layers") or [], list):
        raise ConfigError(f"{source}: mlp_only_layers is {_shown(config['mlp_only_layers'])}, not a list")
    sizes = _Sizes(config, family)
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if key not in sizes:
            raise _without(source, (family.renamed or {}).get(key, key))
    if "head_dim" in sizes:
        return
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if family is not _UNKNOWN and hidden % heads:
        raise ConfigError(
            f"{source}: {names.get('num_attention_heads', 'num_attention_heads')} {heads} does not divide"
            f" {names.get('hidden_size', 'hidden_size')} {hidden}",
            hint="compare the file with that of the original model; where its heads are of another size,"
            " head_dim says so",
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class _Sizes(dict[str, Any]):
    """config.json with the family's names and defaults; a size that is nowhere is a ConfigError."""

    def __init__(self, config: Config, family: Family) -> None:
        given = {key: value for key, value in config.items() if value is not None}
        renamed = {ours: given[theirs] for ours, theirs in (family.renamed or {}).items() if theirs in given}
        super().__init__({**family.defaults, **given, **renamed})

    def __missing__(self, key: str) -> Any:
        if key == "intermediate_size" and "n_embd" in self:  # GPT-2 writes it only where it is another
            return 4 * self["n_embd"]
        raise _without("config.json", key)


def _without(source: str, key: str) -> ConfigError:
    hint = "give the config.json of a causal language model, or its directory"
    return ConfigError(f"{source} has no {key}", hint=hint)


def _kv_heads(c: Config) -> int:
    return int(c.get("num_key_value_heads") or c["num_attention_heads"])


def _head_dim(c: Config) -> int:
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def _active_intermediate(c: Config) -> int:
    """Of all MLPs that one token passes: the chosen experts and a shared one."""
    if (experts := num_experts(c)) == 0:
        return int(c["intermediate_size"])
    each = int(c.get("moe_intermediate_size") or c["intermediate_size"])
    return min(experts, int(c["num_experts_per_tok"])) * each + int(
        c.get("shared_expert_intermediate_size", 0)
    )


def num_experts(c: Config) -> int:
    """Experts of each layer; 0 for a dense model."""
    return int(c.get("num_local_experts") or c.get("num_experts") or 0)


def _linear(name: str, out: int, into: int, bias: bool = False) -> Tensors:
    yield Tensor(f"{name}.weight", (out, into))
    if bias:
        yield Tensor(f"{name}.bias", (out,))


def _norm(name: str, size: int, bias: bool = False) -> Tensors:
    yield Tensor(f"{name}.weight", (size,))
    if bias:
        yield Tensor(f"{name}.bias", (size,))


def _attention(c: Config, at: str, *, qkv_bias: bool, o_bias: bool, qk_norm: bool = False) -> Tensors:
    hidden, dim = c["hidden_size"], _head_dim(c)
    query, keys = c["num_attention_heads"] * dim, _kv_heads(c) * dim
    for name, out in (("q", query), ("k", keys), ("v", keys)):
        yield from _linear(f"{at}.self_attn.{name}_proj", out, hidden, qkv_bias)
    yield from _linear(f"{at}.self_attn.o_proj", hidden, query, o_bias)
    if qk_norm:
        yield from _norm(f"{at}.self_attn.q_norm", dim)
        yield from _norm(f"{at}.self_attn.k_norm", dim)


def _gated_mlp(at: str, hidden: int, inner: int, bias: bool = False) -> Tensors:
    yield from _linear(f"{at}.gate_proj", inner, hidden, bias)
    yield from _linear(f"{at}.up_proj", inner, hidden, bias)
    yield from _linear(f"{at}.down_proj", hidden, inner, bias)


def _experts(c: Config, at: str, *, gate_last: bool = False) -> Tensors:
    count, hidden = num_experts(c), c["hidden_size"]
    inner = c.get("moe_intermediate_size") or c["intermediate_size"]
    gate = Tensor(f"{at}.gate.weight", (count, hidden))
    if not gate_last:
        yield gate
    yield Tensor(f"{at}.experts.gate_up_proj", (count, 2 * inner, hidden))
    yield Tensor(f"{at}.experts.down_proj", (count, hidden, inner))
    if gate_last:
        yield gate


def _norms(c: Config, at: str, *names: str) -> Tensors:
    for name in names or ("input_layernorm", "post_attention_layernorm"):
        yield from _norm(f"{at}.{name}", c["hidden_size"])


def _llama_layer(c: Config, at: str) -> Tensors:
    bias = bool(c.get("attention_bias", False))
    yield from _attention(c, at, qkv_bias=bias, o_bias=bias)
    yield from _gated_mlp(
        f"{at}.mlp", c["hidden_size"], c["intermediate_size"], bool(c.get("mlp_bias", False))
    )
    yield from _norms(c, at)


def _qwen2_layer(c: Config, at: str) -> Tensors:
    yield from _attention(c, at, qkv_bias=True, o_bias=False)
    yield from _gated_mlp(f"{at}.mlp", c["hidden_size"], c["intermediate_size"])
    yield from _norms(c, at)


def _qwen3_layer(c: Config, at: str) -> Tensors:
    bias = bool(c.get("attention_bias", False))
    yield from _attention(c, at, qkv_bias=bias, o_bias=bias, qk_norm=True)
    yield from _gated_mlp(f"{at}.mlp", c["hidden_size"], c["intermediate_size"])
    yield from _norms(c, at)


def _qwen3_moe_layer(c: Config, at: str) -> Tensors:
    bias = bool(c.get("attention_bias", False))
    yield from _attention(c, at, qkv_bias=bias, o_bias=bias, qk_norm=True)
    if _is_dense(c, at):
        yield from _gated_mlp(f"{at}.mlp", c["hidden_size"], c["intermediate_size"])
    else:
        yield from _experts(c, f"{at}.mlp", gate_last=True)
    yield from _norms(c, at)


def _qwen2_moe_layer(c: Config, at: str) -> Tensors:
    yield from _attention(c, at, qkv_bias=bool(c.get("qkv_bias", True)), o_bias=False)
    if _is_dense(c, at):
        yield from _gated_mlp(f"{at}.mlp", c["hidden_size"], c["intermediate_size"])
    else:
        yield from _experts(c, f"{at}.mlp")
        yield from _gated_mlp(
            f"{at}.mlp.shared_expert", c["hidden_size"], c["shared_expert_intermediate_size"]
        )
        yield from _linear(f"{at}.mlp.shared_expert_gate", 1, c["hidden_size"])
    yield from _norms(c, at)


def _is_dense(c: Config, at: str) -> bool:
    layer = int(at.rsplit(".", 1)[-1])
    step = c.get("decoder_sparse_step", 1)
    return layer in (c.get("mlp_only_layers") or ()) or (layer + 1) % step != 0


def _mixtral_layer(c: Config, at: str) -> Tensors:
    yield from _attention(c, at, qkv_bias=False, o_bias=False)
    yield from _experts(c, f"{at}.mlp")
    yield from _norms(c, at)


def _gemma_layer(c: Config, at: str) -> Tensors:
    bias = bool(c.get("attention_bias", False))
    kind = c["model_type"]
    yield from _attention(c, at, qkv_bias=bias, o_bias=bias, qk_norm=kind == "gemma3_text")
    yield from _gated_mlp(f"{at}.mlp", c["hidden_size"], c["intermediate_size"])
    more = () if kind == "gemma" else ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    yield from _norms(c, at, "input_layernorm", "post_attention_layernorm", *more)


def _phi3_layer(c: Config, at: str) -> Tensors:
    hidden, dim = c["hidden_size"], _head_dim(c)
    query = c["num_attention_heads"] * dim
    yield from _linear(f"{at}.self_attn.o_proj", hidden, query)
    yield from _linear(f"{at}.self_attn.qkv_proj", query + 2 * _kv_heads(c) * dim, hidden)
    yield from _linear(f"{at}.mlp.gate_up_proj", 2 * c["intermediate_size"], hidden)
    yield from _linear(f"{at}.mlp.down_proj", hidden, c["intermediate_size"])
    yield from _norms(c, at)


def _phi_layer(c: Config, at: str) -> Tensors:
    hidden, dim = c["hidden_size"], _head_dim(c)
    query, keys = c["num_attention_heads"] * dim, _kv_heads(c) * dim
    for name, out in (("q_proj", query), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(f"{at}.self_attn.{name}", out, hidden, True)
    yield from _linear(f"{at}.self_attn.dense", hidden, query, True)
    if c.get("qk_layernorm"):
        yield from _norm(f"{at}.self_attn.q_layernorm", dim, True)
        yield from _norm(f"{at}.self_attn.k_layernorm", dim, True)
    yield from _linear(f"{at}.mlp.fc1", c["intermediate_size"], hidden, True)
    yield from _linear(f"{at}.mlp.fc2", hidden, c["intermediate_size"], True)
    yield from _norm(f"{at}.input_layernorm", hidden, True)


def _gpt2_layer(c: Config, at: str) -> Tensors:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    yield from _norm(f"{at}.ln_1", hidden, True)
    # Conv1D: the weight is [in, out].
    for name, into, out in (("attn.c_attn", hidden, 3 * hidden), ("attn.c_proj", hidden, hidden)):
        yield Tensor(f"{at}.{name}.weight", (into, out))
        yield Tensor(f"{at}.{name}.bias", (out,))
    yield from _norm(f"{at}.ln_2", hidden, True)
    for name, into, out in (("mlp.c_fc", hidden, inner), ("mlp.c_proj", inner, hidden)):
        yield Tensor(f"{at}.{name}.weight", (into, out))
        yield Tensor(f"{at}.{name}.bias", (out,))


def _neox_layer(c: Config, at: str) -> Tensors:
    hidden, inner, bias = c["hidden_size"], c["intermediate_size"], bool(c.get("attention_bias", True))
    yield from _norm(f"{at}.input_layernorm", hidden, True)
    yield from _norm(f"{at}.post_attention_layernorm", hidden, True)
    yield from _linear(f"{at}.attention.query_key_value", 3 * hidden, hidden, bias)
    yield from _linear(f"{at}.attention.dense", hidden, hidden, bias)
    yield from _linear(f"{at}.mlp.dense_h_to_4h", inner, hidden, True)
    yield from _linear(f"{at}.mlp.dense_4h_to_h", hidden, inner, True)


def _layers(c: Config, family: Family, at: str) -> Tensors:
    for i in range(c["num_hidden_layers"]):
        yield from family.layer(c, f"{at}.{i}")


def _decoder(c: Config, family: Family) -> Tensors:
    yield Tensor("model.embed_tokens.weight", (c["vocab_size"], c["hidden_size"]))
    yield from _layers(c, family, "model.layers")
    yield from _norm("model.norm", c["hidden_size"])
    if not c["tie_word_embeddings"]:
        yield from _linear("lm_head", c["vocab_size"], c["hidden_size"])


def _phi_whole(c: Config, family: Family) -> Tensors:
    yield Tensor("model.embed_tokens.weight", (c["vocab_size"], c["hidden_size"]))
    yield from _layers(c, family, "model.layers")
    yield from _norm("model.final_layernorm", c["hidden_size"], True)
    if not c["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (c["vocab_size"], c["hidden_size"]))
    yield Tensor("lm_head.bias", (c["vocab_size"],))


def _gpt2_whole(c: Config, family: Family) -> Tensors:
    yield Tensor("transformer.wte.weight", (c["vocab_size"], c["hidden_size"]))
    yield Tensor("transformer.wpe.weight", (c["n_positions"], c["hidden_size"]))
    yield from _layers(c, family, "transformer.h")
    yield from _norm("transformer.ln_f", c["hidden_size"], True)
    if not c["tie_word_embeddings"]:
        yield from _linear("lm_head", c["vocab_size"], c["hidden_size"])


def _neox_whole(c: Config, family: Family) -> Tensors:
    yield Tensor("gpt_neox.embed_in.weight", (c["vocab_size"], c["hidden_size"]))
    yield from _layers(c, family, "gpt_neox.layers")
    yield from _norm("gpt_neox.final_layer_norm", c["hidden_size"], True)
    if not c["tie_word_embeddings"]:
        yield from _linear("lm_head", c["vocab_size"], c["hidden_size"])


_POSITIONS = ("max_position_embeddings", "n_positions")
_ANY = 2**31 - 1
# What a size may be. Every layer is listed on its own: so many take a plan some seconds.
_LIMITS = {
    "num_hidden_layers": (1, 4096),
    **dict.fromkeys(
        ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size", "num_key_value_heads",
         "head_dim", "moe_intermediate_size", "decoder_sparse_step", "n_positions"),
        (1, _ANY),
    ),
    # 0 stands for a model without experts.
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "num_experts_per_tok", "shared_expert_intermediate_size"),
        (0, _ANY),
    ),
}  # fmt: skip
_UNTIED = {"tie_word_embeddings": False}
_TIED = {"tie_word_embeddings": True}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}
_UNKNOWN = Family(_llama_layer, {}, _decoder)
FAMILIES: dict[str, Family] = {
    "llama": Family(_llama_layer, _UNTIED, _decoder),
    "mistral": Family(_llama_layer, {**_UNTIED, "num_key_value_heads": 8}, _decoder),
    "mixtral": Family(_mixtral_layer, {**_UNTIED, "num_key_value_heads": 8}, _decoder),
    "qwen2": Family(_qwen2_layer, _UNTIED, _decoder),
    "qwen2_moe": Family(_qwen2_moe_layer, _UNTIED, _decoder),
    "qwen3": Family(_qwen3_layer, {**_UNTIED, "head_dim": 128}, _decoder, qk_norm=True),
    "qwen3_moe": Family(_qwen3_moe_layer, {**_UNTIED}, _decoder, qk_norm=True),
    "gemma": Family(_gemma_layer, {**_TIED, "head_dim": 256}, _decoder),
    "gemma2": Family(_gemma_layer, {**_TIED, "head_dim": 256}, _decoder),
    "gemma3_text": Family(_gemma_layer, {**_TIED, "head_dim": 256}, _decoder, qk_norm=True),
    "phi": Family(_phi_layer, _UNTIED, _phi_whole, gated=False),
    "phi3": Family(_phi3_layer, _UNTIED, _decoder),
    "gpt2": Family(
        _gpt2_layer, {**_TIED, "n_positions": 1024}, _gpt2_whole, gated=False, renamed=_GPT2_NAMES
    ),
    "gpt_neox": Family(_neox_layer, _UNTIED, _neox_whole, gated=False),
}
