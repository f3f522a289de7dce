"""A saved plan reads back equal, and one that was edited says where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import LaunchPlan, RunPlan, from_json, load_run_plan, to_json
from dslaunch.core.topology import local_topology
from tests.config.build import plan_of

FULL = """
model: org/model
data:
  train: [{path: org/a, weight: 1}, {path: org/b, weight: 2.5}]
  eval: org/c
adapter: {target_modules: [q_proj, v_proj]}
precision: fp16
fp16: {loss_scale: 1024}
zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}
deepspeed: {activation_checkpointing: {partition_activations: true}, flops_profiler: {module_depth: -1}}
train_batch_size: 8
cluster: {gpu: a100, num_gpus_per_node: 2}
launch: {env: {A: "x y"}, secret_env: HF_TOKEN}
output: {report_to: [wandb]}
"""


def test_round_trip() -> None:
    plan = plan_of(FULL)
    text = json.dumps(to_json(plan))
    assert from_json(RunPlan, json.loads(text)) == plan
    assert to_json(from_json(RunPlan, json.loads(text))) == to_json(plan)


def test_a_launch_plan_alone_makes_the_round_trip() -> None:
    plan = LaunchPlan(
        argv=("a", "b c", ""), topology=local_topology(3), run_dir="/r", cwd="/", env={"K": "v\n"}
    )
    assert from_json(LaunchPlan, json.loads(json.dumps(to_json(plan)))) == plan


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (["zero_stage"], 7, "zero_stage: expected"),
        (["seed"], "1", "seed: expected int, found '1'"),
        (["seed"], True, "seed: expected int, found True"),
        (["batch", "new"], 1, "batch.new: unknown key"),
        (["data", "train", 1, "kind"], "disk", "data.train[1].kind"),
        (["fp16", "loss_scale"], "auto", "fp16.loss_scale"),
        (["origins", "seed"], {"reason": "x"}, "origins.seed.source: missing"),
    ],
)
def test_an_edited_plan_names_the_key(path: list[Any], value: Any, part: str) -> None:
    saved = to_json(plan_of(FULL))
    target: Any = saved
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        from_json(RunPlan, saved)
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "is not JSON"),
        ("[]", "schema_version is None"),
        ('{"schema_version": 99}', "reads 1"),
        (None, "no plan at"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str | None, part: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        load_run_plan(path)
