"""What a QLoRA run leaves: an adapter for the same base in plain peft, or a merged model in 16 bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import RunPlan
from tests.support.plans import LORA, make_plan, save_plan, write_questions
from tests.support.ranks import check_ranks, run_ranks
from tests.support.tiny import make_tiny_model_dir
from tests.train.rank_quantised import FOUR

SCRIPT = Path(__file__).with_name("rank_plans.py")


@pytest.fixture(scope="module")
def run(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """A finished run of NF4 at stage 3, trained far enough from where it began."""
    root = tmp_path_factory.mktemp("qlora")
    data = write_questions(root / "train.jsonl")
    plan = make_plan(
        root, make_tiny_model_dir(root / "model", layers=1), data, eval_data=data, zero_stage=3,
        precision="bf16", adapter=LORA, lr=2e-2, accumulation=1,
        model={"quantization_config": FOUR, "gradient_checkpointing": True},
    )  # fmt: skip
    results = run_ranks([SCRIPT, str(save_plan(plan))], world_size=2, timeout_s=240)
    check_ranks(results)
    assert "frozen weights are kept in nf4 with double quantisation" in results[0].stderr
    return plan


@pytest.fixture(scope="module")
def adapter_dir(run: RunPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dslaunch.train.export import export_checkpoint

    out = tmp_path_factory.mktemp("exports") / "adapter"
    report = export_checkpoint(Path(run.launch.run_dir), out)
    assert (report.kind, report.quantization) == ("adapter", "nf4 with double quantisation")
    return out


def plain_logits(run: RunPlan, adapter_dir: Path):  # type: ignore[no-untyped-def]
    """What transformers and peft themselves make of the export."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(**json.loads((adapter_dir / "quantization_config.json").read_text()))
    base = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.bfloat16, quantization_config=how)
    model = PeftModel.from_pretrained(base, adapter_dir, autocast_adapter_dtype=False)
    return logits_of(model)


def logits_of(model):  # type: ignore[no-untyped-def]
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 37).unsqueeze(0)).logits.float()


def test_plain_peft_has_the_trained_model_on_the_same_quantised_base(run: RunPlan, adapter_dir: Path) -> None:
    """To the bit what the run itself has after its last step, loaded as the run loads it."""
    import torch

    from dslaunch.train.adapters import add_adapter
    from dslaunch.train.model import load_base_model
    from dslaunch.train.weights import find_checkpoint, load_trained_weights

    base = load_base_model(run.model, torch.bfloat16)
    assert run.adapter is not None
    model, _ = add_adapter(base, run.adapter)
    weights = load_trained_weights(find_checkpoint(Path(run.launch.run_dir)))
    model.load_state_dict({k: v.to(torch.bfloat16) for k, v in weights.tensors.items()}, strict=False)
    here = logits_of(model)
    with model.disable_adapter():
        assert not torch.allclose(logits_of(model), here, atol=0.05)  # the training has changed something
    assert torch.allclose(plain_logits(run, adapter_dir), here, atol=0.02)


def test_generate_takes_the_base_as_it_was_trained_on(adapter_dir: Path) -> None:
    from dslaunch.train.generate import load_generator
    from dslaunch.train.quantization import is_quantised

    generator = load_generator(str(adapter_dir))
    assert sum(is_quantised(p) for p in generator.model.parameters()) == 7


def test_merged_it_is_what_was_trained_but_for_16_bit(
    run: RunPlan, adapter_dir: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from dslaunch.train.export import export_checkpoint

    report = export_checkpoint(Path(run.launch.run_dir), tmp_path / "merged", merge=True)
    assert report.dtype == "bfloat16"
    assert report.max_logit_drift is not None and report.max_logit_drift < 1e-4
    assert report.max_logit_drift_rounded is not None and 1e-4 < report.max_logit_drift_rounded < 0.1
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits_of(merged), plain_logits(run, adapter_dir), atol=0.1)


def test_merged_onto_the_original_it_is_another_model_and_says_by_how_much(
    run: RunPlan, tmp_path: Path
) -> None:
    from dslaunch.train.export import export_checkpoint

    source = Path(run.launch.run_dir)
    report = export_checkpoint(source, tmp_path / "other", merge=True, onto_original=True)
    assert report.max_logit_drift is not None and report.max_logit_drift > 0.01
    with pytest.raises(ConfigError, match=r"--onto-original says what --merge folds an adapter into"):
        export_checkpoint(source, tmp_path / "third", onto_original=True)
