"""Exports load with plain transformers and peft, and hold exactly what was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import ModelPlan
from dslaunch.train import export
from dslaunch.train.checkpoint.pickles import check_pickle
from dslaunch.train.data.collate import collate
from dslaunch.train.export import export_checkpoint
from dslaunch.train.weights import TrainedWeights, check_tensors, find_checkpoint, load_trained_weights
from tests.support.plans import read_rows
from tests.train.conftest import FinishedRuns

ADAPTERS = ["s0-lora", "s1-lora-bf16", "s3-lora", "s3-dora", "s2-dropout"]
ADAPTERS += ["torch-dropout-bf16", "s3-autocast-lora-bf16"]
FULL = ["s0-full", "s2-full", "s3-full-bf16", "torch-full-bf16", "s0-autocast-bf16"]
IDS = torch.arange(5, 45).unsqueeze(0)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=IDS).logits
    return logits.float()


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_loads_with_peft_and_equals_the_merged_model(
    finished_runs: FinishedRuns, tmp_path: Path, name: str
) -> None:
    run_dir = finished_runs.run_dir(name)
    report = export_checkpoint(run_dir, tmp_path / "adapter")
    assert (report.kind, report.dtype) == ("adapter", "float32")
    merged = export_checkpoint(run_dir, tmp_path / "merged", merge=True)
    assert merged.max_logit_drift is not None and merged.max_logit_drift < 1e-4

    base = AutoModelForCausalLM.from_pretrained(finished_runs.root / "model", dtype=torch.float32)
    plain = _logits(base)
    adapted = _logits(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert not torch.allclose(adapted, plain, atol=1e-4)  # the adapter does something
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tolerance = 0.05 if name.endswith("bf16") else 1e-5  # merged weights are rounded to the run's dtype
    assert torch.allclose(_logits(whole), adapted, atol=tolerance)
    assert whole.config.tie_word_embeddings and whole.lm_head.weight is whole.model.embed_tokens.weight


@pytest.mark.parametrize("name", [name for name in ADAPTERS if "dora" not in name])
def test_merging_adds_the_scaled_product_and_rounds_once(
    finished_runs: FinishedRuns, tmp_path: Path, name: str
) -> None:
    """Weight by weight and bit by bit: a merge that did nothing, or half of it, would differ."""
    plan = finished_runs.plans[name]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[plan.precision]
    assert plan.adapter is not None
    export_checkpoint(finished_runs.run_dir(name), tmp_path / "adapter")
    export_checkpoint(finished_runs.run_dir(name), tmp_path / "merged", merge=True)
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    directories = finished_runs.root / "model", tmp_path / "merged"
    base, merged = (load_file(directory / "model.safetensors") for directory in directories)
    assert base.keys() == merged.keys()
    changed = 0
    for weight_name, weight in base.items():
        expected = weight.to(dtype)
        factor = f"base_model.model.{weight_name.removesuffix('.weight')}.lora_"
        if f"{factor}A.weight" in adapter:
            a, b = adapter[f"{factor}A.weight"], adapter[f"{factor}B.weight"]
            scaling = plan.adapter.lora_alpha / plan.adapter.r
            expected = (weight.to(dtype).float() + (b @ a) * scaling).to(dtype)
            changed += not torch.equal(expected, weight.to(dtype))
        assert torch.equal(merged[weight_name], expected), weight_name
    assert changed == len(adapter) // 2


@pytest.mark.parametrize("name", FULL)
def test_full_model_loads_and_was_trained(finished_runs: FinishedRuns, tmp_path: Path, name: str) -> None:
    plan = finished_runs.plans[name]
    report = export_checkpoint(finished_runs.run_dir(name), tmp_path / "model")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[plan.precision]
    base = AutoModelForCausalLM.from_pretrained(plan.model.path)
    before, after = dict(base.named_parameters()), dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert report.num_parameters == sum(p.numel() for p in after.values())
    assert all(before[n].shape == after[n].shape for n in before)
    assert all(not torch.equal(before[n].float(), after[n].float()) for n in before if "norm" not in n)


def test_modules_in_fp32_are_exported_as_they_were_trained(
    finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    run_dir = finished_runs.run_dir("s3-wide-bf16")
    export_checkpoint(run_dir, tmp_path / "model")
    masters = load_trained_weights(find_checkpoint(run_dir)).tensors
    written = load_file(tmp_path / "model/model.safetensors")
    assert written and written.keys() == masters.keys()
    for name, tensor in written.items():
        wide = "norm" in name or "lm_head" in name
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
        assert torch.equal(tensor, masters[name] if wide else masters[name].bfloat16()), name
        assert not wide or not torch.equal(tensor, tensor.bfloat16().float()), name


def test_exported_model_has_the_held_out_loss_of_the_run(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    """The weights on disk are those the last evaluation saw: nothing was lost on the way."""
    from dslaunch.train.data.dataset import TokenizingOptions, prepare_dataset

    export_checkpoint(finished_runs.run_dir("s0-full"), tmp_path / "model")
    plan = finished_runs.plans["s0-full"]
    options = TokenizingOptions(
        tokenizer=AutoTokenizer.from_pretrained(tmp_path / "model"),
        max_length=128,
        cache_dir=tmp_path / "tokens",
        max_dropped_fraction=0.0,
        seed=0,
    )
    data = prepare_dataset(plan.data.eval, options)
    batch = collate([[data[i]] for i in range(len(data))], pad_token_id=2, packed=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        logits = model(**batch.model_inputs()).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    last = read_rows(finished_runs.run_dir("s0-full") / "metrics.jsonl", "eval")[-1]
    assert float(loss) == pytest.approx(last["loss"], rel=1e-5)


def test_tokenizer_template_and_generation_settings_come_along(
    finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    export_checkpoint(finished_runs.run_dir("s0-full"), tmp_path / "model")
    ours = AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(finished_runs.root / "model")
    assert ours.chat_template == theirs.chat_template
    assert ours.get_vocab() == theirs.get_vocab()
    settings = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert settings["eos_token_id"] == theirs.eos_token_id


def test_files_follow_the_umask(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    export_checkpoint(finished_runs.run_dir("s0-lora"), tmp_path / "out")
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()}
    assert len(set(modes.values())) == 1, modes
    assert modes["adapter_model.safetensors"] == (tmp_path / "out").stat().st_mode & 0o666


def test_an_earlier_checkpoint_is_exported_by_its_path(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = finished_runs.run_dir("s2-dropout")
    report = export_checkpoint(run_dir / "checkpoints/step-3", tmp_path / "step-3")
    assert report.step == 3
    export_checkpoint(run_dir, tmp_path / "last")
    early, late = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("step-3", "last"))
    assert any(not torch.equal(early[n], late[n]) for n in early)


def test_an_existing_directory_is_kept_without_force(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = finished_runs.run_dir("s0-lora")
    export_checkpoint(run_dir, tmp_path / "out")
    (tmp_path / "out/mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(run_dir, tmp_path / "out")
    assert (tmp_path / "out/mine.txt").exists()
    export_checkpoint(run_dir, tmp_path / "out", force=True)
    assert not (tmp_path / "out/mine.txt").exists()
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="neither a model nor an adapter"):
        export_checkpoint(run_dir, precious, force=True)
    assert (precious / "thesis.tex").exists()


def _trained(model: Any, directory: Path, dtype: torch.dtype) -> export._Trained:
    """As if ``model``, saved in ``directory``, had been trained: every parameter has moved by 1."""
    model.save_pretrained(directory)
    tensors = {name: p.detach() + 1 for name, p in model.named_parameters()}
    plan = ModelPlan(path=str(directory), kind="directory")
    manifest: Any = None
    no_tokens = None  # nothing is added to the vocabulary
    return export._Trained(TrainedWeights(directory, manifest, tensors), plan, None, dtype, no_tokens)


def _tiny_deepseek() -> Any:
    """Has a buffer that belongs to its weights (the experts' bias), and fused experts."""
    config = DeepseekV3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=8,
        qk_nope_head_dim=8,
        first_k_dense_replace=1,
    )
    model = DeepseekV3ForCausalLM(config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return model


def _tiny_mixtral() -> Any:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )


