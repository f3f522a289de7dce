"""From what a probe saw to the first module and parameter that went inf or nan. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dslaunch.train.replay.measure import Range
from dslaunch.train.replay.probe import Event

Phase = Literal["forward", "loss", "backward"]

LOSS = "(the loss)"
_BEFORE, _AFTER = 4, 3  # events in the trail


@dataclass(frozen=True)
class First:
    """Where the first value that is not finite was made.

    ``module``: the innermost one whose own code made it ("": code of the whole model; LOSS).
    ``place``: the event in which it was first seen, an index into the probe's events; None for a
    loss that was made of finite logits. ``between``: in a module's own code it can be narrowed to
    what lies behind the modules named here.
    """

    phase: Phase
    module: str
    parameter: str | None
    place: int | None
    what: str
    between: str | None = None


def find_first(events: Sequence[Event], loss: float | None) -> First | None:
    """The first event that is not finite, and who is to blame for it; None where all are finite.

    ``loss``: the micro-batch's loss; None: nobody looked at it.
    """
    forward = [i for i, e in enumerate(events) if e.kind in ("input", "output")]
    bad = next((i for i in forward if not events[i].range.is_finite), None)
    if bad is not None:
        return _forward(events, bad)
    if loss is not None and (loss != loss or loss in (float("inf"), float("-inf"))):
        return First("loss", LOSS, None, None, "the loss of finite outputs")
    bad = next((i for i, e in enumerate(events) if not e.range.is_finite), None)
    return None if bad is None else _backward(events, bad)


def _forward(events: Sequence[Event], bad: int) -> First:
    event = events[bad]
    if event.kind == "output":
        what = "its output" + (f" {event.name}" if event.name else "")
        return First("forward", event.module, None, bad, what, _last_child(events, bad))
    # What comes into a module was made by the code of the one around it.
    return First(
        "forward",
        _around(events, event.module),
        None,
        bad,
        f"what it gives to {event.module} as {event.name}",
        _module_before(events, bad),
    )


def _backward(events: Sequence[Event], bad: int) -> First:
    event = events[bad]
    if event.kind == "gradient of parameter":
        return First("backward", event.module, event.name, bad, f"the gradient of {event.name}")
    parameter = next(
        (
            e.name
            for e in events[bad:]
            if e.kind == "gradient of parameter" and e.module == event.module and not e.range.is_finite
        ),
        None,
    )
    if event.kind == "gradient of input":
        return First("backward", event.module, parameter, bad, f"the gradient of its input {event.name}")
    if event.module == "":
        return First("backward", LOSS, None, bad, f"the gradient of the model's output {event.name}".rstrip())
    # What comes back to a module's output was made by the code around it.
    what = f"the gradient that it gives back to {event.module}"
    return First("backward", _around(events, event.module), None, bad, what)


def _around(events: Sequence[Event], module: str) -> str:
    """The innermost module around it that computes: a ModuleList only holds others, and was never seen."""
    seen = {event.module for event in events}
    parent = module.rpartition(".")[0]
    while parent and parent not in seen:
        parent = parent.rpartition(".")[0]
    return parent


def _last_child(events: Sequence[Event], bad: int) -> str | None:
    """The module inside of the blamed one that ended last before it: the fault lies behind it."""
    module, found = events[bad].module, _module_before(events, bad)
    inside = module + "." if module else ""
    return found if found is not None and found != module and found.startswith(inside) else None


def _module_before(events: Sequence[Event], bad: int) -> str | None:
    return next((e.module for e in reversed(events[:bad]) if e.kind == "output"), None)


def trail(events: Sequence[Event], first: First) -> list[dict[str, Any]]:
    """The events around the first bad one, for the reader; of a loss, the last ones before it."""
    forward_end = next((i for i, e in enumerate(events) if e.kind not in ("input", "output")), len(events))
    place = forward_end - 1 if first.place is None else first.place
    rows = []
    for i in range(max(0, place - _BEFORE), min(len(events), place + _AFTER + 1)):
        if (i < forward_end) == (place < forward_end):
            rows.append({**events[i].to_json(), "first": i == first.place})
    return rows


def range_of(events: Sequence[Event], first: First, other: Sequence[Event]) -> Range | None:
    """What another pass, ``other``, saw at the same place, such as the same one in fp32."""
    if first.place is None:
        return None
    wanted = events[first.place]
    same = [i for i, e in enumerate(events[: first.place]) if _key(e) == _key(wanted)]
    found = [e for e in other if _key(e) == _key(wanted)]
    return found[len(same)].range if len(same) < len(found) else None


def _key(event: Event) -> tuple[str, str, str]:
    return event.kind, event.module, event.name
