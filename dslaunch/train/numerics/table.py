"""The table stage x dtype x property: what is fed, what must come out, and what a measurement means.

No torch: the ranks (``measure.py``) feed and measure, the command line shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 1
STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16", "fp16", "fp16 autocast")
WHO = ("DeepSpeed alone", "dslaunch")

PROPERTIES = {
    "scaled": "the loss is multiplied by the loss scale that the gradient is divided by",
    "clip": "the gradient is unscaled before it is clipped",
    "growth": "the update of the step on which the loss scale grows is whole",
    "hysteresis": "the overflow that the hysteresis lets pass leaves the loss scale alone",
    "first": "nothing is trained before the first step, and that one is whole",
    "skip": "an overflow on one rank is skipped on all, and the next step is whole",
    "norm": "the norm reported is that of the unscaled gradient before clipping",
}
FP16_ONLY = ("scaled", "growth", "hysteresis")

SMALL = 0.0625  # a gradient that every format holds exactly
SCALE_POWER, WINDOW, HYSTERESIS, CLIP = 8, 2, 2, 1.0
GRADIENTS = ((SMALL, 0.0), (SMALL, 0.0), (SMALL, 0.0), (3.0, 4.0), (math.inf, 0.0), (SMALL, 0.0))
CLIP_STEP, OVERFLOW_STEP = 4, 5  # steps count from 1; WINDOW + 1 good ones make the scale grow
ADAMW_LR, ADAMW_DECAY, ADAMW_GRADIENT = 0.1, 0.5, 0.5

Verdict = Literal["right", "wrong", "refused", "failed", "-"]


@dataclass(frozen=True)
class Found:
    """``evidence``: what was measured, where it is not as it must be."""

    verdict: Verdict
    evidence: str = ""


@dataclass(frozen=True)
class Measured:
    """One engine's courses. SGD with lr 1 on ``GRADIENTS``: ``updates`` of the two weights on each rank
    and step, ``norms`` and ``scales`` (before each step) as they were reported; AdamW: a weight that
    starts at 1, before and after its first step.
    """

    updates: Sequence[Sequence[Sequence[float]]]
    norms: Sequence[float | None]
    scales: Sequence[float]
    adamw: Sequence[float]


def judge(measured: Measured, dtype: str) -> dict[str, Found]:
    """Each property of one engine."""
    found = {name: _JUDGES[name](measured) for name in PROPERTIES}
    if dtype != "fp16":
        found |= {name: Found("-") for name in FP16_ONLY}
    return found


def _expect(text: str, have: float | None, must: float) -> Found:
    if have is not None and (have == must or math.isclose(have, must, rel_tol=1e-3, abs_tol=1e-9)):
        return Found("right")
    return Found("wrong", f"{text} {'none' if have is None else format(have, '.4g')}, must be {must:.4g}")


def _first_wrong(findings: Iterable[Found]) -> Found:
    return next((found for found in findings if found.verdict != "right"), Found("right"))


def _scaled(m: Measured) -> Found:
    return _expect("update", m.updates[0][0][0], -SMALL)


def _clip(m: Measured) -> Found:
    return _first_wrong(
        _expect("update of the gradient (3, 4) clipped to 1:", have, must)
        for have, must in zip(m.updates[0][CLIP_STEP - 1], (-0.6, -0.8), strict=True)
    )


def _growth(m: Measured) -> Found:
    before, grown = m.updates[0][WINDOW - 1][0], m.updates[0][WINDOW][0]
    if m.scales[WINDOW + 1] <= m.scales[WINDOW]:
        return Found("wrong", f"the scale did not grow after {WINDOW + 1} good steps")
    return _expect("update", grown, before)


def _hysteresis(m: Measured) -> Found:
    return _expect("scale after the first overflow:", m.scales[OVERFLOW_STEP], m.scales[OVERFLOW_STEP - 1])


def _first(m: Measured) -> Found:
    start, after = m.adamw
    must = 1 - ADAMW_LR * ADAMW_DECAY - ADAMW_LR  # the first step of Adam has the size of the rate
    return _first_wrong([_expect("AdamW's weight before it:", start, 1.0), _expect("after it:", after, must)])


def _skip(m: Measured) -> Found:
    findings = []
    for rank, updates in enumerate(m.updates):
        findings.append(_expect(f"update on rank {rank}", updates[OVERFLOW_STEP - 1][0], 0.0))
        findings.append(_expect(f"update after it on rank {rank}", updates[OVERFLOW_STEP][0], updates[0][0]))
    return _first_wrong(findings)


def _norm(m: Measured) -> Found:
    good = [step for step in range(len(GRADIENTS)) if step != OVERFLOW_STEP - 1]
    return _first_wrong(
        _expect(f"norm of step {step + 1}", m.norms[step], math.hypot(*GRADIENTS[step])) for step in good
    )


_JUDGES = {
    "scaled": _scaled,
    "clip": _clip,
    "growth": _growth,
    "hysteresis": _hysteresis,
    "first": _first,
    "skip": _skip,
    "norm": _norm,
}


def ours_is_wrong(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells, in words, in which dslaunch is wrong or fails. A refusal is not wrong."""
    return [
        f"stage {cell['stage']} {cell['dtype']}, {name}: {found['verdict']}; {found['evidence']}"
        for cell in cells
        if cell["who"] == WHO[1]
        for name, found in cell["properties"].items()
        if found["verdict"] in ("wrong", "failed")
    ]


def table_rows(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(stage, dtype, who, a verdict for each property), in the table's order."""
    by_key = {(cell["stage"], cell["dtype"], cell["who"]): cell["properties"] for cell in cells}
    return [
        (str(stage), dtype, who, tuple(by_key[stage, dtype, who][name]["verdict"] for name in PROPERTIES))
        for dtype in DTYPES
        for stage in STAGES
        for who in WHO
        if (stage, dtype, who) in by_key
    ]