@pytest.mark.parametrize("make", [_tiny_deepseek, _tiny_mixtral])
def test_models_whose_files_differ_from_their_modules(make: Callable[[], Any], tmp_path: Path) -> None:
    """Buffers come from the base; transformers saves fused experts one by one, under other names."""
    model = make()
    out = tmp_path / "out"
    out.mkdir()
    export._write_full_model(_trained(model, tmp_path / "base", torch.float32), out)
    written, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    trained = dict(model.named_parameters())
    assert trained.keys() == dict(written.named_parameters()).keys()
    assert all(torch.equal(p, trained[name] + 1) for name, p in written.named_parameters())
    state = written.state_dict()
    assert all(torch.equal(state[name], model.state_dict()[name]) for name in export.saved_buffers(model))
    assert len(export.saved_buffers(model)) == (make is _tiny_deepseek)


def test_a_model_that_was_not_written_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_without_head(self: Any, directory: Path) -> None:
        save_file({"x": torch.zeros(3)}, directory / "model.safetensors")

    trained = _trained(_tiny_mixtral(), tmp_path / "base", torch.float32)
    monkeypatch.setattr(MixtralForCausalLM, "save_pretrained", save_without_head)
    with pytest.raises(ConfigError, match="the written model has 3 numbers, and"):
        export._write_full_model(trained, tmp_path)


