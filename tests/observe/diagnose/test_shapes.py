"""Each shape that a log line has, on its own, glued behind a progress bar, coloured, and wrapped anywhere."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dslaunch.observe.diagnose.shapes import Record, parse
from dslaunch.observe.diagnose.source import LogFile
from tests.observe.diagnose.logs import megatron_line

PREFIX = "[2026-03-01 10:00:07,215] [INFO] [stage_1_and_2.py:1768:step] "
OVERFLOW = {"kind": "overflow", "before": 4096.0, "after": 2048.0}

# name -> (line, what it says)
SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "DeepSpeed 0.1": (
        "[deepspeed] OVERFLOW! Skipping step. Attempted loss scale: 4096.0, reducing to 2048.0", OVERFLOW
    ),
    "DeepSpeed 0.2": (
        "[deepscale] OVERFLOW! Rank 3 Skipping step. Attempted loss scale: 4096, reducing to 2048.0",
        {**OVERFLOW, "rank": 3},
    ),
    "DeepSpeed 0.3.13": (
        PREFIX + "[deepspeed] fp16 dynamic loss scale overflow! Skipping step. Attempted loss scale: 4096, "
        "reducing to 2048.0",
        OVERFLOW,
    ),
    "DeepSpeed 0.5 with a rank": (
        PREFIX + "[deepspeed] fp16 dynamic loss scale overflow! Rank 11 Skipping step. Attempted loss scale: "
        "4096, reducing to 2048",
        {**OVERFLOW, "rank": 11},
    ),
    "DeepSpeed 0.6.4": (
        PREFIX + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4096, reducing to 2048",
        {**OVERFLOW, "rank": 0},
    ),
    "DeepSpeed 0.8.3, hysteresis": (
        PREFIX + "[deepspeed] OVERFLOW! Rank 2 Skipping step. Attempted loss scale: 4096, but hysteresis is "
        "2. Reducing hysteresis to 1",
        {"kind": "overflow", "before": 4096.0, "after": 4096.0, "hysteresis": 2, "rank": 2},
    ),
    "consecutive hysteresis": (
        PREFIX + "Consecutive hysteresis is enabled. Restoring hysteresis to 3",
        {"kind": "setting", "name": "consecutive_hysteresis", "before": 3.0},
    ),
    "fused, iteration": (PREFIX + "Grad overflow on iteration 41", {"kind": "fused", "step": 42}),
    "static, iteration": (PREFIX + "Grad overflow on iteration: 41", {"kind": "fused", "step": 42}),
    "fused, reducing": (
        PREFIX + "Reducing dynamic loss scale from 4096 to 2048.0", {**OVERFLOW, "name": "fused"}
    ),
    "fused, overflow": (
        "[Rank 0] Overflow detected. Skipping step. Attempted loss scale: 4096.0, reducing to 2048.0",
        {**OVERFLOW, "name": "fused", "rank": 0},
    ),
    "fused, quiet": (
        PREFIX + "No Grad overflow for 500 iterations",
        {"kind": "setting", "name": "loss_scale_window", "before": 500},
    ),
    "fused, increasing": (
        PREFIX + "Increasing dynamic loss scale from 2048.0 to 4096.0",
        {"kind": "growth", "before": 2048.0, "after": 4096.0},
    ),
    "static": (PREFIX + "Using static loss scale of: 128", {"kind": "static", "after": 128.0}),
    "minimum": (
        "[rank5]: Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting "
        "run.",
        {"kind": "minimum", "rank": 5},
    ),
    "set": (PREFIX + "[deepspeed] setting loss scale from 65536 -> 512.0", {"kind": "set", "after": 512.0}),
    "bf16 or static in 0.19": (
        "[2026-03-01 10:00:07,215] [WARNING] [logging.py:123:log_dist] [Rank 0] [deepspeed] OVERFLOW! "
        "Skipping step. Gradients are non-finite, weights were not updated.",
        {"kind": "overflow", "before": None, "after": None, "rank": 0},
    ),
    "progress": (
        PREFIX + "[Rank 0] step=10, skipped=6, lr=[1e-05], mom=[(0.9, 0.999)]",
        {"kind": "mark", "step": 10, "skipped": 6},
    ),
    "Megatron": (
        megatron_line(17, 3.25, 4294967296.0, 1.5, 1),
        {"kind": "metrics", "step": 17, "loss": 3.25, "scale": 4294967296.0, "norm": 1.5, "skipped": 1},
    ),
    "apex": (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 2048.0", OVERFLOW
    ),
    "fairseq": (
        "| WARNING: overflow detected, setting loss scale to: 0.0625", {"before": 0.125, "after": 0.0625}
    ),
    "fairseq, newer": (
        "2026-03-01 10:00:07 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, "
        "setting loss scale to: 2048.0",
        OVERFLOW,
    ),
    "transformers": (
        "{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 2e-05, 'epoch': 0.5}",
        {"kind": "metrics", "loss": 2.5, "norm": 1.25},
    ),
    "transformers 5": (
        "{'loss': '2.5', 'grad_norm': '1.25', 'learning_rate': '2e-05', 'epoch': '0.5'}",
        {"kind": "metrics", "loss": 2.5, "norm": 1.25},
    ),
    "dslaunch": (
        "step 7/100  loss 2.5000  grad_norm 1.25  lr 0.0002  900 tokens/s",
        {"kind": "metrics", "step": 7, "loss": 2.5, "norm": 1.25},
    ),
    "a bar with a loss": (
        "train: 10%|#  | 7/100 [00:01<00:20, 4.4it/s, loss=2.5]", {"kind": "metrics", "bar": 7, "loss": 2.5}
    ),
}  # fmt: skip


def records_of(tmp_path: Path, data: bytes) -> list[Record]:
    path = tmp_path / "train.log"
    path.write_bytes(data)
    return [record for found in LogFile(str(path)).found() for record in parse(found)]


def says(record: Record, wanted: dict[str, object]) -> bool:
    return all(getattr(record, name) == value for name, value in wanted.items())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("end", ["\n", "\r\n", ""], ids=["LF", "CRLF", "no end"])
def test_a_line(name: str, end: str, tmp_path: Path) -> None:
    line, wanted = SHAPES[name]
    (record,) = records_of(tmp_path, f"starting\n{line}{end}".encode())
    assert says(record, wanted), record
    assert record.line == 2


@pytest.mark.parametrize("name", SHAPES)
def test_glued_behind_a_bar_in_colour_and_between_bytes_that_are_no_text(name: str, tmp_path: Path) -> None:
    line, wanted = SHAPES[name]
    bar = b"\xff\xfe\r  4%|4   | 12/300 [00:10<04:00,  1.20it/s]"
    colour = b"\x1b[32m" + line.replace("loss", "lo\x1b[0mss").encode() + b"\x1b[0m\xe9\n"
    records = records_of(tmp_path, bar + colour)
    assert len(records) == 1 and says(records[0], {k: v for k, v in wanted.items() if k != "bar"}), records


WRAPPED = [name for name in SHAPES if name.startswith(("DeepSpeed", "apex", "fused, overflow", "Megatron"))]


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_at_any_column(name: str, tmp_path: Path) -> None:
    """In the middle of words and numbers: the same record, once, whatever the width."""
    line, wanted = SHAPES[name]
    wanted = {
        key: value for key, value in wanted.items() if key not in ("rank", "name")
    }  # may be on another line
    for width in range(45, len(line) + 1):
        pieces = [line[i : i + width] for i in range(0, len(line), width)]
        records = records_of(tmp_path, ("\n".join(pieces) + "\nnext line\n").encode())
        assert len(records) == 1 and says(records[0], wanted), (width, pieces, records)


@pytest.mark.parametrize(
    "line",
    [
        "{'eval_loss': 9.0, 'eval_runtime': 3.5, 'epoch': 1.0}",
        "validation loss: 9.0",
        "eval at step 7: held-out loss 9.0000 over 10 answer tokens",
        "{'train_runtime': 10.1, 'train_loss': 9.0, 'epoch': 1.0}",
        "a lossy codec, 3 loss functions, lossless",
        "we saw an overflow of the buffer; skipping steps is fine",
    ],
)
def test_lines_that_tell_of_something_else(line: str, tmp_path: Path) -> None:
    assert records_of(tmp_path, line.encode() + b"\n") == []


@pytest.mark.parametrize("value", ["nan", "NaN", "inf", "-inf", "Infinity"])
def test_values_that_are_not_finite(value: str, tmp_path: Path) -> None:
    (record,) = records_of(tmp_path, f"{{'loss': {value}, 'grad_norm': {value}}}\n".encode())
    assert record.loss is not None and record.norm is not None
    assert not math.isfinite(record.loss) and not math.isfinite(record.norm)


def test_several_in_one_line(tmp_path: Path) -> None:
    """Ranks that write at once, without a line end between them."""
    line = PREFIX + "[deepspeed] OVERFLOW! Rank {} Skipping step. Attempted loss scale: 64, reducing to 32"
    records = records_of(tmp_path, (line.format(0) + line.format(1) + "\n").encode())
    assert [(r.rank, r.before, r.after) for r in records] == [(0, 64.0, 32.0), (1, 64.0, 32.0)]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ('    "loss_scale_window": 500, \n', "loss_scale_window", 500),
        ("fp16_config ... enabled=True loss_scale_window=500 hysteresis=4 min_loss_scale=1", "hysteresis", 4),
        (
            "dynamic_loss_scale_args . {'init_scale': 4096, 'scale_window': 500, 'delayed_shift': 4}",
            "hysteresis",
            4,
        ),
        ('        "overlap_comm": true, \n', "overlap_comm", 1),
    ],
)
def test_settings_that_deepspeed_prints(text: str, name: str, value: float, tmp_path: Path) -> None:
    assert {r.name: r.before for r in records_of(tmp_path, text.encode())}[name] == value
