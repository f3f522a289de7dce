"""The text itself: how DeepSpeed's hjson and the Hugging Face Trainer's JSON read it."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

from dslaunch.config.check.context import Checker
from dslaunch.config.hjson_reader import Document, HjsonError
from dslaunch.core.finding import Edit, Finding, KeyPath

_TAG = re.compile(
    r"\{\{[^{}\n]{0,200}\}\}|\{%[^{}\n]{0,200}%\}"
)  # bounded: a long text must not take for ever
_FENCE = re.compile(r"^[ \t]*(```)", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{[A-Za-z_]\w*\}|\$[A-Za-z_]\w*")
_FEW = 10  # of each cause
_PLACEHOLDER = re.compile(rf"\$\{{?\w+\}}?|{_TAG.pattern}|^<[^<>]+>$")
_USUAL_HINT = "look at the lines just above; a bracket or quote may be missing"
_CAPITALS = re.compile(r"^[A-Z][A-Z0-9_]{2,},?$")
_WORDS = {"true": True, "false": False, "none": None, "null": None, "yes": True, "no": False}
_DEVIATIONS = {
    "comment": "a comment",
    "quotes": "a key or text without double quotes",
    "string": "a text without quotes",
    "braces": "no braces around the config",
    "bom": "a byte order mark at the start",
}


def unreadable(error: HjsonError, document: Document) -> tuple[Finding, ...]:
    """The findings for a text that is no hjson at all: each usual cause at its own place, or the parser's.

    Variables are told as well: they may be read as texts, so they are no cause by themselves.
    """
    text = document.text
    causes = find_causes(text) or [(min(error.offset, len(text)), error.message, _USUAL_HINT)]
    causes = sorted(causes + _few(text, _VARIABLE, "the variable", "let the shell expand it"))
    return tuple(
        Finding("syntax", "error", "", f"cannot be read: {message}", *document.position(offset), hint)
        for offset, message, hint in causes
    )


def find_causes(text: str) -> list[tuple[int, str, str]]:
    """(offset, what stands in place of a config, what to do) of each usual cause, the first few of many."""
    if text.startswith("version https://git-lfs"):
        return [(0, "this is a Git LFS pointer, not the config", "fetch the file itself: git lfs pull")]
    if "\n" not in text.strip() and re.fullmatch(r"[\w./~-]+\.json", text.strip()):
        return [(0, "the file holds the path of a config, not a config", f"check {text.strip()}")]
    fences = islice(_FENCE.finditer(text), _FEW)
    what, hint = "a Markdown fence (```) stands in the file", "remove the lines with ```"
    return [(found.start(1), what, hint) for found in fences] + _few(
        text, _TAG, "the template tag", "render the template"
    )


def _few(text: str, pattern: re.Pattern[str], what: str, to_do: str) -> list[tuple[int, str, str]]:
    return [
        (found.start(), f"{what} {found.group()} was never filled in", f"{to_do}, and check what comes out")
        for found in islice(pattern.finditer(text), _FEW)
    ]


def check_syntax(checker: Checker) -> None:
    """Duplicate keys, texts without quotes, placeholders, and what strict JSON would refuse."""
    for path in checker.document.duplicates:
        checker.report(
            "duplicate-key",
            "error",
            path,
            "is written twice, which DeepSpeed refuses (and JSON takes the last)",
            "keep one of them",
        )
    for path, word in checker.document.unquoted.items():
        _check_bare_word(checker, path, word)
    _check_placeholders(checker, (), checker.config)
    _check_strictness(checker)


def _check_bare_word(checker: Checker, path: KeyPath, word: str) -> None:
    if _is_placeholder(word, bare=True):
        return  # said by _check_placeholders
    plain = word.rstrip(",").strip()
    message = f"{word!r} has no quotes, so hjson reads the rest of the line as the text {word!r}"
    if plain.lower() in _WORDS:
        value = _WORDS[plain.lower()]
        shown = {True: "true", False: "false", None: "null"}[value]
        checker.report(
            "bare-word",
            "error",
            path,
            message,
            f"write {shown}",
            fix=f"write {shown}",
            edits=(Edit("set", path, value),),
        )
    elif word.endswith(","):
        checker.report("bare-word", "error", path, message, f'write "{plain}" in quotes')
    else:
        checker.report("bare-word", "warning", path, message, f'write "{plain}" in quotes')


def _check_placeholders(checker: Checker, path: KeyPath, value: Any) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _check_placeholders(checker, (*path, name), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_placeholders(checker, (*path, index), item)
    elif isinstance(value, str) and _is_placeholder(value, bare=path in checker.document.unquoted):
        checker.report(
            "placeholder",
            "error",
            path,
            f"{value.rstrip(',')!r} was never filled in",
            "render the template or let the shell expand it, and check what comes out",
        )


def _is_placeholder(text: str, *, bare: bool) -> bool:
    return bool(_PLACEHOLDER.search(text) or (bare and _CAPITALS.match(text)))


def _check_strictness(checker: Checker) -> None:
    """What DeepSpeed forgives and json.load does not: once for each kind, at its first place."""
    strict = checker.target.reader != "raw"
    seen: set[str] = set()
    for deviation in checker.document.deviations:
        kind = deviation.kind + (deviation.text if deviation.kind == "comma" else "")
        if kind in seen:
            continue
        seen.add(kind)
        what = _DEVIATIONS.get(deviation.kind) or f"a comma {deviation.text}"
        line, column = checker.document.position(deviation.offset)
        who = "the Hugging Face Trainer and accelerate read strict JSON and"
        verb = "refuse the file" if strict else "would refuse the file; DeepSpeed itself accepts it"
        checker.findings.append(
            Finding(
                "strict-json",
                "error" if strict else "info",
                "",
                f"{what}: {who} {verb}",
                line,
                column,
                "write plain JSON",
                "write plain JSON",
                (Edit("set", ()),),
            )
        )
