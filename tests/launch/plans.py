"""A whole RunPlan for tests that only need one to be there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dslaunch.core.plan import OptimizerPlan, Origin, RunPlan
from tests.support.plans import make_plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "quickstart"  # a plan names what is there


def run_plan(run_dir: Path, argv: tuple[str, ...] | None = None, **more: Any) -> RunPlan:
    """Two local ranks; ``argv`` is by default what resolving gives. ``more`` replaces fields."""
    plan = make_plan(run_dir.parent, EXAMPLES, EXAMPLES / "train.jsonl")
    launch = dataclasses.replace(
        plan.launch,
        argv=argv or ("python", "-m", "dslaunch.train.worker", "--plan", f"{run_dir}/plan.json"),
        run_dir=str(run_dir),
    )
    fields: dict[str, Any] = {
        "name": "tiny",
        "seed": 1,
        "launch": launch,
        "optimizer": OptimizerPlan(type="AdamW", lr=1e-4, params={"lr": 1e-4, "betas": [0.9, 0.999]}),
        "ds_config": {"train_batch_size": 8, "optimizer": {"params": {"lr": 1e-4}}},
        "origins": {"seed": Origin(reason="given", source="run.yaml:3")},
    }
    return dataclasses.replace(plan, **{**fields, **more})
