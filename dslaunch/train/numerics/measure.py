"""One rank of the measurement: ``python -m dslaunch.train.numerics.measure OUT.json``.

Every engine is made twice: by ``deepspeed.initialize`` and by ``dslaunch.train.engine.initialize``,
and fed the same gradients (``table.py``). Rank 0 judges what all ranks measured and writes it down.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dslaunch.core import atomic
from dslaunch.core.errors import EXIT_OK, DslaunchError, EnvironmentNotReady, one_line
from dslaunch.core.events import to_jsonable
from dslaunch.train.dist import gather_objects, init_world, shutdown
from dslaunch.train.engine import initialize
from dslaunch.train.engine.cures import forget_autocast_of_other_engines, permit_emulated_fp16
from dslaunch.train.numerics import table


class Weights(torch.nn.Module):
    """loss = sum(w * x): the gradient is x itself."""

    def __init__(self, start: Sequence[float]) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x.to(self.w.dtype)).float().sum()


def ds_config_of(stage: int, dtype: str, optimizer: dict[str, Any], clip: float) -> dict[str, Any]:
    value: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": optimizer,
        "steps_per_print": 2**31 - 1,
    }
    if dtype == "fp16 autocast":
        value["torch_autocast"] = {"enabled": True, "dtype": "float16"}
    elif dtype == "fp16":
        value["fp16"] = {
            "enabled": True,
            "initial_scale_power": table.SCALE_POWER,
            "loss_scale_window": table.WINDOW,
            "hysteresis": table.HYSTERESIS,
        }
    elif dtype == "bf16":
        value["bf16"] = {"enabled": True}
    return value


class Driver:
    """Both engines behind the same few words."""

    def __init__(self, engine: Any, ds: Any) -> None:
        self.engine, self.ds = engine, ds

    def step(self, x: Sequence[float]) -> float | None:
        """One step; the norm that was reported."""
        loss = self.engine(torch.tensor(x, device=self.ds.device))
        self.engine.backward(loss)
        result = self.engine.step()
        norm = self.ds.get_global_grad_norm() if result is None else result.grad_norm
        return None if norm is None else float(norm)

    def scale(self) -> float:
        scale = getattr(self.ds.optimizer, "loss_scale", None) or getattr(self.ds.optimizer, "cur_scale", 1.0)
        return float(scale)

    def weights(self) -> list[float]:
        """The fp32 weights of the optimizer; DeepSpeed's 16-bit stage 0 keeps them in lists of its own."""
        from deepspeed.utils import safe_get_full_fp32_param

        optimizer = self.ds.optimizer
        if getattr(optimizer, "fp32_groups_flat", None) and self.ds.zero_optimization_stage() == 0:
            value = optimizer.fp32_groups_flat[0]
        elif getattr(optimizer, "fp32_groups", None):
            value = optimizer.fp32_groups[0][0]
        else:
            value = safe_get_full_fp32_param(self.ds.module.w)
            value = self.ds.module.w if value is None else value
        size = math.prod(getattr(self.ds.module.w, "ds_shape", self.ds.module.w.shape))
        return [float(number) for number in value.detach().flatten()[:size].tolist()]


@contextlib.contextmanager
def driving(who: str, model: torch.nn.Module, config: dict[str, Any]) -> Iterator[Driver]:
    import deepspeed

    if who == table.WHO[1]:
        engine = initialize(
            model, config, allow_emulated_fp16=True, watch=None, on_note=lambda text: None,
            allow_untested_deepspeed=deepspeed.__version__,
        )  # fmt: skip
        ds = engine.deepspeed
    else:
        # Each engine as if it were alone in its process: what leaks (F6) would be on the next one's account.
        with contextlib.suppress(EnvironmentNotReady):
            forget_autocast_of_other_engines()
        trained = list(model.parameters())
        engine = ds = deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]
    try:
        yield Driver(engine, ds)
    finally:
        ds.destroy()


def measure(who: str, stage: int, dtype: str, rank: int, world_size: int) -> dict[str, Any]:
    """This rank's courses; see ``table.Measured``."""
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    updates, norms, scales = [], [], []
    with driving(who, Weights([0.0, 0.0]), ds_config_of(stage, dtype, sgd, table.CLIP)) as driver:
        for number, x in enumerate(table.GRADIENTS, start=1):
            if number == table.OVERFLOW_STEP and rank != world_size - 1:
                x = (table.SMALL, 0.0)  # inf is the last rank's alone
            before = driver.weights()
            scales.append(driver.scale())
            norms.append(driver.step(x))
            updates.append([b - a for a, b in zip(before, driver.weights(), strict=True)])
    params = {"lr": table.ADAMW_LR, "weight_decay": table.ADAMW_DECAY, "torch_adam": True}
    adamw = ds_config_of(stage, dtype, {"type": "AdamW", "params": params}, 0.0)
    with driving(who, Weights([1.0]), adamw) as driver:
        course = driver.weights()
        driver.step([table.ADAMW_GRADIENT])
        course += driver.weights()
    return {"updates": updates, "norms": norms, "scales": scales, "adamw": course}


def cell(who: str, stage: int, dtype: str, rank: int, world_size: int) -> dict[str, Any]:
    """One row: what all ranks measured, judged; or how it was refused, or failed. Collective."""
    mine: dict[str, Any] = {}
    verdict: table.Verdict | None = None
    try:
        mine = measure(who, stage, dtype, rank, world_size)
        text = ""
    except DslaunchError as error:
        verdict, text = "refused", error.message
    except Exception as error:
        verdict, text = "failed", f"{type(error).__name__}: {one_line(error)}"
    everyone = gather_objects((verdict, text, mine))
    bad = next(((kind, said) for kind, said, _ in everyone if kind is not None), None)
    if bad is not None:
        found = {name: table.Found(bad[0], bad[1]) for name in table.PROPERTIES}
    else:
        first = everyone[0][2]
        updates = [measured["updates"] for _, _, measured in everyone]
        found = table.judge(table.Measured(**{**first, "updates": updates}), dtype)
    return {
        "stage": stage,
        "dtype": dtype,
        "who": who,
        "properties": {name: vars(value) for name, value in found.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    (out,) = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    try:
        world = init_world()
    except DslaunchError as error:
        print(error.format(), file=sys.stderr)
        return error.exit_code
    import deepspeed

    permit_emulated_fp16()
    cells = []
    for dtype in table.DTYPES:
        for stage in table.STAGES:
            if world.rank == 0:
                print(f"measuring {dtype} at stage {stage}", file=sys.stderr, flush=True)
            with contextlib.redirect_stdout(sys.stderr):
                for who in table.WHO:
                    cells.append(cell(who, stage, dtype, world.rank, world.world_size))
    if world.rank == 0:
        report = {
            "schema_version": table.SCHEMA_VERSION,
            "deepspeed": deepspeed.__version__,
            "torch": torch.__version__,
            "device": str(world.device.type),
            "world_size": world.world_size,
            "cells": cells,
        }
        atomic.write_text(Path(out), json.dumps(to_jsonable(report), allow_nan=False) + "\n")
    shutdown()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
