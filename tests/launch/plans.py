"""A whole RunPlan for tests that only need one to be there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dslaunch.core.plan import (
    BatchPlan,
    DataPlan,
    DataSource,
    LaunchPlan,
    ModelPlan,
    OptimizerPlan,
    Origin,
    OutputPlan,
    RunPlan,
    SchedulerPlan,
)
from dslaunch.core.topology import local_topology


def run_plan(run_dir: Path, argv: tuple[str, ...] | None = None, **more: Any) -> RunPlan:
    """Two local ranks; ``argv`` is by default what resolving gives. ``more`` replaces fields."""
    launch = LaunchPlan(
        argv=argv or ("python", "-m", "dslaunch.train.worker", "--plan", f"{run_dir}/plan.json"),
        topology=local_topology(2),
        run_dir=str(run_dir),
        cwd=str(run_dir.parent),
    )
    plan = RunPlan(
        name="tiny", task="sft", seed=1, model=ModelPlan(path="/m", kind="directory"),
        data=DataPlan(train=(DataSource(path="/d.jsonl", kind="file"),)), adapter=None, precision="fp32",
        fp16=None, zero_stage=2, gradient_clipping=1.0,
        optimizer=OptimizerPlan(type="AdamW", lr=1e-4, params={"lr": 1e-4, "betas": [0.9, 0.999]}),
        scheduler=SchedulerPlan(type="constant"),
        batch=BatchPlan(
            train_batch_size=8, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1, world_size=2
        ),
        num_train_epochs=1.0, max_steps=None, output=OutputPlan(), launch=launch,
        ds_config={"train_batch_size": 8, "optimizer": {"params": {"lr": 1e-4}}},
        origins={"seed": Origin(reason="given", source="run.yaml:3")},
    )  # fmt: skip
    return dataclasses.replace(plan, **more)
