"""What a checker has to say about one place of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
Action = Literal["set", "delete", "rename"]
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Edit:
    """One change that mends a finding. ``value``: the new value, or for rename the new path."""

    action: Action
    path: KeyPath
    value: Any = None


@dataclass(frozen=True)
class Finding:
    """``code`` is stable and for programs; ``message`` is one sentence for people.

    ``key`` is a key path (``zero_optimization.stage``), ``""`` for the whole file. ``hint`` is
    one thing to do, ``fix`` says what ``--fix`` would do and ``edits`` are that change.
    """

    code: str
    severity: Severity
    key: str
    message: str
    line: int | None = None
    column: int | None = None
    hint: str | None = None
    fix: str | None = None
    edits: tuple[Edit, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        names = ("code", "severity", "key", "line", "column", "message", "hint", "fix")
        return {name: getattr(self, name) for name in names}


def key_text(path: KeyPath) -> str:
    """``("a", 0, "b")`` -> ``a[0].b``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def encodable(text: str) -> str:
    """The text, with half a surrogate pair (JSON's ``"\\ud800"``) as that escape: it can be printed then."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
