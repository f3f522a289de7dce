"""Finished runs of many kinds, made once by one pair of ranks, that several test modules look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dslaunch.core.plan import OptimizerPlan, RunPlan
from tests.support.plans import LORA, make_plan, save_plan, write_questions
from tests.support.ranks import check_ranks, run_ranks
from tests.support.tiny import make_tiny_model_dir

WIDE = ("*norm*", "lm_head")
SCRIPT = Path(__file__).with_name("rank_plans.py")


@dataclass(frozen=True)
class FinishedRuns:
    """``plans`` by name; ``stdout`` of rank 0; ``root`` holds ``model`` and ``untied`` too."""

    root: Path
    plans: Mapping[str, RunPlan]
    stdout: str

    def run_dir(self, name: str) -> Path:
        return Path(self.plans[name].launch.run_dir)


@pytest.fixture(scope="session")
def finished_runs(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    root = tmp_path_factory.mktemp("runs")
    plans = _plans(root)
    arguments = [str(save_plan(plan)) for plan in plans.values()]
    arguments.append(f"{plans['s2-dropout'].launch.run_dir}/plan.json:resume")
    results = run_ranks([SCRIPT, *arguments], world_size=2, timeout_s=240)
    check_ranks(results)
    assert all(f"EXIT {argument} 0" in results[1].stdout for argument in arguments)
    return FinishedRuns(root, plans, results[0].stdout)


def _plans(root: Path) -> dict[str, RunPlan]:
    model = make_tiny_model_dir(root / "model")
    # Odd sizes, so that no shard of any ZeRO stage ends where a tensor does.
    untied = make_tiny_model_dir(root / "untied", tie=False, vocab_size=311, layers=1)
    data = write_questions(root / "train.jsonl")
    held_out = write_questions(root / "eval.jsonl", 5)
    dropout = replace(LORA, lora_dropout=0.2)
    dora = replace(LORA, type="dora", target_modules=("q_proj", "down_proj"))
    kinds: dict[str, dict[str, object]] = {
        "s0-full": {"zero_stage": 0, "eval_data": held_out},
        "s2-full": {"zero_stage": 2, "model_dir": untied},
        "s3-full-bf16": {"zero_stage": 3, "precision": "bf16"},
        "s3-wide-bf16": {"zero_stage": 3, "precision": "bf16", "model_dir": untied, "fp32_modules": WIDE},
        "s0-lora": {"zero_stage": 0, "adapter": LORA, "packing": True},
        "s1-lora-bf16": {"zero_stage": 1, "adapter": LORA, "precision": "bf16"},
        "s3-lora": {
            "zero_stage": 3,
            "adapter": LORA,
            "packing": True,
            "model": {"gradient_checkpointing": True},
        },
        "s3-dora": {"zero_stage": 3, "adapter": dora},
        "s0-autocast-bf16": {"zero_stage": 0, "precision": "bf16", "torch_autocast": True},
        "s3-autocast-lora-bf16": {
            "zero_stage": 3,
            "precision": "bf16",
            "torch_autocast": True,
            "adapter": LORA,
        },
        "torch-full-bf16": {"engine": "torch", "precision": "bf16"},
        "torch-dropout-bf16": {
            "engine": "torch",
            "precision": "bf16",
            "adapter": dropout,
            "max_steps": 8,
            "output": {"save_steps": 3, "eval_steps": 4},
            "eval_data": held_out,
        },
        # 24 samples, 8 a step: the eight steps go through two epochs and into the third.
        "s2-dropout": {
            "zero_stage": 2,
            "adapter": dropout,
            "max_steps": 8,
            "output": {"save_steps": 3, "eval_steps": 4},
            "eval_data": held_out,
        },
    }
    # Noise and groups ride along where the random state and the optimizer's are looked at.
    noisy = OptimizerPlan(
        type="AdamW", lr=1e-3, params={"lr": 1e-3, "weight_decay": 0.1}, loraplus_lr_ratio=4.0
    )
    plans = {}
    for name, settings in kinds.items():
        settings = {"model_dir": model, "data": data, **settings}
        wide = settings.pop("fp32_modules", ())
        plan = make_plan(root / name, **settings)  # type: ignore[arg-type]
        plans[name] = replace(plan, fp32_modules=wide)  # type: ignore[arg-type]
    plans["s2-dropout"] = replace(plans["s2-dropout"], neftune_noise_alpha=5.0, optimizer=noisy)
    return plans
