"""Loading: right dtype, nothing untrusted, sizes that fit, adapters that match."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dslaunch.core.errors import ConfigError
from dslaunch.core.model_path import model_kind
from dslaunch.core.plan import ModelPlan
from dslaunch.train import file_hash, gguf
from dslaunch.train.adapters import GradientWitness, add_adapter, check_targets, lora_config
from dslaunch.train.gguf import convert_gguf, save_whole
from dslaunch.train.model import check_vocabulary, load_base_model, load_model, load_tokenizer
from tests.support.plans import LORA, make_plan, write_questions
from tests.support.ranks import check_ranks, run_ranks
from tests.support.tiny import make_tiny_model_dir, make_tiny_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


def _plan(path: Path, **settings: object) -> ModelPlan:
    return ModelPlan(path=str(path), kind="directory", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_has_the_asked_dtype(model_dir: Path, dtype: torch.dtype) -> None:
    model = load_base_model(_plan(model_dir), dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.config.use_cache is False


def test_adapters_have_the_models_dtype_and_rotary_tables_stay_fp32(model_dir: Path, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, model_dir, tmp_path / "none", adapter=LORA, precision="bf16")
    loaded = load_model(plan, load_tokenizer(plan.model, torch.bfloat16))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for n, b in loaded.model.named_buffers() if "inv_freq" in n} == {torch.float32}
    trained = [n for n, p in loaded.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)
    assert len(trained) == len(loaded.trainable)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_without_deepspeed_all_that_is_trained_is_fp32_and_the_rest_in_16_bits(
    model_dir: Path, tmp_path: Path, precision: str
) -> None:
    """GradScaler refuses gradients in 16 bits: adapters, DoRA's magnitudes and modules trained whole."""
    adapter = replace(LORA, type="dora", target_modules=("q_proj",), modules_to_save=("lm_head",))
    data = write_questions(tmp_path / "train.jsonl")
    plan = make_plan(tmp_path, model_dir, data, precision=precision, adapter=adapter, engine="torch")
    model = load_model(plan, load_tokenizer(plan.model, torch.float32)).model
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    for kind in ("lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save"):
        assert any(kind in name for name in trained), kind
    assert set(trained.values()) == {torch.float32}
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {low}


