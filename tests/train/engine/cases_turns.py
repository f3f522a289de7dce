"""Several backwards before a step, and a step that none came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dslaunch.core.errors import ConfigError
from tests.train.engine.cases_absent import TwoWeights
from tests.train.rank_cases import Case, bare_deepspeed, config, engine_for, master

Loop = Callable[[Any], None]


def _settings(stage: int, offload: bool) -> dict[str, Any]:
    zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    return {**config(stage, "fp32", zero_optimization=zero), "zero_force_ds_cpu_optimizer": False}


def twice(engine: Any) -> None:
    """The gradient of the first weight is 2, of the second 1."""
    losses = [engine(True), engine(False)]
    for loss in losses:
        engine.backward(loss)
    engine.step()


def step_alone(engine: Any) -> None:
    engine.backward(engine(True))
    engine.step()
    engine.step()


def run(stage: int, loop: Loop, *, offload: bool = False, bare: bool = False) -> Any:
    """Both weights at the end, or why there is none."""
    with (bare_deepspeed if bare else engine_for)(TwoWeights(), _settings(stage, offload)) as engine:
        try:
            loop(engine)
        except (ConfigError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return [master(p)[0] for p in engine.module.parameters()]


def in_turn(stage: int) -> list[float]:
    """After a refusal of the second backward the step of the first is still right."""
    with engine_for(TwoWeights(), _settings(stage, offload=False)) as engine:
        engine.backward(engine(True))
        try:
            engine.backward(engine(False))
        except ConfigError:
            engine.step()
        return [master(p)[0] for p in engine.module.parameters()]


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {"turns-bare/step-alone": lambda: run(2, step_alone, offload=True, bare=True)}
    for stage in (0, 1, 2, 3):
        cases[f"turns/{stage}"] = lambda s=stage: run(s, twice)
        cases[f"turns/{stage}/step-alone"] = lambda s=stage: run(s, step_alone)
        if stage:
            cases[f"turns-bare/{stage}"] = lambda s=stage: run(s, twice, bare=True)
            cases[f"turns/{stage}/offload/step-alone"] = lambda s=stage: run(s, step_alone, offload=True)
            cases[f"turns/{stage}/in-turn"] = lambda s=stage: in_turn(s)
    return cases
