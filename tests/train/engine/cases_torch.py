"""The engine on torch alone: gradients, courses of GradScaler, first step, skips, precision."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import Fp16Plan
from dslaunch.losses.sft import token_nll
from dslaunch.train.dist import barrier, gather_objects, init_world
from dslaunch.train.engine import Diverged, TorchEngine, TorchSettings, initialize_torch
from tests.train.engine.cases_gradients import mean_of_two, rows, token_mean, windows
from tests.train.rank_cases import RANK, SAMPLES, WORLD_SIZE, Case, OneWeight, TinyLM, config, engine_for

OVERFLOWS = {1, 2, 3, 8, 9, 18}
STEPS = 22
TINY = 1e-8  # below the smallest number of fp16


class OneProduct(torch.nn.Module):
    """loss = ``TINY`` * (w . 1), by a matrix product, which autocast computes in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1, 1))

    def forward(self) -> torch.Tensor:
        return (torch.ones(1, 1) @ self.w).float().sum() * TINY


def torch_engine(
    model: torch.nn.Module,
    precision: str = "fp32",
    *,
    accumulation: int = 1,
    clipping: float = 0.0,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
    watching: dict[str, Any] | None = None,
    **fp16: Any,
) -> TorchEngine:
    """An engine with SGD at lr 1, so that an update is minus the gradient."""
    world = init_world()
    settings = TorchSettings(
        precision=precision,  # type: ignore[arg-type]
        gradient_accumulation_steps=accumulation,
        gradient_clipping=clipping,
        fp16=Fp16Plan(**fp16) if precision == "fp16" else None,
    )
    return initialize_torch(
        model,
        settings,
        optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
        lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0),
        world.device,
        allow_emulated_fp16=True,
        on_note=on_note,
        **{"watch": None, **(watching or {})},
    )


def flat(parameter: torch.Tensor | None) -> list[float]:
    assert parameter is not None
    values: list[float] = parameter.detach().double().flatten().tolist()
    return values


def token_mean_gradient(micro: int, precision: str = "fp32") -> dict[str, Any]:
    engine = torch_engine(TinyLM(), precision, accumulation=windows(micro))
    scale = engine.loss_scale
    return token_mean(engine, micro, flat, lambda p: [value / scale for value in flat(p.grad)])


def mean_of_micro_batches() -> dict[str, Any]:
    return mean_of_two(torch_engine(OneWeight(), accumulation=2), flat)


def course(precision: str, *, accumulation: int = 1, **fp16: Any) -> dict[str, Any]:
    """The gradient is .01 each step, or inf on one of the ranks at the overflow steps."""
    scale = {"initial_scale_power": 8, "loss_scale_window": 3, **fp16}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("used", "after", "weights", "norms", "skips", "epochs")
    }
    engine = torch_engine(OneWeight(), precision, accumulation=accumulation, **scale)
    for step in range(STEPS):
        bad = step in OVERFLOWS and RANK == step % WORLD_SIZE
        for k in range(accumulation):
            engine.backward(engine(torch.tensor([math.inf if bad and k == 0 else 0.01])))
            result = engine.step()
        assert result is not None
        values = (result.loss_scale, engine.loss_scale, flat(engine.module.w)[0], result.grad_norm,  # type: ignore[arg-type]
                  result.skip_reason, engine.lr_scheduler.last_epoch)  # fmt: skip
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    return {**columns, "global_step": engine.global_step, "skipped_steps": engine.skipped_steps}


def at_minimum_scale(floor: float = 2) -> dict[str, Any]:
    """Scale 4, then the floor, then nowhere to go."""
    engine = torch_engine(OneWeight(), "fp16", initial_scale_power=2, min_loss_scale=floor)
    scales = []
    for _ in range(6):
        engine.backward(engine(torch.tensor([math.inf if RANK == 0 else 0.01])))
        try:
            engine.step()
        except Diverged as error:
            return {"scales": scales, "error": str(error), "exit_code": error.exit_code}
        scales.append(engine.loss_scale)
    return {"scales": scales}


def clipped() -> list[float]:
    """Gradient norm .01 * sqrt(32) = .0566, clipped to .04: after unscaling, at the growth step too."""
    engine = torch_engine(
        OneWeight(size=32), "fp16", clipping=0.04, initial_scale_power=8, loss_scale_window=2
    )
    weights = []
    for _ in range(4):
        engine.backward(engine(torch.full((32,), 0.01)))
        engine.step()
        weights.append(flat(engine.module.w)[0])  # type: ignore[arg-type]
    return weights


def clipped_vector(precision: str) -> dict[str, Any]:
    """Gradient (3, 4) under a scale of 1024, clipped to 1."""
    engine = torch_engine(OneWeight(size=2), precision, clipping=1.0, loss_scale=1024.0)
    engine.backward(engine(torch.tensor([3.0, 4.0])))
    result = engine.step()
    assert result is not None
    update = [-value for value in flat(engine.module.w)]  # type: ignore[arg-type]
    return {"update": update, "norms": [result.grad_norm, result.grad_norm_clipped]}


def without_end() -> dict[str, Any]:
    """Two hundred good steps with a window of one."""
    notes: list[str] = []
    engine = torch_engine(OneWeight(), "fp16", on_note=notes.append, loss_scale_window=1)
    for _ in range(200):
        engine.backward(engine(torch.tensor([0.0])))
        engine.step()
    return {"scale": engine.loss_scale, "notes": [note for note in notes if "emulated" not in note]}


