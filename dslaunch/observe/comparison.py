"""Two runs side by side, step by step, read from their directories: nobody is asked, nothing is written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dslaunch.core.events import parse_number, to_jsonable
from dslaunch.core.run_dir import RunDir
from dslaunch.observe.run_status import RunStatus, load_status, read_lines

_NUMBERS = ("loss", "grad_norm", "lr", "loss_scale")
# What of two plans differs wherever two runs do, or only says again what another key says.
_NOT_COMPARED = ("origins", "ds_config", "launch.argv", "launch.run_dir")


class Pair(NamedTuple):
    """The same of both runs; None where a run has none."""

    base: Any
    changed: Any


class Difference(NamedTuple):
    """A key of the plan and what each run has for it."""

    key: str
    values: Pair


class Largest(NamedTuple):
    """Where two curves are furthest from each other; ``relative`` to the larger of the two."""

    step: int
    absolute: float
    relative: float


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run. ``status`` is None where it was never started; ``peak_memory_bytes`` is that of the fullest
    rank: of its device as torch counts it (rank 0's), else the resident memory of its process."""

    name: str
    run_dir: str
    status: RunStatus | None
    engine: str | None
    precision: str | None
    weights_in_fp32: bool | None
    zero_stage: int | None
    rows: Mapping[int, Mapping[str, Any]]
    num_skipped: int
    tokens_per_s: float | None
    peak_memory_bytes: int | None
    peak_memory_of: str | None  # "device", "process"
    eval_losses: tuple[tuple[int, float | None], ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """All but the steps, which stand beside the other's."""
        left_out = ("status", "rows", "eval_losses")
        values = {key: value for key, value in vars(self).items() if key not in left_out}
        status = self.status
        return {
            **values,
            "state": "not started" if status is None else status.state,
            "exit_code": None if status is None else status.exit_code,
            "trouble": [] if status is None else status.trouble,
            "num_steps": len(self.rows),
            "eval": [{"step": step, "loss": loss} for step, loss in self.eval_losses],
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``steps``: of all steps that either run has done, each number of both, by its name in metrics.jsonl."""

    base: Side
    changed: Side
    differences: tuple[Difference, ...]
    steps: Mapping[int, Mapping[str, Pair]]

    def largest(self, name: str) -> Largest | None:
        """The largest difference of a number, over the steps at which both are finite."""
        found: Largest | None = None
        for step, values in self.steps.items():
            pair = values[name]
            if pair.base is None or pair.changed is None or not all(map(math.isfinite, pair)):
                continue
            apart, size = abs(pair.changed - pair.base), max(map(abs, pair))
            if found is None or apart > found.absolute:
                found = Largest(step, apart, apart / size if size else 0.0)
        return found

    def first_other_data(self) -> int | None:
        """The first step that both have done with other samples, or in another order."""
        pairs = ((step, values["data_digest"]) for step, values in self.steps.items())
        return next((s for s, pair in pairs if None not in pair and pair.base != pair.changed), None)

    def to_json(self) -> dict[str, Any]:
        """The object that ``compare --json`` prints."""
        largest = {name: self.largest(name) for name in ("loss", "grad_norm")}
        report: dict[str, Any] = to_jsonable(
            {
                "schema_version": 1,
                "base": self.base.to_json(),
                "changed": self.changed.to_json(),
                "differences": [{"key": key, **pair._asdict()} for key, pair in self.differences],
                "largest": {name: found and found._asdict() for name, found in largest.items()},
                "first_other_data": self.first_other_data(),
                "steps": [
                    {"step": step, **{name: pair._asdict() for name, pair in values.items()}}
                    for step, values in self.steps.items()
                ],
            }
        )
        return report


def compare_runs(base: Path, changed: Path) -> Comparison:
    """Read two run directories. One without a run in it is a side that was never started."""
    first, second = _read_side(base), _read_side(changed)
    return Comparison(
        base=first, changed=second, differences=_differences(base, changed), steps=_steps(first, second)
    )


def _read_side(path: Path) -> Side:
    run_dir = RunDir(path)
    started = run_dir.plan.is_file()
    plan = _plan(run_dir)
    lines = list(read_lines(run_dir.metrics))
    rows = {row["step"]: row for row in lines if _is_step(row, "train")}
    evaluated = {row["step"]: row for row in lines if _is_step(row, "eval")}
    events = list(read_lines(run_dir.events))
    peak, peak_of = _peak_memory(rows, events)
    return Side(
        name=path.name,
        run_dir=str(path),
        status=load_status(path) if started else None,
        engine=plan.get("engine"),
        precision=plan.get("precision"),
        weights_in_fp32=_weights_in_fp32(plan) if started else None,
        zero_stage=plan.get("zero_stage") if plan.get("engine") == "deepspeed" else None,
        rows=dict(sorted(rows.items())),
        num_skipped=sum(bool(row.get("skipped")) for row in rows.values()),
        tokens_per_s=_speed([rows[step] for step in sorted(rows)]),
        peak_memory_bytes=peak,
        peak_memory_of=peak_of,
        eval_losses=tuple((step, parse_number(evaluated[step].get("loss"))) for step in sorted(evaluated)),
        notes=tuple(dict.fromkeys(str(e.get("message")) for e in events if e.get("kind") == "note")),
    )


def _plan(run_dir: RunDir) -> dict[str, Any]:
    """plan.json as it is; what is wrong with it says :func:`load_status`."""
    try:
        plan = json.loads(run_dir.plan.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, dict) else {}


def _is_step(row: Mapping[str, Any], kind: str) -> bool:
    return row.get("kind") == kind and isinstance(row.get("step"), int)


def _weights_in_fp32(plan: Mapping[str, Any]) -> bool:
    autocast = plan.get("engine") == "torch" or plan.get("torch_autocast") is not None
    return autocast or plan.get("precision") == "fp32"


def _speed(rows: list[Mapping[str, Any]]) -> float | None:
    """Tokens a second over all steps but the first, which warms up; of a single step its own."""
    counted = rows[1:] or rows
    tokens = [parse_number(row.get("num_tokens")) for row in counted]
    seconds = [parse_number(row.get("seconds")) for row in counted]
    if not counted or None in tokens or None in seconds:
        return None
    spent = sum(value for value in seconds if value is not None)
    return round(sum(value for value in tokens if value is not None) / spent, 1) if spent else None


def _peak_memory(
    rows: Mapping[int, Mapping[str, Any]], events: list[dict[str, Any]]
) -> tuple[int | None, str | None]:
    """Of the device where there is one, else of the fullest rank's process since the last start."""
    on_device = [row["peak_memory_bytes"] for row in rows.values() if row.get("peak_memory_bytes")]
    if on_device:
        return max(on_device), "device"
    resident: list[int] = []
    for event in events:
        if event.get("kind") == "launch_start":
            resident.clear()
        elif event.get("kind") == "rank_exit" and isinstance(event.get("max_rss_bytes"), int):
            resident.append(event["max_rss_bytes"])
    return (max(resident), "process") if resident else (None, None)


def _differences(base: Path, changed: Path) -> tuple[Difference, ...]:
    left, right = (dict(_leaves(_plan(RunDir(path)), "")) for path in (base, changed))
    if not (left and right):
        return ()
    return tuple(
        Difference(key, Pair(left.get(key), right.get(key)))
        for key in dict.fromkeys((*left, *right))
        if left.get(key) != right.get(key)
    )


def _leaves(value: Mapping[str, Any], above: str) -> list[tuple[str, Any]]:
    found = []
    for name, inner in value.items():
        key = f"{above}.{name}" if above else name
        if key in _NOT_COMPARED:
            continue
        found += _leaves(inner, key) if isinstance(inner, dict) else [(key, inner)]
    return found


def _steps(base: Side, changed: Side) -> dict[int, dict[str, Pair]]:
    return {
        step: {
            **{name: Pair(*(_value(side, step, name) for side in (base, changed))) for name in _NUMBERS},
            **{
                name: Pair(*(side.rows.get(step, {}).get(name) for side in (base, changed)))
                for name in ("skipped", "data_digest")
            },
        }
        for step in sorted({*base.rows, *changed.rows})
    }


def _value(side: Side, step: int, name: str) -> float | None:
    return parse_number(side.rows.get(step, {}).get(name))
