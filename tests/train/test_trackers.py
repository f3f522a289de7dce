"""The real wandb and MLflow, without a network: the curves they keep are those of metrics.jsonl."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from dslaunch.core.plan import RunPlan
from tests.support.plans import make_plan, read_rows, save_plan, write_questions
from tests.support.python import run_python
from tests.support.ranks import check_ranks, run_ranks
from tests.support.tiny import make_tiny_model_dir
from tests.train.tracker_curves import Curves

TRACKERS = [
    pytest.param("wandb", marks=pytest.mark.needs("wandb")),
    pytest.param("mlflow", marks=pytest.mark.needs("mlflow")),
]

WRITE_AND_RESUME = """
import json, math, pathlib, sys
from dslaunch.core.plan import RunPlan, from_json
from dslaunch.train.report import check_trackers, open_report
plan = from_json(RunPlan, json.loads(pathlib.Path(sys.argv[1]).read_text()))
check_trackers(plan.output.report_to)
def write(first_step, last_step):
    report = open_report(plan, is_main=True, first_step=first_step)
    for step in range(first_step + 1, last_step + 1):
        loss = math.nan if step == 2 else math.exp(-step) + first_step
        report.metrics("train", step, loss=loss, lr=1e-5 * step, skipped=step == 2, data_digest="ab")
        if step % 2 == 0:
            report.metrics("eval", step, loss=1 / step)
    report.close()
write(0, 3)
write(3, 5)
"""


def tracker_env(tmp_path: Path) -> dict[str, str]:
    return {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow's other stores need more than mlflow-skinny
    }


def kept_curves(tracker: str, plan: RunPlan, env: Mapping[str, str]) -> Curves:
    """What the tracker kept, {run id: {name: [(step, value)]}}, as its own reader sees it."""
    directory = {
        "wandb": Path(plan.launch.run_dir) / "wandb",
        "mlflow": Path(env["MLFLOW_TRACKING_URI"].removeprefix("file://")),
    }[tracker]
    script = Path(__file__).with_name("tracker_curves.py")
    shown = run_python(script, tracker, directory, env=env)
    assert shown.returncode == 0, shown.stderr
    value = json.loads(shown.stdout.rpartition("CURVES ")[2])
    return {
        run: {name: [(step, number) for step, number in points] for name, points in curves.items()}
        for run, curves in value.items()
    }


def written_curves(plan: RunPlan, separator: str) -> dict[str, list[tuple[int, float]]]:
    """Every finite number of metrics.jsonl, {kind/name: [(step, value)]}."""
    curves = defaultdict(list)
    for row in read_rows(Path(plan.launch.run_dir) / "metrics.jsonl"):
        for name, value in row.items():
            if name not in ("kind", "step", "time") and type(value) in (int, float):
                curves[f"{row['kind']}{separator}{name}"].append((row["step"], float(value)))
    return dict(curves)


def separator_of(tracker: str) -> str:
    return "." if tracker == "mlflow" else "/"


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_resumed_run_goes_on_in_the_curves_it_began(tracker: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, tmp_path / "m", tmp_path / "d", output={"report_to": (tracker,)})
    env = tracker_env(tmp_path)
    done = run_python("-c", WRITE_AND_RESUME, save_plan(plan), env=env)
    assert done.returncode == 0, done.stderr
    ((_, curves),) = kept_curves(tracker, plan, env).items()
    assert curves == written_curves(plan, separator_of(tracker))
    assert [step for step, _ in curves[f"train{separator_of(tracker)}loss"]] == [1, 3, 4, 5]


@pytest.mark.needs("wandb")
def test_a_training_run_reaches_wandb_number_by_number(ops_dir: Path, tmp_path: Path) -> None:
    model = make_tiny_model_dir(tmp_path / "model")
    data = write_questions(tmp_path / "train.jsonl")
    output = {"report_to": ("wandb",), "eval_steps": 2}
    plan = make_plan(tmp_path, model, data, eval_data=data, world_size=1, output=output)
    env = tracker_env(tmp_path)
    worker = ["-m", "dslaunch.train.worker", "--plan", save_plan(plan)]
    check_ranks(run_ranks(worker, world_size=1, env=env))
    ((_, curves),) = kept_curves("wandb", plan, env).items()
    assert curves == written_curves(plan, "/")
    assert {"train/loss", "train/lr", "train/grad_norm", "eval/loss", "eval/perplexity"} <= curves.keys()
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4]