def adamw() -> list[float]:
    """Six steps of AdamW with decay: the first one is whole, and the fp32 weight is the master."""
    engine = torch_engine(
        OneWeight(start=1.0),
        "fp16",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5),
    )
    weights = []
    for step in range(6):
        engine.backward(engine(torch.tensor([0.01 * (step + 1)])))
        engine.step()
        weights.append(flat(engine.module.w)[0])  # type: ignore[arg-type]
    return weights


def tiny_gradient(precision: str) -> list[float]:
    """A gradient that fp16 cannot hold unless the loss is scaled."""
    engine = torch_engine(OneProduct(), precision)
    engine.backward(engine())
    engine.step()
    return flat(engine.module.w)  # type: ignore[arg-type]


def same_as_deepspeed(stage: int | None) -> list[float]:
    """Losses of eight AdamW steps with clipping in fp32: with torch alone, or DeepSpeed at ``stage``."""
    losses = []
    settings = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    batches = [rows(range((step + RANK) % 4, (step + RANK) % 4 + 4)) for step in range(8)]
    num_tokens = [
        sum(t != -100 for r in range(WORLD_SIZE) for i in range((step + r) % 4, (step + r) % 4 + 4)
            for t in SAMPLES[i][1]) for step in range(8)
    ]  # fmt: skip

    def train(engine: Any) -> None:
        for (ids, targets), count in zip(batches, num_tokens, strict=True):
            engine.backward_token_sum(token_nll(engine(ids), targets).sum, num_tokens=count)
            losses.append(engine.step().loss)

    if stage is None:
        train(torch_engine(TinyLM(), clipping=0.5,
                           optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, **settings)))  # fmt: skip
        return losses
    params = {"lr": 0.05, **settings, "torch_adam": True}
    blocks = config(stage, clipping=0.5, optimizer={"type": "AdamW", "params": params})
    with engine_for(TinyLM(), blocks) as engine:
        train(engine)
    return losses


def interrupted() -> dict[str, Any]:
    """A course of fp16 with overflows, whole, and by a new engine from what was saved after step 9."""

    def steps(engine: TorchEngine, numbers: range) -> list[list[float]]:
        course = []
        for step in numbers:
            bad = step in OVERFLOWS and RANK == 0
            engine.backward(engine(torch.tensor([math.inf if bad else 0.01 * (step % 4 + 1)])))
            result = engine.step()
            assert result is not None
            course.append([float(result.step), result.loss_scale, *flat(engine.module.w)])  # type: ignore[arg-type]
        return course

    def engine() -> TorchEngine:
        return torch_engine(
            OneWeight(start=1.0), "fp16", initial_scale_power=8, loss_scale_window=3,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as own:
        folder = Path(gather_objects(own)[0]) / "state"
        first = engine()
        steps(first, range(10))
        first.save_state(folder, trainable_only=False)
        straight = steps(first, range(10, STEPS))
        second = engine()
        second.load_state(folder, trainable_only=False)
        resumed = steps(second, range(10, STEPS))
        barrier("the saved state being read")
    return {"straight": straight, "resumed": resumed, "skipped": [first.skipped_steps, second.skipped_steps]}


def refused_weights() -> str:
    try:
        torch_engine(TinyLM().to(torch.float16), "fp16")
    except ConfigError as error:
        return str(error)
    return "accepted"


def unused_parameter() -> str:
    """A parameter that forward does not reach: DDP notices in the forward after."""
    model = OneWeight()
    model.idle = torch.nn.Parameter(torch.zeros(1))
    engine = torch_engine(model)
    try:
        for _ in range(2):
            engine.backward(engine(torch.tensor([1.0])))
            engine.step()
    except ConfigError as error:
        return str(error)
    return "accepted"


def no_sync_inside_a_window() -> list[float]:
    """This rank's gradient after the first of two micro-batches is its own; after the second, the mean."""
    engine = torch_engine(OneWeight(), accumulation=2)
    found = []
    for k in range(2):
        engine.backward(engine(torch.tensor([1.0 + RANK + 10 * k])))
        found += flat(engine.module.w.grad)  # type: ignore[arg-type, union-attr]
        engine.step()
    return found


def gradient_cases() -> dict[str, Case]:
    micros = (1, len(SAMPLES) // WORLD_SIZE)
    return {f"torch/gradient/{micro}": lambda m=micro: token_mean_gradient(m) for micro in micros}  # type: ignore[misc]


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        **gradient_cases(),
        "torch/mean": mean_of_micro_batches,
        "torch/course": lambda: course("fp16"),
        "torch/course-accumulated": lambda: course("fp16", accumulation=2),
        "torch/course-static": lambda: course("fp16", loss_scale=256.0),
        "torch/course-bf16": lambda: course("bf16"),
        "torch/course-fp32": lambda: course("fp32"),
        "torch/minimum": at_minimum_scale,
        "torch/minimum-between": lambda: at_minimum_scale(3),
        "torch/clipped": clipped,
        "torch/adamw": adamw,
        "torch/without-end": without_end,
        "torch/interrupted": interrupted,
        "torch/unused": unused_parameter,
        "torch/refused": refused_weights,
        "torch/no-sync": no_sync_inside_a_window,
        "torch/same": lambda: same_as_deepspeed(None),
    }
    for precision in ("fp32", "bf16", "fp16"):
        cases[f"torch/clipped/{precision}"] = lambda p=precision: clipped_vector(p)  # type: ignore[misc]
        cases[f"torch/tiny/{precision}"] = lambda p=precision: tiny_gradient(p)  # type: ignore[misc]
    for precision in ("bf16", "fp16"):
        cases[f"torch/half/{precision}"] = lambda p=precision: token_mean_gradient(2, p)  # type: ignore[misc]
    for stage in (0, 1):
        cases[f"torch/same/{stage}"] = lambda s=stage: same_as_deepspeed(s)  # type: ignore[misc]
    return cases
