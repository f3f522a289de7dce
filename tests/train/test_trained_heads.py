"""A head or an embedding that is trained, in full or by LoRA, is evaluated, resumed and exported as trained.

Five held-out samples on two ranks of two rows: one rank has nothing left in the last round.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dslaunch.core.plan import AdapterPlan, RunPlan
from dslaunch.train.data.collate import Batch, collate
from dslaunch.train.data.dataset import TokenizingOptions, prepare_dataset
from dslaunch.train.export import export_checkpoint
from tests.support.plans import LORA, in_directory, make_plan, read_rows, save_plan, write_questions
from tests.support.ranks import check_ranks, run_ranks
from tests.support.tiny import make_tiny_model_dir

SCRIPT = Path(__file__).with_name("rank_plans.py")
NARROW = replace(LORA, target_modules=("q_proj", "down_proj"))
# The head of ``tied`` is its embedding: training one of them parts the two.
KINDS: dict[str, tuple[str, int, AdapterPlan]] = {
    "head": ("tied", 3, replace(NARROW, modules_to_save=("lm_head",))),
    "embedding": ("tied", 2, replace(NARROW, modules_to_save=("embed_tokens",))),
    "both": ("untied", 3, replace(NARROW, modules_to_save=("embed_tokens", "lm_head"))),
    "adapted embedding": ("tied", 2, replace(LORA, target_modules=("embed_tokens",))),
    "adapted head": ("tied", 3, replace(LORA, target_modules=("lm_head", "q_proj"))),
}


@pytest.fixture(scope="module")
def plans(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, RunPlan]:
    """Finished runs of four steps, and beside each, as ``NAME resumed``, one that went on from step 2."""
    root = tmp_path_factory.mktemp("modules")
    make_tiny_model_dir(root / "tied", layers=1)
    make_tiny_model_dir(root / "untied", layers=1, tie=False, vocab_size=311)
    data, held_out = write_questions(root / "train.jsonl"), write_questions(root / "eval.jsonl", 5)
    found: dict[str, RunPlan] = {}
    for name, (model, stage, adapter) in KINDS.items():
        found[name] = make_plan(
            root / name, root / model, data, eval_data=held_out, zero_stage=stage, adapter=adapter, lr=1e-2,
            output={"save_steps": 2},
        )  # fmt: skip
    _run([str(save_plan(plan)) for plan in found.values()])
    resumed = {
        f"{name} resumed": _stopped_at_step_2(plan, root / f"{name}-resumed") for name, plan in found.items()
    }
    _run([f"{plan.launch.run_dir}/plan.json:resume" for plan in resumed.values()])
    return {**found, **resumed}


def _stopped_at_step_2(plan: RunPlan, root: Path) -> RunPlan:
    other = in_directory(plan, root)
    shutil.copytree(plan.launch.run_dir, other.launch.run_dir)
    save_plan(other)
    shutil.rmtree(Path(other.launch.run_dir) / "checkpoints/step-4")
    return other


def _run(arguments: list[str]) -> None:
    check_ranks(run_ranks([SCRIPT, *arguments], world_size=2, timeout_s=240))


def _held_out(plan: RunPlan, cache: Path) -> Batch:
    options = TokenizingOptions(
        tokenizer=AutoTokenizer.from_pretrained(plan.model.path), max_length=128,
        cache_dir=cache, max_dropped_fraction=0.0, seed=0,
    )  # fmt: skip
    data = prepare_dataset(plan.data.eval, options)
    assert len(data) == 5
    return collate([[data[i]] for i in range(len(data))], pad_token_id=2, packed=False)


def _loss(model: torch.nn.Module, batch: Batch) -> float:
    with torch.no_grad():
        logits = model.eval()(**batch.model_inputs()).logits
    return float(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    )


@pytest.mark.parametrize("name", KINDS)
def test_what_is_exported_has_the_held_out_loss_of_the_run(
    plans: Mapping[str, RunPlan], tmp_path: Path, name: str
) -> None:
    plan, batch = plans[name], _held_out(plans[name], tmp_path / "tokens")
    rows = read_rows(Path(plan.launch.run_dir) / "metrics.jsonl", "eval")
    first, last = rows[0]["loss"], rows[-1]["loss"]
    base = AutoModelForCausalLM.from_pretrained(plan.model.path)
    assert first == pytest.approx(_loss(base, batch), rel=1e-5)
    assert last < first - 0.1
    export_checkpoint(Path(plan.launch.run_dir), tmp_path / "adapter")
    export_checkpoint(Path(plan.launch.run_dir), tmp_path / "merged", merge=True)
    assert _loss(PeftModel.from_pretrained(base, tmp_path / "adapter"), batch) == pytest.approx(
        last, rel=1e-5
    )
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert _loss(merged, batch) == pytest.approx(last, rel=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_each_part_was_trained_and_comes_back_from_a_checkpoint(
    plans: Mapping[str, RunPlan], tmp_path: Path, name: str
) -> None:
    for run in (name, f"{name} resumed"):
        export_checkpoint(Path(plans[run].launch.run_dir), tmp_path / run)
    straight, resumed = (
        load_file(tmp_path / run / "adapter_model.safetensors") for run in (name, f"{name} resumed")
    )
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in straight.items())
    assert all(float(tensor.abs().max()) > 1e-3 for tensor in straight.values())  # B began as 0
    base = AutoModelForCausalLM.from_pretrained(plans[name].model.path).state_dict()
    for module in KINDS[name][2].modules_to_save:
        (key,) = [key for key in straight if module in key]
        (before,) = [tensor for base_key, tensor in base.items() if module in base_key]
        assert straight[key].shape == before.shape
        assert float((straight[key] - before).abs().max()) > 1e-3
