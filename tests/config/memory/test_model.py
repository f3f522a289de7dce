"""The parameters of a model from its files: against transformers itself, and hostile files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.memory.architectures import FAMILIES, parameters
from dslaunch.config.memory.class_defaults import CLASS_DEFAULTS
from dslaunch.config.memory.headers import read_gguf, read_safetensors
from dslaunch.config.memory.hub import cached_model
from dslaunch.config.memory.model import load_model_facts
from dslaunch.config.memory.of_run import Training, setup_of_config
from dslaunch.config.memory.setup import Setup
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import BatchPlan
from tests.support.tiny import make_tiny_model_dir

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": True, "attention_bias": True},
    "mistral": {**SIZES, "head_dim": 24},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen2": SIZES,
    "qwen2_moe": {**SIZES, **MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    "qwen3": SIZES,
    "qwen3_moe": {**SIZES, **MOE},
    "gemma": SIZES,
    "gemma2": SIZES,
    "gemma3_text": SIZES,
    "phi": {**SIZES, "qk_layernorm": True},
    "phi3": {**SIZES, "pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 130},
    "gpt_neox": {k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
}


@pytest.mark.parametrize("whole", [True, False], ids=["every key", "keys that differ from defaults"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_names_shapes_and_order_are_those_of_transformers(kind: str, whole: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    found = parameters(config.to_dict() if whole else config.to_diff_dict())
    assert found is not None
    assert [(tensor.name, tensor.shape) for tensor in found] == real


@pytest.mark.parametrize("kind", CLASS_DEFAULTS)
def test_a_nested_config_leaves_out_what_is_its_class_default(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig

    own = AutoConfig.for_model(kind)
    assert {key: getattr(own, key) for key in CLASS_DEFAULTS[kind]} == CLASS_DEFAULTS[kind]
    nested = {"model_type": "some_vision_model", "text_config": {"model_type": kind, "num_hidden_layers": 3}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    whole = AutoConfig.for_model(kind, num_hidden_layers=3).to_dict()
    tied = {"tie_word_embeddings": True}
    assert load_model_facts(tmp_path / "config.json").tensors == parameters(whole | tied)


@pytest.mark.parametrize("tie", [True, False])
def test_a_directory_counts_what_is_in_its_weights(tmp_path: Path, tie: bool) -> None:
    from transformers import AutoModelForCausalLM

    path = make_tiny_model_dir(tmp_path / "model", tie=tie)
    model = AutoModelForCausalLM.from_pretrained(path)
    facts = load_model_facts(path)
    assert facts.numel == sum(p.numel() for p in model.parameters())
    assert [t.name for t in facts.tensors] == [name for name, _ in model.named_parameters()]
    assert facts.file_dtype == "float32"
    assert facts.source == "1 safetensors header"
    assert load_model_facts(path / "config.json").tensors == facts.tensors


def test_weights_of_an_unknown_family_speak_for_themselves(tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path / "model")
    known = load_model_facts(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "novel"}))
    facts = load_model_facts(path)
    assert sorted(t.name for t in facts.tensors) == sorted(t.name for t in known.tensors)
    assert facts.numel == known.numel
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="model_type 'novel' is not one whose parameters are known"):
        load_model_facts(path)


def test_weights_that_differ_from_config_json_win_and_are_noted(tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    facts = load_model_facts(path)
    assert facts.note is not None and "the weights count" in facts.note


def test_shards_of_an_index_are_added_up_and_a_missing_one_is_named(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_tiny_model_dir(tmp_path / "one")
    sharded = tmp_path / "many"
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(sharded, max_shard_size="100KB")
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 1
    assert load_model_facts(sharded).tensors == load_model_facts(path).tensors
    shards[0].unlink()
    with pytest.raises(ConfigError, match=shards[0].name):
        load_model_facts(sharded)


def test_gguf_gives_the_same_parameters(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 48),
        (writer.add_block_count, 11),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
    ):
        add(value)
    writer.add_token_list([f"token {i}" for i in range(2000)])
    writer.add_token_types([1] * 2000)
    shapes = {"attn_norm": (32,), "ffn_down": (32, 48), "ffn_up": (48, 32), "attn_q": (32, 32)}
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    for i in range(11):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", np.zeros(shape, np.float16))
    writer.add_tensor("token_embd.weight", np.zeros((130, 32), np.float16))
    writer.add_tensor("rope_freqs.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    facts = load_model_facts(path)
    assert facts.numel == 130 * 32 + 32 + 11 * (32 + 2 * 48 * 32 + 32 * 32)
    assert [t.name for t in facts.tensors[:5]] == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
    ]
    assert facts.tensors[-1].name == "model.norm.weight"
    assert facts.tensors[3].shape == (32, 48)
    dims = facts.dims
    assert (dims.vocab, dims.hidden, dims.intermediate, dims.layers) == (130, 32, 48, 11)
    assert (dims.heads, dims.kv_heads, dims.head_dim) == (4, 2, 8)


def safetensors(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        safetensors(b"{}", 2**62),
        safetensors(b"not json"),
        safetensors(b"[]"),
        safetensors(b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}'),
        safetensors(b'{"a": {"dtype": "F32", "shape": [1]}}'),
        safetensors(b"{}"),
        safetensors(b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 4]}}'),
        safetensors(b'{"__metadata__": 5, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
    ],
)
def test_a_broken_safetensors_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_safetensors(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUX" + bytes(20),
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99),
    ],
)
def test_a_broken_gguf_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no readable GGUF file"):
        read_gguf(path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*config\.json"):
        load_model_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(ConfigError, match=r"config\.json has no"):
        load_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_model_facts(tmp_path)


LLAMA = {"model_type": "llama", **SIZES}
GPT2 = {"model_type": "gpt2", **CONFIGS["gpt2"]}


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (LLAMA, "num_attention_heads", 0),
        (LLAMA, "num_attention_heads", 7),
        (LLAMA, "hidden_size", -4),
        (LLAMA, "hidden_size", 1e30),
        (LLAMA, "hidden_size", 10**400),
        (LLAMA, "hidden_size", float("inf")),
        (LLAMA, "vocab_size", 10.5),
        (LLAMA, "vocab_size", 0),
        (LLAMA, "num_hidden_layers", 10**9),
        (LLAMA, "num_hidden_layers", 0),
        (LLAMA, "num_hidden_layers", True),
        (LLAMA, "intermediate_size", [96, 96]),
        (LLAMA, "num_key_value_heads", "2"),
        (GPT2, "n_layer", 10**9),
        (GPT2, "n_head", 7),
        ({"model_type": "qwen2_moe", **CONFIGS["qwen2_moe"]}, "decoder_sparse_step", 0),
        ({"model_type": "qwen2_moe", **CONFIGS["qwen2_moe"]}, "mlp_only_layers", 3),
    ],
)
def test_a_size_that_makes_no_model_is_named(
    tmp_path: Path, config: dict[str, Any], key: str, value: Any
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert load_model_facts(path).dims.layers == 2
    path.write_text(json.dumps({**config, key: value}))
    with pytest.raises(ConfigError) as caught:
        load_model_facts(path)
    assert str(caught.value).startswith(f"{path}: {key} ")


def test_heads_need_not_divide_the_model_where_their_size_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_attention_heads": 6, "head_dim": 8}))
    dims = load_model_facts(tmp_path / "config.json").dims
    assert (dims.heads, dims.head_dim) == (6, 8)


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "hub/models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc\n")
    assert cached_model("org/name", None, {"HF_HOME": str(tmp_path)}) is None
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "snapshots/abc/config.json").write_text("{}")
    for environ in ({"HF_HOME": str(tmp_path)}, {"HF_HUB_CACHE": str(tmp_path / "hub")}):
        assert cached_model("org/name", None, environ) == folder / "snapshots/abc"
    assert cached_model("org/name", "abc", {"HF_HOME": str(tmp_path)}) == folder / "snapshots/abc"
    assert cached_model("org/other", None, {"HF_HOME": str(tmp_path)}) is None


@pytest.mark.parametrize("weights", [[], {"a": 5}, {"a": None, "b": "c"}, "model.safetensors"])
def test_an_index_that_names_no_files_is_one_clear_error(tmp_path: Path, weights: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: weight_map does not say"):
        load_model_facts(tmp_path)


ONE_EACH = BatchPlan(
    train_batch_size=2, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1, world_size=2
)


def quantised_model(folder: Path, **block: Any) -> Path:
    config = {"model_type": "llama", **SIZES, "quantization_config": block}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", None])
def test_weights_that_no_adapter_is_trained_on_are_not_planned_as_others(tmp_path: Path, method: Any) -> None:
    block = {"bits": 4} if method is None else {"quant_method": method, "bits": 4}
    with pytest.raises(ConfigError, match=f"quantised by {method or 'what is not named'}") as caught:
        load_model_facts(quantised_model(tmp_path, **block))
    assert str(tmp_path) in caught.value.message and caught.value.hint


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_weights_in_4_bits_on_disk_are_planned_as_they_are(tmp_path: Path, method: Any) -> None:
    block = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": False}
    model = load_model_facts(quantised_model(tmp_path, **block))
    config = {"zero_optimization": {"stage": 2}}

    def planned() -> Setup:
        return setup_of_config(
            config,
            model,
            Training(method=method),
            precision="bf16",
            batch=ONE_EACH,
            ranks_per_host=2,
            device_type="cuda",
        )

    if method != "qlora":
        with pytest.raises(ConfigError, match=rf"--method {method}.*quantised already \(fp4\)"):
            planned()
        return
    packed = [part for part in planned().frozen if part.packed]
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    assert sum(part.elements for part in packed) == linear // 2
    assert sum(part.replicated for part in packed) == 4 * linear // 64 + 64 * len(packed)


def test_a_model_of_several_parts_says_above_how_it_is_quantised(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "awq"}, "text_config": {"model_type": "llama", **SIZES}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantised by awq"):
        load_model_facts(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("llm_int8_skip_modules", 5), ("llm_int8_threshold", "x"), ("bnb_4bit_quant_storage", "int3")],
)
def test_what_bitsandbytes_does_not_write_is_named(tmp_path: Path, key: str, value: Any) -> None:
    block = {"quant_method": "bitsandbytes", "load_in_8bit": True, key: value}
    with pytest.raises(ConfigError, match=rf"quantization_config\.{key} {value!r} is none") as caught:
        load_model_facts(quantised_model(tmp_path, **block))
    assert str(tmp_path) in caught.value.message
