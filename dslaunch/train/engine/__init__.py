"""A thin, readable layer over ``deepspeed.initialize`` that cures what is wrong beneath it.

    from dslaunch.train.engine import initialize

    engine = initialize(model=model, config="ds_config.json")
    for batch in batches:
        engine.backward(engine(**batch).loss)
        result = engine.step()          # None inside an accumulation window

What DeepSpeed does wrong, and how each fault is cured or refused: docs/upstream.md.
"""

from dslaunch.core.errors import Diverged
from dslaunch.train.engine.engine import Engine, initialize
from dslaunch.train.engine.protocol import TrainingEngine
from dslaunch.train.engine.result import StepResult
from dslaunch.train.engine.torch_engine import TorchEngine, TorchSettings, initialize_torch

__all__ = [
    "Diverged",
    "Engine",
    "StepResult",
    "TorchEngine",
    "TorchSettings",
    "TrainingEngine",
    "initialize",
    "initialize_torch",
]
