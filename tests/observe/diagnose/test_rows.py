"""Lines of one shape are read at once: what is found is the same as line by line, and it is done in fact."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dslaunch.observe.diagnose import rows, source
from dslaunch.observe.diagnose.read import diagnose
from dslaunch.observe.diagnose.shapes import parse

LINES = 3000
Write = Callable[[random.Random, int, dict[str, Any]], str]


def _numbers(chance: random.Random, step: int) -> tuple[str, str]:
    """Loss and norm; now and then one that a verdict looks at."""
    loss, norm = f"{2 + chance.random():.3f}", f"{chance.choice((0.5, 0.7, 1.1, 1.3)):.2f}"
    unusual = chance.random()
    if unusual < 0.001:
        loss, norm = chance.choice([("nan", "nan"), ("0.0", "nan"), ("inf", "1.0"), ("0.0", "0.0")])
    return loss, norm


def _trainer(chance: random.Random, step: int, state: dict[str, Any]) -> str:
    loss, norm = _numbers(chance, step)
    rate, epoch = f"1e-0{step % 9}", f"{step / 77:.2f}"
    return f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': {rate}, 'epoch': {epoch}}}\n"


def _behind_bars(chance: random.Random, step: int, state: dict[str, Any]) -> str:
    glyphs = "#" * (step * 10 // LINES)
    return (
        f"\r {step * 100 // LINES:2}%|{glyphs:10}| {step}/{LINES} [0{step % 9}:00<1:00, 1.1it/s]\n"
        + _trainer(chance, step, state)
    )


def _bars(chance: random.Random, step: int, state: dict[str, Any]) -> str:
    loss, _ = _numbers(chance, step)
    return f"\rtrain: 10%|###  | {step // 3}/{LINES} [10:00<90:00, 1.10it/s, loss={loss}]"


def _megatron(chance: random.Random, step: int, state: dict[str, Any]) -> str:
    loss, norm = _numbers(chance, step)
    skipped = chance.random() < 0.002
    state["scale"] = state.get("scale", 65536.0) / 2 if skipped else state.get("scale", 65536.0)
    state["scale"] *= 2 if chance.random() < 0.004 else 1
    return (
        f" iteration {step:8}/ {LINES} | lm loss: {loss} | loss scale: {state['scale']:.1f} | "
        f"grad norm: {norm} | number of skipped iterations: {int(skipped):3} | "
        "number of nan iterations:   0 |\n"
    )


def _ranks(chance: random.Random, step: int, state: dict[str, Any]) -> str:
    loss, norm = _numbers(chance, step)
    ranks = chance.sample(range(4), 4)
    return "".join(f"[Rank {rank}] step {step} loss {loss} grad_norm {norm}\n" for rank in ranks)


def _amid_talk(chance: random.Random, step: int, state: dict[str, Any]) -> str:
    """With bars that may be missing or at 0, marks that may go back, and what says nothing."""
    step_of_bar = chance.choice((step, step, step, 0))
    parts = [f"\r 10%|#  | {step_of_bar}/{LINES} [10:00<90:00, 1.1it/s]\n"] * (chance.random() < 0.9)
    talk = (f"shard {step} is here\n", "the loss of 5\n", f"[INFO] 1/{step % 9} [2 things\n", "\r9%|\r")
    parts += [chance.choice(talk) for _ in range(chance.randrange(5))]
    parts.append(_trainer(chance, step, state))
    if step % 10 == 0:
        told = step - 30 * (chance.random() < 0.02)
        parts.append(f"[INFO] [Rank 0] step={told}, skipped={step // 700}, lr=[1e-05]\n")
    return "".join(parts)


def _ranks_amid_talk(chance: random.Random, step: int, state: dict[str, Any]) -> str:
    loss = "7" if chance.random() < 0.01 else f"{2 + chance.random():.3f}"  # 7 alone is no loss
    lines = [f"[Rank {rank}] loss {loss} grad_norm {1 + chance.random():.3f}\n" for rank in range(3)]
    lines += ["talk\n"] * chance.randrange(4)
    chance.shuffle(lines)
    return "".join(lines)


def _overflows(chance: random.Random, step: int, state: dict[str, Any]) -> str:
    before = state.get("scale", 2**16)
    state["scale"] = after = max(1, before // 2) if chance.random() < 0.01 else before
    clock = f"[2026-01-01 00:{step // 60 % 60:02}:{step % 60:02},1]"
    return "".join(
        f"{clock} [deepspeed] OVERFLOW! Rank {rank} Skipping step. Attempted loss scale: {before}, "
        f"reducing to {after}\n"
        for rank in chance.sample(range(2), 2)
    )


def _constant_norm(chance: random.Random, step: int, state: dict[str, Any]) -> str:
    norm = 1.0 if 500 < step < 2500 else chance.random()
    return f"step: {step} loss: {2 + chance.random():.4f} grad_norm: {norm:.4f}\n"


KINDS: dict[str, Write] = {
    "trainer": _trainer, "behind bars": _behind_bars, "bars": _bars, "megatron": _megatron,
    "ranks": _ranks, "overflows": _overflows, "amid talk": _amid_talk,
    "ranks amid talk": _ranks_amid_talk, "constant norm": _constant_norm,
}  # fmt: skip
TALK = ("saving checkpoint\n", "the loss is fine\n", "[Rank 0] step=7, skipped=0, lr=[1e-05]\n", "\n")


def _log(kind: str, seed: int) -> str:
    chance, state = random.Random(seed), {}
    step, parts = 0, []
    while len(parts) < LINES:
        step = max(1, step - 40) if chance.random() < 0.0005 else step + 1  # a run that was started again
        parts.append(KINDS[kind](chance, step, state))
        if chance.random() < 0.004:
            parts.append(chance.choice(TALK))
    return "".join(parts)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_it_finds_what_is_found_line_by_line(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "train.log"
    log.write_text(_log(kind, seed), encoding="utf-8")
    monkeypatch.setattr(source, "_BLOCK", 1 << (14 + 2 * seed))  # so that runs of lines cross blocks
    at_once = diagnose([str(log)]).to_json()
    monkeypatch.setattr(rows.RowReader, "following", lambda *_: None)
    one_by_one = diagnose([str(log)]).to_json()
    assert one_by_one["num_losses"] + one_by_one["num_overflows"] > LINES / 8
    for key, value in one_by_one.items():
        assert _same(at_once[key], value), key


@pytest.mark.parametrize("kind", KINDS)
def test_few_lines_are_parsed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the speed, without a clock."""
    log, parsed = tmp_path / "train.log", 0

    def count(found: source.Found) -> Any:
        nonlocal parsed
        parsed += 1
        return parse(found)

    monkeypatch.setattr("dslaunch.observe.diagnose.read.parse", count)
    log.write_text(_log(kind, 5), encoding="utf-8")
    lines = sum(count for _, count in diagnose([str(log)]).files)
    assert parsed < max(lines, LINES) / 10