def test_new_adapter_weights_depend_on_the_seed_alone(model_dir: Path, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, model_dir, tmp_path / "none", adapter=LORA)
    tokenizer = load_tokenizer(plan.model, torch.float32)
    torch.manual_seed(1)
    first = load_model(plan, tokenizer).trainable
    torch.manual_seed(2)
    second = load_model(plan, tokenizer).trainable
    other = load_model(replace(plan, seed=8), tokenizer).trainable
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_pickled_weights_need_permission(model_dir: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(model_dir, pickled)
    torch.save(load_base_model(_plan(model_dir), torch.float32).state_dict(), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="only pickled weights") as caught:
        load_base_model(_plan(pickled), torch.float32)
    assert "model.allow_pickle" in str(caught.value.hint)
    assert load_base_model(_plan(pickled, allow_pickle=True), torch.float32) is not None


def test_code_of_the_repository_is_not_run(model_dir: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    shutil.copytree(model_dir, remote)
    config = json.loads((remote / "config.json").read_text())
    config["model_type"] = "of_their_own"
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (remote / "config.json").write_text(json.dumps(config))
    (remote / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError, match="Python code from its own repository"):
        load_base_model(_plan(remote), torch.float32)
    assert not (tmp_path / "ran").exists()


def test_weights_that_do_not_fill_the_model_are_refused(model_dir: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(model_dir, short)
    config = json.loads((short / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (short / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="do not fill the model"):
        load_base_model(_plan(short), torch.float32)


def test_a_directory_without_a_model_and_a_missing_gguf(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_base_model(_plan(tmp_path), torch.float32)
    missing = ModelPlan(path=str(tmp_path / "none.gguf"), kind="gguf")
    with pytest.raises(ConfigError, match="no model file"):
        load_base_model(missing, torch.float32)


def test_a_broken_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ConfigError, match="cannot be read as a language model"):
        convert_gguf(tmp_path / "x.gguf", torch.float32, tmp_path / "models")
    assert [p.name for p in (tmp_path / "models").iterdir() if not p.name.endswith(".lock")] == []


def test_a_rank_other_than_0_can_save_a_converted_model(model_dir: Path, tmp_path: Path) -> None:
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = load_base_model(_plan(model_dir), torch.float32)
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        model.save_pretrained(tmp_path / "upstream")
        save_whole(model, tmp_path / "ours")
    finally:
        torch.distributed.destroy_process_group()
    assert not (tmp_path / "upstream/config.json").exists()  # else save_whole is not needed
    assert (tmp_path / "ours/model.safetensors").stat().st_size > 90_000 * 4


def test_the_vocabulary_must_fit(model_dir: Path) -> None:
    model = load_base_model(_plan(model_dir), torch.float32)
    tokenizer = make_tiny_tokenizer(384)
    check_vocabulary(model, tokenizer, "tiny")
    tokenizer.add_tokens([f"<extra{i}>" for i in range(200)])
    with pytest.raises(ConfigError, match="but the embedding of tiny has 384 rows"):
        check_vocabulary(model, tokenizer, "tiny")


def test_the_plans_chat_template_and_a_missing_pad_token(model_dir: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(model_dir, own)
    config = json.loads((own / "tokenizer_config.json").read_text())
    config.pop("pad_token", None)
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(_plan(own, chat_template=str(template)), torch.float32)
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        load_tokenizer(_plan(own, chat_template=str(tmp_path / "none")), torch.float32)


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_one_adapter_name_that_matches_nothing_is_an_error(model_dir: Path, key: str) -> None:
    model = load_base_model(_plan(model_dir), torch.float32)
    check_targets(model, LORA)
    typo = replace(LORA, **{key: ("q_proj", "v_porj")})
    with pytest.raises(ConfigError, match=f"adapter.{key}: 'v_porj' matches no layer") as caught:
        add_adapter(model, typo)
    assert "v_proj" in str(caught.value.hint)
    assert "down_proj" in caught.value.message  # the candidates are listed
    with pytest.raises(
        ConfigError, match=f"adapter.{key}: 'proj' matches no layer"
    ):  # the end of a name is none
        check_targets(model, replace(LORA, **{key: ("q_proj", "proj")}))


def test_peft_is_given_what_the_plan_says() -> None:
    plain = lora_config(replace(LORA, r=3, lora_alpha=5.5, lora_dropout=0.25, modules_to_save=("lm_head",)))
    assert (plain.r, plain.lora_alpha, plain.lora_dropout) == (3, 5.5, 0.25)
    assert (plain.modules_to_save, plain.use_rslora, plain.use_dora) == (["lm_head"], False, False)
    other = lora_config(replace(LORA, type="dora", use_rslora=True), {"embed_tokens": (7,)})
    assert (other.use_rslora, other.use_dora) == (True, True)
    assert (other.modules_to_save, other.trainable_token_indices) == (None, {"embed_tokens": [7]})


def _alone(values: list[float]) -> list[float]:
    """The sum over one rank."""
    return values


def test_the_witness_sees_layers_that_get_no_gradient(model_dir: Path) -> None:
    model, _ = add_adapter(load_base_model(_plan(model_dir), torch.float32), LORA)
    ids = torch.arange(10).unsqueeze(0)
    witness = GradientWitness(model)
    model(input_ids=ids).logits.sum().backward()
    assert witness.check(_alone) is None
    del model.base_model.model.model.layers[1:]  # the last layer drops out of the forward ...
    extra = add_adapter(load_base_model(_plan(model_dir), torch.float32), LORA)[0]
    model.unused = extra  # ... and its adapter stays in the model
    witness = GradientWitness(model)
    model(input_ids=ids).logits.sum().backward()
    with pytest.raises(ConfigError, match="no gradient reached"):
        witness.check(_alone)


def test_a_backend_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"does not run with model\.attn_implementation sdpa") as caught:
        load_base_model(_plan(tmp_path, attn_implementation="sdpa"), torch.float32)
    assert "eager" in str(caught.value.hint)
    assert load_base_model(_plan(tmp_path, attn_implementation="eager"), torch.float32) is not None


def test_checkpointing_with_a_frozen_embedding_reaches_every_adapter(model_dir: Path, tmp_path: Path) -> None:
    plan = make_plan(
        tmp_path, model_dir, tmp_path / "none", adapter=LORA, model={"gradient_checkpointing": True}
    )
    ids = torch.arange(12).unsqueeze(0)
    model = load_model(plan, load_tokenizer(plan.model, torch.float32)).model
    assert not model.get_input_embeddings().weight.requires_grad
    witness = GradientWitness(model)
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert witness.check(_alone) is None
    # Why both are wired: the reentrant kind, whose inputs need no gradient, reaches none.
    other = add_adapter(load_base_model(_plan(model_dir), torch.float32), LORA)[0].train()
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    other.base_model.model.disable_input_require_grads()  # peft turns them on
    with pytest.raises(RuntimeError, match="does not require grad"):
        other(input_ids=ids, use_cache=False).logits.sum().backward()


class _TwoParts(torch.nn.Module):
    """Runs the part that is asked for, as a router does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        parts = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])
        self.layer = torch.nn.ModuleDict({name: parts})

    def forward(self, chosen: int) -> torch.Tensor:
        (parts,) = self.layer.values()
        result: torch.Tensor = parts[chosen](torch.ones(2)).sum()
        return result


@pytest.mark.parametrize("name", ["parts", "shared_experts"])  # those run for every token
def test_a_gradient_on_any_rank_counts(name: str) -> None:
    model = _TwoParts(name)
    witness = GradientWitness(model)
    model(0).backward()
    with pytest.raises(ConfigError, match=rf"1 trained parameters .* layer\.{name}\.1\.weight"):
        witness.check(_alone)
    witness = GradientWitness(model)
    model(0).backward()
    assert witness.check(lambda mine: [a + b for a, b in zip(mine, [0.0, 1.0], strict=True)]) is None


def test_an_expert_that_no_token_was_routed_to_is_only_told() -> None:
    model = _TwoParts("experts")
    witness = GradientWitness(model)
    model(1).backward()
    told = witness.check(_alone)
    assert told is not None
    assert "routed to 1 expert weights, e.g. layer.experts.0.weight" in told


def test_of_rows_each_counts_by_itself_in_any_micro_batch() -> None:
    model = torch.nn.Module()
    model.trainable_tokens_delta = torch.nn.Parameter(torch.ones(4, 2))
    model.weight = torch.nn.Parameter(torch.ones(2))
    witness = GradientWitness(model)
    for row, factor in ((0, -1.0), (2, 1.0)):
        (model.trainable_tokens_delta[row, 1] * factor + model.weight.sum()).backward()
    missing = "rows of tokens got no gradient: their tokens were not in the first step"
    assert witness.check(_alone) == f"2 {missing}"
    witness = GradientWitness(model)
    model.weight.sum().backward()
    assert witness.check(_alone) == f"4 {missing}"


def test_partitioned_parameters_are_cast_with_their_shares(ops_dir: Path) -> None:
    script = Path(__file__).with_name("rank_zero3_dtype.py")
    check_ranks(run_ranks([script], world_size=1))


def test_a_large_gguf_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def spy(path: Path) -> str:
        read.append(path)
        return "0"

    monkeypatch.setattr(file_hash, "_REMEMBER_FROM_BYTES", 0)
    monkeypatch.setattr(file_hash, "_SETTLED_S", -1.0)
    monkeypatch.setattr(file_hash, "_hash_content", spy)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    keys = {
        gguf._key(tmp_path / "x.gguf", dtype, tmp_path / "models")
        for dtype in (torch.float32, torch.float32, torch.bfloat16)
    }
    assert len(keys) == 2
    assert read == [tmp_path / "x.gguf"]


def test_model_kind(model_dir: Path) -> None:
    assert model_kind(str(model_dir)) == "directory"
    assert model_kind("x/y.GGUF") == "gguf"
    assert model_kind("org/name") == "hub"
