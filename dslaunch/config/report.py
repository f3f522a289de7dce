"""What resolving finds on its way: problems, notes, and the origin of each value."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

from dslaunch.config.load import LoadedSpec
from dslaunch.config.overrides import SET
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.plan import Origin


class Problem(NamedTuple):
    """What is wrong, and the run-file key that it is about; ``line`` is the key's, 0 where it has none."""

    line: int
    key: str
    error: ConfigError


class Risk(NamedTuple):
    """A note of what is likely to hurt (or, as info, only costs), and the run-file key that it is about."""

    key: str
    text: str
    severity: Literal["warning", "info"] = "warning"


@dataclass
class Report:
    """Collects problems so that all are shown at once, and a reason for every value."""

    loaded: LoadedSpec[Any]
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    risks: list[Risk] = field(default_factory=list)
    reasons: dict[str, Origin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for plan_key, reason in self.loaded.settled.items():
            self.reason(plan_key, reason)

    def fail(self, key: str, message: str, hint: str | None = None) -> None:
        """Record that what was written for ``key`` (a run-file key) cannot be."""
        where = self.loaded.where(key)
        if where.startswith("--") and where != f"{SET}: " and self.given(key):
            message = message.removeprefix(f"{key}: ")  # the flag's name says it already
        error = ConfigError(f"{where}{message}", hint=hint)
        self.problems.append(Problem(self.loaded.line(key), key, error))

    def add(self, key: str, error: ConfigError) -> None:
        """Record an error that says itself where it is, at the place of ``key``."""
        errors = error.problems if isinstance(error, ConfigErrors) else [error]
        self.problems += [Problem(self.loaded.line(key), key, each) for each in errors]

    def catching(self, key: str) -> Catching:
        """Record ConfigErrors of the ``with`` block as problems of their own ``key``, else of this one."""
        return Catching(self, key)

    def note(self, text: str) -> None:
        """Say something that the user should know but need not act on."""
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, key: str, text: str) -> None:
        """A note of a risk that was taken with ``key``: ``dslaunch check`` makes a warning of it."""
        self.note(text)
        self.risks.append(Risk(key, text))

    def advise(self, key: str, text: str) -> None:
        """A note of what could be better about ``key``: ``dslaunch check`` makes an info finding of it."""
        self.note(text)
        self.risks.append(Risk(key, text, "info"))

    def reason(self, plan_key: str, reason: str, source: str = "derived") -> None:
        """Say why the plan's ``plan_key`` has its value, where that is not plain from the run file."""
        self.reasons[plan_key] = Origin(reason=reason, source=source)

    def given(self, key: str) -> bool:
        """Whether the run file or a flag sets ``key`` itself."""
        return self.loaded.given(key)

    def raise_if_any(self) -> None:
        """Raise all problems so far, in file order."""
        if self.problems:
            raise ConfigErrors(
                [problem.error for problem in sorted(self.problems, key=lambda item: item.line)]
            )


@dataclass(frozen=True)
class Catching:
    """What :meth:`Report.catching` returns."""

    report: Report
    key: str

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, ConfigError):
            return False
        for each in error.problems if isinstance(error, ConfigErrors) else [error]:
            self.report.fail(getattr(each, "key", self.key), each.message, each.hint)
        return True
