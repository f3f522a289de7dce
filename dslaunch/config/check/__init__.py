"""Check a DeepSpeed config: what DeepSpeed would refuse, ignore or read as something else.

    findings = check_config(text, Target(world_size=8))

Works on any config, without torch or DeepSpeed. The table of keys is in
:mod:`dslaunch.config.schema`; rules that join several keys are one file a subject here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dslaunch.config.check.target import Reader, Target
from dslaunch.config.schema import VERSION, VERSIONS, find_key
from dslaunch.core.finding import Finding

if TYPE_CHECKING:
    from dslaunch.config.check.context import Checker
    from dslaunch.config.hjson_reader import Document

__all__ = ["CheckedConfig", "Reader", "Target", "check_config", "check_value", "looks_like_deepspeed"]


@dataclass(frozen=True)
class CheckedConfig:
    """``value`` is None where the text cannot be read (then there is one finding, ``syntax``)."""

    findings: tuple[Finding, ...]
    value: dict[str, Any] | None
    document: Document

    @property
    def readable(self) -> bool:
        return self.value is not None


def check_config(text: str, target: Target | None = None) -> CheckedConfig:
    """All findings about a DeepSpeed config's text, in file order.

    Never raises for what stands in the text. A text that is no hjson, or no mapping,
    gives findings with the code ``syntax`` alone.
    """
    # Here, because files of other kinds are checked without the rules for configs.
    from dslaunch.config.check import syntax
    from dslaunch.config.check.context import Checker
    from dslaunch.config.hjson_reader import Document, HjsonError, read_hjson

    target = target or Target()
    try:
        document = read_hjson(text)
    except HjsonError as error:
        document = Document(text.replace("\r\n", "\n"))
        return CheckedConfig(syntax.unreadable(error, document), None, document)
    except RecursionError:
        document = Document(text)
        return CheckedConfig(
            (Finding("syntax", "error", "", "nested too deeply to be read"),), None, document
        )
    if not isinstance(document.value, dict):
        return CheckedConfig((_no_mapping(text, document),), None, document)
    checker = Checker(document, target)
    check_version(checker)
    syntax.check_syntax(checker)
    if "\r\n" in text:
        checker.report("line-ends", "info", (), "lines end as on Windows (CRLF), which both readers accept")
    _check_meaning(checker)
    found = sorted(checker.findings, key=lambda finding: (finding.line or 0, finding.column or 0))
    return CheckedConfig(tuple(found), document.value, document)


def check_value(config: dict[str, Any], target: Target) -> tuple[Finding, ...]:
    """All findings about a config that is no text (yet), so that none has a line."""
    from dslaunch.config.check.context import Checker
    from dslaunch.config.hjson_reader import Document

    checker = Checker(Document("", config), target)
    _check_meaning(checker)
    return tuple(checker.findings)


def _check_meaning(checker: Checker) -> None:
    """Every rule but those about the text."""
    from dslaunch.config.check import batch, keys, optimizer, other_sections, precision, zero

    keys.check_keys(checker)
    batch.check_batch(checker)
    precision.check_precision(checker)
    optimizer.check_optimizer(checker)
    zero.check_zero(checker)
    other_sections.check_other_sections(checker)


def check_version(checker: Checker) -> None:
    """Say where the target's DeepSpeed lies outside the versions that the table was made from."""
    from dslaunch.config.check.keys import parse_version

    version = checker.target.version
    if not parse_version(VERSIONS[0]) <= parse_version(version) <= parse_version(VERSION):
        checker.report(
            "unknown-version",
            "info",
            (),
            f"DeepSpeed {version} is not known here; the keys are those of {VERSIONS[0]} to {VERSION}",
        )


def looks_like_deepspeed(value: Any) -> bool:
    """Whether a mapping has at least one key that DeepSpeed knows."""
    return isinstance(value, dict) and any(find_key(str(name)) is not None for name in value)


def _no_mapping(text: str, document: Document) -> Finding:
    from dslaunch.config.check.syntax import unreadable
    from dslaunch.config.hjson_reader import HjsonError

    stripped = text.strip()
    if stripped.endswith(".json") and "\n" not in stripped:
        return unreadable(HjsonError("the file holds a path", 0), document)[0]
    kinds: dict[type[Any], str] = {list: "a list", str: "a text"}
    kind = kinds.get(type(document.value), "a single value")
    return Finding(
        "syntax", "error", "", f"cannot be read: {kind} stands where a config in braces is expected", 1, 1
    )