def test_a_gguf_run_is_exported_from_the_conversion_that_it_trained_on(
    finished_runs: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .gguf is converted for each dtype apart: asking for another one would convert the whole file."""
    from dslaunch.train import model as model_module

    asked: list[torch.dtype] = []

    def convert(path: Path, dtype: torch.dtype, models_dir: Path) -> Path:
        asked.append(dtype)
        return finished_runs.root / "model"

    run_dir = tmp_path / "step-4"
    shutil.copytree(finished_runs.run_dir("s1-lora-bf16") / "checkpoints/step-4", run_dir)
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest["extra"]["model"].update(path=str(tmp_path / "m.gguf"), kind="gguf")
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(model_module, "convert_gguf", convert)
    export_checkpoint(run_dir, tmp_path / "adapter")
    export_checkpoint(run_dir, tmp_path / "merged", merge=True)
    assert set(asked) == {torch.bfloat16}


def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(
    finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    copy = tmp_path / "checkpoints/step-4"
    shutil.copytree(finished_runs.run_dir("s0-lora") / "checkpoints/step-4", copy)
    shard = next(copy.glob("*.pt"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        export_checkpoint(copy, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints"]


def test_numpy_scalars_in_a_checkpoint_are_known(tmp_path: Path) -> None:
    torch.save({"step": np.int64(3), "norm": np.float32(1.5)}, tmp_path / "states.pt")
    check_pickle(tmp_path / "states.pt")


def test_a_pickle_that_runs_code_is_named_and_not_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("this ran",)

    torch.save({"module": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match=r"refers to (__builtin__|builtins)\.print"):
        check_pickle(tmp_path / "evil.pt")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "a is missing"),
        ({"a": torch.ones(2, 3), "b": torch.ones(1)}, "b does not belong"),
        ({"a": torch.ones(0)}, "has shape"),
        ({"a": torch.ones(3, 2)}, "has shape"),
        ({"a": torch.full((2, 3), float("nan"))}, "nan or inf"),
    ],
)
def test_check_tensors(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tensors(tensors, {"a": (2, 3)}, "here")


def test_merge_of_a_full_run_and_no_checkpoint_are_explained(
    finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="trained the whole model"):
        export_checkpoint(finished_runs.run_dir("s0-full"), tmp_path / "out", merge=True)
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        find_checkpoint(tmp_path)
