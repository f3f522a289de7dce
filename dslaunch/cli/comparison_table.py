"""Two runs side by side, for a reader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dslaunch.observe.comparison import Comparison, Largest, Pair, Side

_MAX_STEPS = 40  # of a longer course evenly chosen ones are shown; --json has all
_MAX_DIFFERENCES = 12
_GIB = 2**30


def comparison_lines(found: Comparison) -> list[str]:
    """What each run was and did, then each step of both, then where they are furthest apart."""
    blocks = [_sides(found), _differences(found), _steps(found), _verdicts(found)]
    return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


def _sides(found: Comparison) -> list[str]:
    sides = (found.base, found.changed)
    rows: list[tuple[str, ...]] = [("", *(side.name for side in sides))]
    for title, cell_of in (
        ("engine", _engine),
        ("precision", _precision),
        ("ended", _end),
        ("skipped steps", lambda side: f"{side.num_skipped} of {len(side.rows)}" if side.rows else "-"),
        ("loss scale", _scale_course),
        ("held-out loss", _held_out),
        ("tokens/s", lambda side: "-" if side.tokens_per_s is None else f"{side.tokens_per_s:,.0f}"),
        ("peak memory", _memory),
    ):
        cells = [cell_of(side) for side in sides]
        if any(cell != "-" for cell in cells):
            rows.append((title, *cells))
    lines = _table(rows, numbers=False)
    for side in sides:
        trouble = side.status.trouble if side.status is not None else ()
        lines += [f"{side.name}: {text}" for text in (*trouble, *(f"note: {text}" for text in side.notes))]
    return lines


def _engine(side: Side) -> str:
    if side.engine is None:
        return "-"
    return side.engine if side.zero_stage is None else f"{side.engine}, ZeRO stage {side.zero_stage}"


def _precision(side: Side) -> str:
    if side.precision is None:
        return "-"
    autocast = side.weights_in_fp32 and side.precision != "fp32"
    return f"{side.precision} by autocast, trained weights fp32" if autocast else side.precision


def _end(side: Side) -> str:
    if side.status is None:
        return "not started"
    done = f"{max(side.rows, default=0)} steps"
    code = side.status.exit_code
    return f"{side.status.state}, {done}" + (f" (exit code {code})" if code else "")


def _scale_course(side: Side) -> str:
    """From where to where, and how often it fell and grew; ``-`` where nothing was scaled."""
    scales = [scale for row in side.rows.values() if isinstance(scale := row.get("loss_scale"), (int, float))]
    if not scales or set(scales) == {1.0}:
        return "-"
    fell = sum(after < before for before, after in pairwise(scales))
    grew = sum(after > before for before, after in pairwise(scales))
    if not (fell or grew):
        return f"{_scale(scales[0])} throughout"
    return f"{_scale(scales[0])} to {_scale(scales[-1])}, fell {fell} x, grew {grew} x"


def _held_out(side: Side) -> str:
    losses = [_loss(loss) for _, loss in side.eval_losses]
    return "-" if not losses else losses[0] if len(losses) == 1 else f"{losses[0]} to {losses[-1]}"


def _memory(side: Side) -> str:
    if side.peak_memory_bytes is None:
        return "-"
    of = "on rank 0's device" if side.peak_memory_of == "device" else "resident, fullest rank"
    return f"{side.peak_memory_bytes / _GIB:.2f} GiB {of}"


def _differences(found: Comparison) -> list[str]:
    """The values of the plans that differ."""
    if not found.differences:
        return []
    lines = ["settings that differ"]
    lines += [
        f"  {item.key}: {_value(item.values.base)} | {_value(item.values.changed)}"
        for item in found.differences[:_MAX_DIFFERENCES]
    ]
    more = len(found.differences) - _MAX_DIFFERENCES
    return [*lines, f"  and {more} more (--json)"] if more > 0 else lines


def _value(value: Any) -> str:
    return "-" if value is None else str(value)


def _steps(found: Comparison) -> list[str]:
    if not found.steps:
        return []
    scaled = any(
        scale not in (None, 1.0) for values in found.steps.values() for scale in values["loss_scale"]
    )
    names = (found.base.name, found.changed.name)
    head = ["step", *(f"loss {name}" for name in names), "difference"]
    head += [f"norm {name}" for name in names]
    head += [f"scale {name}" for name in names] if scaled else []
    rows = [tuple(head)]
    chosen = _chosen(list(found.steps), found.largest("loss"))
    for step in chosen:
        values = found.steps[step]
        row = [str(step), *map(_loss, values["loss"]), _apart(values["loss"]), *_norms(values)]
        rows.append(tuple(row + [_scale(scale) for scale in values["loss_scale"]] if scaled else row))
    lines = _table(rows, numbers=True)
    if len(chosen) < len(found.steps):
        lines.append(f"{len(chosen)} of {len(found.steps)} steps are shown; --json has all")
    return lines


def _chosen(steps: Sequence[int], largest: Largest | None) -> list[int]:
    """All of a few; of many evenly chosen ones, the first, the last and that of the largest difference."""
    if len(steps) <= _MAX_STEPS:
        return list(steps)
    places = {round(i * (len(steps) - 1) / (_MAX_STEPS - 1)) for i in range(_MAX_STEPS)}
    return sorted({*(steps[place] for place in places), *([largest.step] if largest else [])})


def _norms(values: Mapping[str, Pair]) -> list[str]:
    cells = []
    for norm, skipped in zip(values["grad_norm"], values["skipped"], strict=True):
        cells.append("-" if norm is None else f"{norm:.5g}" + (" skipped" if skipped else ""))
    return cells


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _apart(pair: Pair) -> str:
    if None in pair:
        return "-"
    apart = pair.changed - pair.base
    return f"{apart:+.6f}" if math.isfinite(apart) else "nan"


def _scale(value: float | None) -> str:
    return "-" if value is None else f"{value:.15g}"


def _verdicts(found: Comparison) -> list[str]:
    lines = []
    if (step := found.first_other_data()) is not None:
        lines.append(f"the samples or their order differ from step {step} on: losses cannot be compared")
    for name, words in (("loss", "loss"), ("grad_norm", "gradient norm")):
        largest = found.largest(name)
        if largest is None:
            continue
        if largest.absolute == 0:
            lines.append(f"{words}: the same at every step")
            continue
        share = f"{100 * largest.relative:.2g} %"
        lines.append(f"{words}: largest difference {largest.absolute:.6g} ({share}) at step {largest.step}")
    return lines


def _table(rows: Iterable[tuple[str, ...]], *, numbers: bool) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    pad = str.rjust if numbers else str.ljust
    return [
        "  ".join(pad(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
