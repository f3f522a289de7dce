"""Logs for the tests, written by an independent loss scaler: each line in a shape that a DeepSpeed writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dslaunch.observe.diagnose.read import Diagnosis, diagnose
from tests.oracles.loss_scaler import Scaler

STAMP = "[2026-03-01 10:{minute:02}:{second:02},{milli:03}] [INFO] [{where}] "


def stamp(step: int, where: str = "loss_scaler.py:266:update_scale") -> str:
    return STAMP.format(minute=step // 60 % 60, second=step % 60, milli=step % 1000, where=where)


def overflow_line(before: float, after: float, left: int | None = None, rank: int = 0, step: int = 0) -> str:
    """As DeepSpeed 0.8.3 and later write it. ``left``: the hysteresis where the scale stays."""
    head = (
        f"{stamp(step)}[deepspeed] OVERFLOW! Rank {rank} Skipping step. Attempted loss scale: {int(before)}, "
    )
    if left is not None:
        return head + f"but hysteresis is {left}. Reducing hysteresis to {left - 1}"
    return head + f"reducing to {int(after)}"


@dataclass(frozen=True)
class Simulated:
    """``scales[i]``: the scale that step i + 1 ran with; ``growths``: the steps after which it doubled."""

    lines: list[str]
    scales: list[float]
    growths: list[int]


def zero_log(
    overflows: set[int],
    steps: int,
    *,
    power: int = 8,
    window: int = 10,
    hysteresis: int = 1,
    ranks: int = 1,
    bars: bool = True,
    losses: bool = True,
) -> Simulated:
    """A run at a ZeRO stage, which never names a growth. Steps count from 1; ``bars``: one each step."""
    scaler = Scaler(2.0**power, window, hysteresis)
    lines: list[str] = []
    scales, growths = [], []
    for step in range(1, steps + 1):
        before, left = scaler.scale, scaler.left
        scales.append(before)
        if bars:
            lines.append(f"\r 10%|#    | {step}/{steps} [00:{step % 60:02}<10:00,  1.00s/it]")
        if scaler.step(step in overflows):
            growths.append(step)
        if step in overflows:
            spared = left if left > 1 else None
            lines += [overflow_line(before, scaler.scale, spared, rank, step) for rank in range(ranks)]
        if losses:
            norm = "inf" if step in overflows else f"{1 + step % 7 / 10:.4f}"
            lines.append(f"{{'loss': {3 - step / steps:.4f}, 'grad_norm': {norm}, 'learning_rate': 1e-05}}")
    return Simulated(lines, scales, growths)


def megatron_line(step: int, loss: float, scale: float, norm: float, skipped: int = 0) -> str:
    return (
        f" iteration {step:8}/     500 | consumed samples: {step * 8} | elapsed time per iteration (ms): "
        f"12.5 | learning rate: 1.000E-05 | lm loss: {loss:.6E} | loss scale: {scale:.1f} | "
        f"grad norm: {norm:.3f} | number of skipped iterations: {skipped:3} | number of nan iterations:   0 |"
    )


def hf(loss: object, norm: object) -> str:
    """As the transformers Trainer prints it."""
    return f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 1e-05}}"


def read(tmp_path: Path, lines: Iterable[str] | bytes, **stated: float) -> Diagnosis:
    """The diagnosis of a log with these lines. ``stated``: settings as the user would give them."""
    path = tmp_path / "train.log"
    path.write_bytes(lines if isinstance(lines, bytes) else ("\n".join(lines) + "\n").encode())
    return diagnose([str(path)], stated)


def names(found: Diagnosis) -> list[str]:
    return [verdict.name for verdict in found.verdicts]


def scales_by_step(found: Diagnosis, steps: int) -> list[float]:
    """The scale that each step ran with: the last point before it, or the first one on it."""
    points = list(found.course.points)
    scales = []
    for step in range(1, steps + 1):
        before = [scale for place, scale in points if place < step]
        scales.append(before[-1] if before else points[0][1])
    return scales
