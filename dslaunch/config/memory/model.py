"""A model on disk -> its parameters: a directory, a config.json or a .gguf file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dslaunch.config.memory.architectures import check_sizes, dimensions, parameters
from dslaunch.config.memory.class_defaults import CLASS_DEFAULTS
from dslaunch.config.memory.headers import read_gguf, read_safetensors
from dslaunch.config.memory.tensors import Dimensions, ModelFacts, Tensor, natural_key, total
from dslaunch.core.bounded import open_regular
from dslaunch.core.errors import ConfigError
from dslaunch.core.quantised_model import plan_on_disk


def load_model_facts(path: Path) -> ModelFacts:
    """The parameters of the model at ``path``: a directory with config.json, a config.json or a .gguf file.

    Counts come from the weights' headers where there are any, shapes and order from config.json
    where its family is known. Raises ConfigError where neither tells.
    """
    if path.is_dir():
        return _from_directory(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if path.suffix == ".json":
        return _from_config(_read_config(path), path)
    raise ConfigError(f"{path} is no model", hint="give a model directory, its config.json or a .gguf file")


def _from_directory(path: Path) -> ModelFacts:
    config = _read_config(path / "config.json")
    files = _weight_files(path)
    if not files or _is_quantised(config):  # headers of quantised weights have other shapes
        size = sum(file.stat().st_size for file in files)
        return dataclasses.replace(_from_config(config, path / "config.json"), file_bytes=size)
    headers = [read_safetensors(file) for file in files]
    stored = _untie([tensor for header in headers for tensor in header.tensors], config)
    by_config = parameters(config)
    known = by_config is not None and total(by_config) == total(stored)
    note = None
    if by_config is not None and not known:
        note = (
            f"the weights of {path} hold {total(stored):,} parameters, its config.json describes "
            f"{total(by_config):,}: the weights count"
        )
    return ModelFacts(
        tensors=by_config
        if known and by_config
        else tuple(sorted(stored, key=lambda t: natural_key(t.name))),
        dims=dimensions(config),
        source=f"{len(files)} safetensors header{'s' if len(files) > 1 else ''}",
        file_dtype=max(headers, key=lambda h: total(h.tensors)).dtype,
        file_bytes=sum(file.stat().st_size for file in files),
        note=note,
    )


def _weight_files(path: Path) -> list[Path]:
    """What the index names, else model.safetensors, else every .safetensors file."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weights = _read_json(index).get("weight_map", {})
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            raise ConfigError(
                f"{index}: weight_map does not say of each weight which file it is in", hint="fetch it again"
            )
        names = sorted(set(weights.values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ConfigError(
                f"{index} names {missing[0]}, which is not there", hint="the download may be incomplete"
            )
        return [path / name for name in names]
    single = path / "model.safetensors"
    return [single] if single.is_file() else sorted(path.glob("*.safetensors"))


def _untie(stored: list[Tensor], config: dict[str, Any]) -> list[Tensor]:
    """A tied head that the file holds as well counts once; buffers of old checkpoints do not count."""
    by_config = parameters(config)
    known = {tensor.name for tensor in by_config} if by_config else None
    tied = config.get("tie_word_embeddings", False) or (known is not None and "lm_head.weight" not in known)
    heads = {"lm_head.weight", "embed_out.weight"} if tied else set()
    buffers = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".masked_bias")
    return [t for t in stored if t.name not in heads and not t.name.endswith(buffers)]


def _from_config(config: dict[str, Any], path: Path) -> ModelFacts:
    tensors = parameters(config)
    if tensors is None:
        raise ConfigError(
            f"{path}: model_type {config.get('model_type')!r} is not one whose parameters are known here",
            hint="give a directory that also holds the safetensors files: their headers have the shapes",
        )
    on_disk = None
    if _is_quantised(config):
        try:
            on_disk = plan_on_disk(config["quantization_config"])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None
    return ModelFacts(tensors=tensors, dims=dimensions(config), source="config.json", on_disk=on_disk)


def _is_quantised(config: dict[str, Any]) -> bool:
    return isinstance(config.get("quantization_config"), dict)


def _read_config(path: Path) -> dict[str, Any]:
    config = _read_json(path)
    inner = config.get("text_config")
    if isinstance(inner, dict) and "hidden_size" not in config:
        # A model that also sees or hears: its decoder is described one level down.
        outer = ("tie_word_embeddings", "quantization_config")
        silent = CLASS_DEFAULTS.get(str(inner.get("model_type")), {})
        above = {key: config[key] for key in outer if key in config}
        config = {"tie_word_embeddings": True, **above, **silent, **inner}
    check_sizes(config, str(path))
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as stream:
            value = json.loads(stream.read().decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}", hint="give a model directory or its config.json") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no JSON object")
    return value


# GGUF's name of a part of a layer -> transformers' name, in the order of a decoder's parameters.
_GGUF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GGUF_FAMILIES = {"gptneox": "gpt_neox", "phi2": "phi", "gemma3": "gemma3_text"}
_GGUF_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_BUFFERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def _from_gguf(path: Path) -> ModelFacts:
    header = read_gguf(path)
    tensors = [tensor for tensor in header.tensors if tensor.name not in _GGUF_BUFFERS]
    return ModelFacts(
        tensors=tuple(
            Tensor(_gguf_name(tensor.name), tensor.shape) for tensor in sorted(tensors, key=_gguf_place)
        ),
        dims=_gguf_dimensions(header.metadata, tensors, path),
        source="GGUF header",
        file_bytes=path.stat().st_size,
    )


def _gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) > 3:
        part = _GGUF_LAYER.get(parts[2], parts[2])
        return f"model.layers.{parts[1]}.{part}.{parts[-1]}"
    return f"{_GGUF_ENDS.get(parts[0], parts[0])}.{parts[-1]}"


def _gguf_place(tensor: Tensor) -> tuple[int, int, int, bool, str]:
    parts = tensor.name.split(".")
    if parts[0] == "blk" and len(parts) > 3 and parts[1].isdigit():
        roles = list(_GGUF_LAYER)
        role = roles.index(parts[2]) if parts[2] in roles else len(roles)
        return 1, int(parts[1]), role, parts[-1] != "weight", tensor.name
    order = {"token_embd": 0, "output_norm": 2, "output": 3}
    return order.get(parts[0], 2), 0, 0, False, tensor.name


def _gguf_dimensions(metadata: dict[str, Any], tensors: list[Tensor], path: Path) -> Dimensions:
    kind = metadata.get("general.architecture")
    by_name = {tensor.name: tensor for tensor in tensors}

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{kind}.{key}", default)
        if isinstance(value, list):  # one for each layer
            value = max(value)
        if not isinstance(value, int):
            raise ConfigError(f"{path}: the metadata has no {kind}.{key}", hint="use the original directory")
        return value

    if "token_embd.weight" not in by_name:
        raise ConfigError(f"{path} holds no token_embd.weight: it is no language model")
    hidden, heads = number("embedding_length"), number("attention.head_count")
    experts = number("expert_used_count", 0)
    inner = number("expert_feed_forward_length", number("feed_forward_length", 0))
    return Dimensions(
        vocab=by_name["token_embd.weight"].shape[0],
        hidden=hidden,
        intermediate=inner * max(1, experts),
        layers=number("block_count"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=number("attention.key_length", hidden // heads),
        gated=any(".ffn_gate" in name for name in by_name),
        qk_norm="blk.0.attn_q_norm.weight" in by_name,
        family=_GGUF_FAMILIES.get(str(kind), str(kind)),
        experts_per_token=experts,
    )
