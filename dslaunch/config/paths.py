"""Whether a text that names no existing path can be meant as a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dslaunch.config.facts import Facts, PathFact, is_hub_key, looks_like_path, written_paths
from dslaunch.config.report import Report
from dslaunch.core.data_files import describe_data_suffixes, is_data_file
from dslaunch.core.model_path import is_gguf

# How alike (difflib's ratio) a name and an existing one are where it can only be a typing mistake.
_NEAR_MISS = 0.8


def check_written_paths(report: Report, facts: Facts) -> None:
    """Record the paths of the spec that are not there, where only the DeepSpeed JSON is wanted."""
    for key, text in written_paths(report.loaded.spec):
        fact = facts.paths[key]
        if is_hub_key(key) and fact.kind == "missing":
            check_hub_id(key, text, fact, report, aloud=False)
        elif is_hub_key(key):
            check_data_file(key, text, fact, report)
        elif key == "model.chat_template" and fact.kind != "file":
            fail_missing(key, f"file {text}", fact, report)


def check_hub_id(key: str, text: str, fact: PathFact, report: Report, *, aloud: bool = True) -> None:
    """Record a problem where ``text``, which is not there, can only be a path or is a typing mistake.

    What is taken for a hub id gives a note, ``aloud=False``: only where that is doubtful.
    """
    if fact.fault is not None and fact.nearest is None:
        check_data_file(key, text, fact, report)
        return
    where = report.loaded.where(key)
    doubt = doubt_hub_id(text, fact)
    if doubt == "path":
        fail_missing(key, text, fact, report)
    elif doubt == "mistyped":
        message = f"{key}: there is no {text} here, but there is {fact.nearest}"
        hint = f"write that name; for a model or dataset of the hub write its owner too: owner/{text}"
        report.fail(key, message, hint)
    elif doubt == "like":
        report.note(f"{where}{key}: {text} is taken for a hub id; there is also {fact.nearest}")
    elif aloud or ("/" not in text and key.startswith("data.")):  # a mistyped directory looks the same
        report.note(f"{where}{key}: there is no {text} here; it is taken for a hub id")


def doubt_hub_id(text: str, fact: PathFact) -> Literal["path", "mistyped", "like"] | None:
    """Why ``text``, which is not there, may not be meant as a hub id: it can only be a path, it is a
    mistyped name of what is there, or it is somewhat like one. None: nothing speaks against it.
    """
    if looks_like_path(text) or is_gguf(text) or fact.parent_exists:
        return "path"
    if fact.nearest is None:
        return None
    near = "/" not in text and _likeness(text, Path(fact.nearest).name) >= _NEAR_MISS
    return "mistyped" if near else "like"


def check_data_file(key: str, text: str, fact: PathFact, report: Report) -> None:
    """Record a problem where the file or directory ``text`` cannot be read as data."""
    if fact.fault is None:
        return
    hint = None
    if fact.kind != "directory" and not is_data_file(text):
        shape = f"{key.removesuffix('.path')}.format"
        hint = (
            f"write it as {describe_data_suffixes()}; {shape} names the keys of its records, not its ending"
        )
    report.fail(key, f"{key}: {text} {fact.fault}", hint)


def fail_missing(key: str, what: str, fact: PathFact, report: Report) -> None:
    """Record that ``what`` is not where the spec says, with the nearest name in the hint."""
    hint = f"did you mean {fact.nearest}?" if fact.nearest else f"looked for {fact.absolute}"
    report.fail(key, f"{key}: there is no {what}", hint)


def _likeness(one: str, other: str) -> float:
    import difflib

    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()
