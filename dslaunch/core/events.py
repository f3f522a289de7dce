"""metrics.jsonl and events.jsonl: one JSON object a line, appended, never rewritten.

Each line is one ``write`` on a file opened with O_APPEND, so the launcher and
rank 0 can both add to events.jsonl and a reader never sees a torn line in the
middle. Every line carries ``time`` (UTC, ISO-8601, Z).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def utc_now() -> str:
    """The present in UTC to the millisecond, e.g. ``2026-11-29T17:20:16.123Z``."""
    now = datetime.now(timezone.utc)
    return now.strftime("%Y-%m-%dT%H:%M:%S.") + f"{now.microsecond // 1000:03d}Z"


def to_jsonable(value: Any) -> Any:
    """Non-finite floats become the strings ``"nan"``, ``"inf"``, ``"-inf"``: strict JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    return value


def parse_number(value: Any) -> float | None:
    """The other way, of one value: a number, or its text; None for all else."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The object of one line; None where it is not whole yet, or no object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file's lines; what :func:`parse_line` knows none of is left out. Raises OSError."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if (value := parse_line(line)) is not None:
                yield value


class JsonlWriter:
    """Appends objects to one JSON-lines file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, kind: str, **fields: Any) -> None:
        """Append ``{"time": ..., "kind": kind, **fields}``."""
        line = json.dumps(to_jsonable({"time": utc_now(), "kind": kind, **fields}), allow_nan=False)
        os.write(self._fd, line.encode("utf-8") + b"\n")

    def close(self) -> None:
        os.close(self._fd)
