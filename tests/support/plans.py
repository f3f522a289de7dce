"""RunPlans built by hand, for tests that start the worker without the resolver."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dslaunch.core.atomic import write_json
from dslaunch.core.plan import (
    AdapterPlan,
    BatchPlan,
    DataPlan,
    DataSource,
    EngineKind,
    LaunchPlan,
    ModelPlan,
    OptimizerPlan,
    OutputPlan,
    RunPlan,
    SchedulerPlan,
    to_json,
)
from dslaunch.core.topology import local_topology

LORA = AdapterPlan(type="lora", r=4, lora_alpha=8.0, lora_dropout=0.0, target_modules=("all-linear",))


def write_questions(path: Path, count: int = 24) -> Path:
    """A small chat data set of unequal lengths, one JSON object a line."""
    lines = []
    for i in range(count):
        answer = "The keeper says " + "yes and " * (i % 5) + f"number {i}."
        question = {"role": "user", "content": f"Who keeps house {i}?"}
        lines.append(json.dumps({"messages": [question, {"role": "assistant", "content": answer}]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_plan(
    root: Path,
    model_dir: Path,
    data: Path,
    *,
    eval_data: Path | None = None,
    world_size: int = 2,
    micro: int = 2,
    accumulation: int = 2,
    zero_stage: int = 2,
    precision: str = "fp32",
    adapter: AdapterPlan | None = None,
    max_steps: int | None = 4,
    num_train_epochs: float | None = None,
    packing: bool = False,
    max_length: int = 128,
    lr: float = 1e-3,
    gradient_clipping: float = 1.0,
    optimizer: OptimizerPlan | None = None,
    output: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    ds_config: Mapping[str, Any] | None = None,
    engine: EngineKind = "deepspeed",
    torch_autocast: bool = False,
) -> RunPlan:
    """A plan whose run directory is ``root/run``; the worker can be started on it at once."""
    run_dir = root / "run"
    batch = BatchPlan(
        train_batch_size=micro * accumulation * world_size,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=accumulation,
        world_size=world_size,
    )
    return RunPlan(
        name="test",
        task="sft",
        seed=7,
        model=ModelPlan(path=str(model_dir), kind="directory", **(model or {})),
        data=DataPlan(
            train=(DataSource(path=str(data), kind="file"),),
            eval=(DataSource(path=str(eval_data), kind="file"),) if eval_data else (),
            max_length=max_length,
            packing=packing,
            cache_dir=str(root / "tokens"),
        ),
        adapter=adapter,
        precision=precision,  # type: ignore[arg-type]
        fp16=None,
        zero_stage=zero_stage if engine == "deepspeed" else 0,  # type: ignore[arg-type]
        gradient_clipping=gradient_clipping,
        optimizer=replace(
            optimizer or OptimizerPlan(type="AdamW", lr=lr, params={"lr": lr, "weight_decay": 0.0}),
            made_by="dslaunch" if engine == "torch" else "deepspeed",
        ),
        scheduler=SchedulerPlan(type="linear", warmup_steps=2),
        batch=batch,
        num_train_epochs=num_train_epochs,
        max_steps=None if num_train_epochs else max_steps,
        output=OutputPlan(**(output or {})),
        launch=LaunchPlan(
            argv=("python", "-m", "dslaunch.train.worker", "--plan", str(run_dir / "plan.json")),
            topology=local_topology(world_size),
            run_dir=str(run_dir),
            cwd=str(root),
        ),
        ds_config={}
        if engine == "torch"
        else {
            **_ds_config(batch, zero_stage, "autocast" if torch_autocast else precision, lr),
            **(ds_config or {}),
        },
        origins={},
        engine=engine,
        torch_autocast=() if torch_autocast else None,
    )


def save_plan(plan: RunPlan) -> Path:
    """Write the plan into its run directory, as the launcher does; the path of plan.json."""
    run_dir = Path(plan.launch.run_dir)
    for folder in (run_dir / "logs", run_dir / "checkpoints"):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "plan.json", to_json(plan))
    return run_dir / "plan.json"


def in_directory(plan: RunPlan, root: Path) -> RunPlan:
    """The same plan with its run directory under ``root``."""
    run_dir = root / "run"
    argv = ("python", "-m", "dslaunch.train.worker", "--plan", str(run_dir / "plan.json"))
    return replace(plan, launch=replace(plan.launch, run_dir=str(run_dir), cwd=str(root), argv=argv))


def read_rows(path: Path, kind: str | None = None) -> Sequence[dict[str, Any]]:
    """The objects of a JSON-lines file, of one kind or all."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if kind is None or row["kind"] == kind]


def _ds_config(batch: BatchPlan, zero_stage: int, precision: str, lr: float) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "torch_adam": True}},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": False},
    }
    if precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if zero_stage == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return config
