"""What the loop itself decides: when it stops, what it waits for, whose time a line counts.

The engine is a stand-in here: what it computes is not looked at, only in which order it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dslaunch.core.errors import EXIT_OK, EXIT_STOPPED_AT_CHECKPOINT
from dslaunch.core.plan import WatchPlan
from dslaunch.losses.sft import TokenLoss
from dslaunch.train import loop
from dslaunch.train.data.sampler import BatchSchedule
from dslaunch.train.dist import World
from dslaunch.train.evaluate import EvalResult
from dslaunch.train.stopping import StopRequest
from dslaunch.train.watch import Watch
from tests.support.plans import LORA, make_plan

STEP_S, EVAL_S, SAVE_S = 10.0, 100.0, 1000.0
TOKENS_PER_UNIT = 30


class Result:
    """A StepResult that notes in ``log`` when its flag is read."""

    def __init__(self, step: int, flag: bool, log: list[str]) -> None:
        self.loss, self.grad_norm, self.grad_norm_clipped, self.lr, self.loss_scale = 1.0, 1.0, 1.0, 1e-3, 1.0
        self.skipped, self.skip_reason, self.num_tokens = False, None, 5
        self.step, self.next_loss_scale, self.hysteresis, self.next_hysteresis = step, 1.0, None, None
        self.nonfinite_ranks: tuple[int, ...] = ()
        self.nonfinite_loss_ranks: tuple[int, ...] = ()
        self.unlike_ranks: tuple[int, ...] = ()
        self._step, self._flag, self._log = step, flag, log

    @property
    def flag(self) -> bool:
        self._log.append(f"flag {self._step}")
        return self._flag


class StandIn:
    """Engine, data, objective and report in one; its clock moves by what is done."""

    def __init__(self, stop: StopRequest, *, stop_in_step: int | None = None) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.rows: list[tuple[str, int, dict[str, Any]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.module = torch.nn.Module()
        self.loss_scale = 1.0
        self._stop, self._stop_in_step, self._steps = stop, stop_in_step, 0

    def token_loss(self, batch: object) -> TokenLoss:
        return TokenLoss(torch.zeros(()), torch.ones((), dtype=torch.int64))

    def backward_token_sum(self, loss_sum: torch.Tensor, *, num_tokens: int) -> None: ...

    def step(self, *, flag: bool) -> Result:
        self._steps += 1
        self.log.append(f"step {self._steps}")
        self.now += STEP_S
        result = Result(self._steps, flag, self.log)
        if self._steps == self._stop_in_step:  # a signal: the handler of any rank
            result._flag = self._stop.requested = True
        return result

    def batch(self, units: object) -> None: ...

    def count_supervised(self, units: Any) -> int:
        return 5 * len(units)

    def count_tokens(self, units: Any) -> int:
        return TOKENS_PER_UNIT * len(units)

    def __len__(self) -> int:
        return 100

    def metrics(self, kind: str, step: int, **values: Any) -> None:
        self.rows.append((kind, step, values))

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def say(self, text: str) -> None: ...


Run = Callable[..., tuple[int, StandIn]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(
        *, steps: int, stop_in_step: int | None = None, output: Any = None, adapter: Any = None,
        module: torch.nn.Module | None = None,
    ) -> tuple[int, StandIn]:  # fmt: skip
        stop = StopRequest()
        double: Any = StandIn(stop, stop_in_step=stop_in_step)
        double.module = module or double.module

        def evaluate(*_: Any) -> EvalResult:
            double.now += EVAL_S
            return EvalResult(1.0, 1, 2.7)

        def save(_: Any, root: Path, step: int, **__: Any) -> Path:
            double.now += SAVE_S
            double.log.append(f"saved {step}")
            return root

        monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: double.now))
        monkeypatch.setattr(loop, "eval_batches", lambda *_, **__: iter(()))
        monkeypatch.setattr(loop, "run_evaluation", evaluate)
        monkeypatch.setattr(loop, "save_checkpoint", save)
        monkeypatch.setattr(loop, "all_reduce_sum", lambda values, _: values)
        plan = make_plan(tmp_path, tmp_path, tmp_path, world_size=1, output=output, adapter=adapter)
        schedule = BatchSchedule(
            num_units=100,
            train_batch_size=4,
            train_micro_batch_size_per_gpu=2,
            gradient_accumulation_steps=2,
            world_size=1,
            seed=0,
            num_train_epochs=None,
            max_steps=steps,
            shuffle=True,
        )
        # One micro-batch a window is enough here.
        monkeypatch.setattr(BatchSchedule, "micro_batches", lambda self, step, rank: [[0, 1]])
        evaluation: Any = SimpleNamespace(packs=None, lengths=None, batch=None)
        job = loop.Job(
            plan=plan,
            world=World(rank=0, world_size=1, local_rank=0, device=torch.device("cpu")),
            engine=double,
            objective=double,
            train=double,
            evaluation=evaluation,
            schedule=schedule,
            report=double,
            stop=stop,
            watch=Watch(precision="fp32", limits=WatchPlan(), event=double.event, say=double.say),
            extra={},
        )
        return loop.run_training(job, 0), double

    return run


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_evaluations_and_checkpoints_are_not_in_the_time_of_a_line(run: Run, logging_steps: int) -> None:
    output = {"eval_steps": 1, "save_steps": 2, "logging_steps": logging_steps}
    code, double = run(steps=6, output=output)
    lines = [(step, values) for kind, step, values in double.rows if kind == "train"]
    assert code == EXIT_OK
    assert [step for step, _ in lines] == list(range(logging_steps, 7, logging_steps))
    assert {values["seconds"] for _, values in lines} == {STEP_S * logging_steps}
    assert {values["tokens_per_s"] for _, values in lines} == {4 * TOKENS_PER_UNIT / STEP_S}


def test_a_flag_is_read_only_when_the_next_step_is_under_way(run: Run) -> None:
    code, double = run(steps=9, stop_in_step=3)
    assert code == EXIT_STOPPED_AT_CHECKPOINT
    expected = ["step 1", "step 2", "flag 1", "step 3", "flag 2", "step 4", "flag 3", "saved 4"]
    assert double.log == expected
    assert ("train_stopped", {"step": 4, "total_steps": 9}) in double.events


@pytest.mark.parametrize(("stop_in_step", "stops_after"), [(1, 2), (3, 4), (4, None), (5, None)])
def test_where_a_run_of_five_steps_stops(run: Run, stop_in_step: int, stops_after: int | None) -> None:
    code, double = run(steps=5, stop_in_step=stop_in_step)
    assert code == (EXIT_OK if stops_after is None else EXIT_STOPPED_AT_CHECKPOINT)
    assert double.log[-1] == f"saved {stops_after or 5}"
    last = "train_end" if stops_after is None else "train_stopped"
    assert double.events[-1][0] == last


def test_experts_without_a_token_are_reported(run: Run) -> None:
    module = torch.nn.ModuleDict({"experts": torch.nn.Linear(1, 1, bias=False)})
    code, double = run(steps=1, adapter=LORA, module=module)
    assert code == EXIT_OK
    (warning,) = [fields["message"] for kind, fields in double.events if kind == "warning"]
    assert "e.g. experts.weight" in warning
