"""What a run directory tells: its metrics, its events, and of a loop of one's own its diagnosis."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dslaunch.core.errors import ConfigError
from dslaunch.core.events import parse_line, parse_number
from dslaunch.core.run_dir import RunDir
from dslaunch.observe.diagnose.shapes import Record
from dslaunch.observe.diagnose.story import Story
from dslaunch.observe.diagnose.verdicts import OWN_VERDICTS

_FP16_KEYS = (
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
    "consecutive_hysteresis",
    "initial_scale_power",
)
_STEP_LINE = re.compile(rb' +"step": \d+,?')


def tells_of_steps(events: Path) -> bool:
    """Whether a skipped step, a move of the scale or a verdict is in it."""
    if not events.exists():
        return False
    return any(_record(row, number) is not None for _, _, number, row in _rows(events, {events: 0}))


def config_settings(path: Path) -> dict[str, float]:
    """What a DeepSpeed JSON or a plan says of the loss scale and of the overlap of its communication."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        fp16 = config.get("fp16") or {}
        is_on = fp16.get("enabled", config.get("precision") == "fp16")
        found = {name: float(fp16[name]) for name in _FP16_KEYS if name in fp16 and is_on}
        zero = config.get("zero_optimization", {})
        if isinstance(zero.get("overlap_comm"), bool):
            found["overlap_comm"] = float(zero["overlap_comm"])
    except (OSError, ValueError, TypeError, AttributeError):  # not there, or not ours
        return {}
    return found


def read_run(run: RunDir, story: Story) -> list[tuple[str, int]]:
    """Its metrics and events; the names of the files and how many lines each has."""
    counts = {run.metrics: 0, run.events: 0}
    rows = [_rows(path, counts) for path in counts if path.exists()]
    for _, path, number, row in heapq.merge(*rows, key=lambda item: item[0]):  # by time, then by step
        record = _record(row, number)
        if record is not None:
            story.add(record, str(path))
    return [(str(path), lines) for path, lines in counts.items() if path.exists()]


def read_own_loop(run: RunDir, story: Story, notes: list[str]) -> list[tuple[str, int]]:
    """The events of an engine in a loop of one's own; where it diverged its last steps, too."""
    counts = {run.events: 0}
    steps = _diagnosed_steps(run.diagnosis)
    events = _rows(run.events, counts)
    diagnosed = (((_step(row), 1), run.diagnosis, number, row) for number, row in steps)
    by_step = (((_step(row), 0), path, number, row) for _, path, number, row in events)
    for _, path, number, row in heapq.merge(by_step, diagnosed, key=lambda item: item[0]):
        record = _record(row, number)
        if record is not None:
            story.add(record, str(path))
    if steps:
        told = f"losses and norms are those of its last {len(steps)} steps, from diagnosis.json"
    else:
        told = "without losses and norms, which stand in diagnosis.json where a run diverged"
    notes.append(f"there is no metrics.jsonl: this is what the engine told of a loop of your own; {told}")
    files = [(str(path), lines) for path, lines in counts.items()]
    return [*files, (str(run.diagnosis), _num_lines(run.diagnosis))] if steps else files


def _num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def read_culprit(run: RunDir) -> dict[str, Any] | None:
    """Who made the first nan or inf: of a run that ended so and was told to look for it."""
    culprit = _diagnosis(run.diagnosis).get("culprit")
    return culprit if isinstance(culprit, dict) and isinstance(culprit.get("message"), str) else None


def _diagnosed_steps(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line, row as of metrics.jsonl) of the steps in diagnosis.json, of which there are 200 at most."""
    rows = _diagnosis(path).get("steps")
    steps = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    steps = [row for row in steps if isinstance(row.get("step"), int)]
    lines = path.read_bytes().splitlines() if steps else []
    found = [number for number, line in enumerate(lines, 1) if _STEP_LINE.fullmatch(line)]
    if len(found) != len(steps):  # not as dslaunch writes it
        found = [1] * len(steps)
    texts = [json.dumps(row).encode() for row in steps]
    return [
        (number, {**row, "kind": "train", "_text": text[:300]})
        for number, row, text in zip(found, steps, texts, strict=True)
    ]


def _diagnosis(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # most runs have none
        return {}
    return value if isinstance(value, dict) else {}


def _step(row: Mapping[str, Any]) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0


def _rows(path: Path, counts: dict[Path, int]) -> Iterator[tuple[tuple[str, int], Path, int, dict[str, Any]]]:
    """((time, step), path, line, object) of each whole line of a JSON-lines file."""
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                counts[path] = number
                if (row := parse_line(line)) is not None:
                    row["_text"] = line[:300]
                    yield (str(row.get("time")), _step(row)), path, number, row
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _record(row: dict[str, Any], number: int) -> Record | None:
    kind, step = row.get("kind"), row.get("step")
    text = row["_text"]
    if kind == "step_skipped" and isinstance(step, int):
        before, after = parse_number(row.get("loss_scale")), parse_number(row.get("next_loss_scale"))
        scaled = (before is not None and before != 1.0) or after not in (None, before)
        return Record(
            "overflow",
            number,
            step,
            before=before if scaled else None,
            after=after if scaled else None,
            text=text,
        )
    if kind == "train" and isinstance(step, int):
        loss, norm, scale = (parse_number(row.get(name)) for name in ("loss", "grad_norm", "loss_scale"))
        return Record(
            "metrics", number, step, loss=loss, norm=norm,
            scale=None if scale == 1.0 else scale, name="scale used", text=text,
        )  # fmt: skip
    if kind == "loss_scale_grew" and isinstance(step, int):
        before, after = parse_number(row.get("previous_loss_scale")), parse_number(row.get("loss_scale"))
        return Record("growth", number, step, before=before, after=after, text=text)
    if kind == "hysteresis_changed" and isinstance(step, int):
        return Record("spared", number, step, before=parse_number(row.get("previous_hysteresis")), text=text)
    if kind == "rank_error" and "already at minimum" in str(row.get("message")):
        return Record("minimum", number, text=text)
    if kind == "verdict" and isinstance(step, int) and row.get("verdict") in OWN_VERDICTS:
        return Record("ended", number, step, name=str(row["verdict"]), text=text)
    if kind in ("train_start", "resumed") and isinstance(step, int):
        return Record("mark", number, step, text=text) if kind == "resumed" else None
    return None
