"""Numbers reach metrics.jsonl, stdout and TensorBoard from the main rank, and from no other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dslaunch.core.errors import EnvironmentNotReady, LaunchFailed
from dslaunch.core.plan import RunPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.train import report as report_module
from dslaunch.train.failures import explain, report_failure
from dslaunch.train.report import Report, check_trackers, open_report
from tests.support.plans import make_plan, read_rows, save_plan


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    plan = make_plan(tmp_path, tmp_path / "model", tmp_path / "data")
    save_plan(plan)
    return plan


def test_the_main_rank_writes_and_others_do_not(plan: RunPlan, capsys: pytest.CaptureFixture[str]) -> None:
    idle = open_report(plan, is_main=False, first_step=0)
    idle.metrics("train", 1, loss=9.0)
    idle.say("not me")
    idle.event("not_me")
    idle.close()
    report = open_report(plan, is_main=True, first_step=0)
    report.metrics("train", 1, loss=float("nan"), grad_norm_clipped=None, skipped=True, data_digest="ab")
    report.metrics("eval", 1, loss=2.5)
    report.say("a line")
    report.event("train_start", step=0)
    report.close()
    report.close()
    run_dir = Path(plan.launch.run_dir)
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["kind"] for row in rows] == ["train", "eval"]
    assert (rows[0]["loss"], rows[0]["grad_norm_clipped"], rows[0]["skipped"]) == ("nan", None, True)
    assert [row["kind"] for row in read_rows(run_dir / "events.jsonl")] == ["train_start"]
    assert capsys.readouterr().out == "a line\n"


def test_tensorboard_has_the_numbers_and_forgets_what_a_resume_replaces(plan: RunPlan) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = open_report(plan, is_main=True, first_step=0)
    for step in (1, 2, 3):
        first.metrics("train", step, loss=float(step))
    first.close()
    resumed = open_report(plan, is_main=True, first_step=2)
    resumed.metrics("train", 3, loss=33.0)
    resumed.close()
    curves = EventAccumulator(str(Path(plan.launch.run_dir) / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in curves.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 33.0)]


def test_trackers_get_finite_numbers_only(tmp_path: Path) -> None:
    got: list[tuple[int, dict[str, float]]] = []

    class Recorder:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            got.append((step, dict(values)))

        def close(self) -> None: ...

    report = Report(RunDir(tmp_path), {"recorder": Recorder()})
    nan, inf = float("nan"), float("inf")
    report.metrics("train", 3, loss=nan, grad_norm=inf, lr=1, skipped=True, data_digest="ab", clipped=None)
    report.close()
    assert got == [(3, {"train/lr": 1.0})]


def test_a_service_that_goes_away_costs_its_curves_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    class Service:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, step: int, values: Mapping[str, float]) -> None:
            calls.append(f"{self.name} {step}")
            if (self.name, step) == ("mlflow", 2):
                raise ConnectionError("no route to host\nRetries: 7")

        def close(self) -> None:
            raise OSError("gone")

    report = Report(RunDir(tmp_path), {"mlflow": Service("mlflow"), "wandb": Service("wandb")})
    for step in (1, 2, 3):
        report.metrics("train", step, loss=float(step))
    report.close()
    assert calls == ["mlflow 1", "wandb 1", "mlflow 2", "wandb 2", "wandb 3"]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2
    assert shown[0].startswith("warning: mlflow gets no more numbers, metrics.jsonl has them all: ")
    assert "no route to host" in shown[0] and "wandb gets no more numbers" in shown[1]
    events = read_rows(tmp_path / "events.jsonl")
    assert [f"{event['kind']}: {event['message']}" for event in events] == shown


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(report_module._MODULES, "mlflow", "a_module_nobody_has")
    check_trackers(("tensorboard",))
    with pytest.raises(EnvironmentNotReady, match="asks for mlflow, which is not installed"):
        check_trackers(("tensorboard", "mlflow"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Exception("Current loss scale already at minimum - cannot decrease scale anymore."), 76),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1"), 77),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), 3),
        (OSError(28, "No space left on device", "/x/metrics.jsonl"), 3),
        (LaunchFailed("x", exit_code=9), 9),
        (KeyError("oops"), 70),
    ],
)
def test_every_failure_is_a_sentence_with_its_exit_code(error: Exception, code: int) -> None:
    told = explain(error)
    assert told.exit_code == code
    assert "\n" not in told.message and told.message


def test_our_own_bugs_keep_their_traceback(
    tmp_path: Path, plan: RunPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(plan.launch.run_dir)
    (run_dir / "events.jsonl").write_bytes(b'[]\n"\xff\n')  # what another rank was cut off in
    try:
        raise KeyError("deep inside")
    except KeyError as error:
        code = report_failure(error, rank=3, run_dir=run_dir, since="9999")
    shown = capsys.readouterr().err
    assert code == 70
    assert shown.startswith("rank 3: Error: internal error: KeyError") and "Traceback" not in shown
    assert "Traceback" in (run_dir / "logs/rank-3.traceback").read_text()
    event = json.loads((run_dir / "events.jsonl").read_bytes().splitlines()[-1])
    assert (event["kind"], event["rank"], event["exit_code"]) == ("rank_error", 3, 70)


def test_secrets_and_environment_do_not_leave_with_the_plan(plan: RunPlan) -> None:
    from dslaunch.train.report import _public

    launch = replace(plan.launch, env={"TOKEN": "abc"}, secret_env=("HF_TOKEN",))
    assert "abc" not in json.dumps(_public(replace(plan, launch=launch)))


def test_a_tracker_that_cannot_be_opened_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plan: object, *, resumed: bool) -> None:
        raise RuntimeError("no API key\nsecond line")

    monkeypatch.setattr(report_module, "_Mlflow", refuse)
    plan = make_plan(tmp_path, tmp_path / "m", tmp_path / "d", output={"report_to": ("mlflow",)})
    save_plan(plan)
    with pytest.raises(EnvironmentNotReady, match=r"mlflow cannot be used: .*no API key"):
        report_module.open_report(plan, is_main=True, first_step=0)
