"""Errors that a user sees, and the exit code of each.

    DslaunchError (70)
    ├── ConfigError (2)           a run file, a flag, a template or data is wrong
    │   └── HostfileError (2)     a hostfile line is wrong
    ├── EnvironmentNotReady (3)   a package, port, disk or compiler is missing
    ├── Diverged (76)             training cannot go on: the loss scale is at its minimum
    └── LaunchFailed (its own)    a rank failed; carries the first failing rank's code

The message is one sentence that says what is wrong, the value and where
(``file:line``); the hint is one thing to do next. Neither holds a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXIT_OK = 0
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_NOT_READY = 3
EXIT_OUR_BUG = 70
EXIT_STOPPED_AT_CHECKPOINT = 75
EXIT_DIVERGED = 76
EXIT_HOST_LOST = 77
EXIT_CANCELLED_INT = 130
EXIT_CANCELLED_TERM = 143


class DslaunchError(Exception):
    """Base of every error meant for the user: a sentence, a hint, an exit code."""

    exit_code = EXIT_OUR_BUG

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self._added: list[str] = []

    @property
    def __notes__(self) -> list[str]:
        """Below the traceback of a script that does not catch it, Python (from 3.11) prints the hint."""
        return [*([f"hint: {self.hint}"] if self.hint else []), *self._added]

    def add_note(self, note: str) -> None:
        """One more line below the traceback."""
        self._added.append(note)

    def format(self) -> str:
        """The text for stderr: ``Error: ...`` and, where there is one, ``hint: ...``."""
        text = f"Error: {self.message}"
        return f"{text}\n\nhint: {self.hint}" if self.hint else text


class ConfigError(DslaunchError):
    """What the user wrote cannot be run as it is."""

    exit_code = EXIT_USAGE


class ConfigErrors(ConfigError):
    """Several problems found in one pass, shown together in file order."""

    def __init__(self, problems: list[ConfigError]) -> None:
        assert problems
        super().__init__("; ".join(p.message for p in problems), hint=problems[0].hint)
        self.problems = problems

    def format(self) -> str:
        return "\n\n".join(problem.format() for problem in self.problems)


class HostfileError(ConfigError):
    """A hostfile is missing or a line of it cannot be read."""


class EnvironmentNotReady(DslaunchError):
    """The machine lacks something the run needs."""

    exit_code = EXIT_NOT_READY


class Diverged(DslaunchError):
    """The numbers of the training are broken; going on would waste time.

    ``verdict``: the kind, as in the run's events. ``step`` counts from 1; None: before the first.
    ``culprit``: who made the first nan or inf, where that was looked for: module, parameter, rank, samples.
    """

    exit_code = EXIT_DIVERGED

    def __init__(
        self, message: str, *, hint: str | None = None, verdict: str = "diverged", step: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.verdict = verdict
        self.step = step
        self.culprit: Mapping[str, Any] | None = None


class LaunchFailed(DslaunchError):
    """A rank failed or was lost. ``exit_code`` is that rank's (128+n for signal n)."""

    def __init__(self, message: str, *, exit_code: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's text on one line of at most ``limit`` characters; its type's name where it has no text.

    All lines are kept (pydantic and DeepSpeed say only after the first what is wrong)
    until the limit cuts them off.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"
