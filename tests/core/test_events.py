"""JSON lines that several processes append to."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.core.events import JsonlWriter, parse_line, read_lines, to_jsonable, utc_now


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_time_is_utc_with_z() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", utc_now())


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for kind in ("first", "second"):
        writer = JsonlWriter(path)
        writer.write(kind, text="two\nlines", rank=1)
        writer.close()
    assert [(line["kind"], line["text"], line["rank"]) for line in lines(path)] == [
        ("first", "two\nlines", 1),
        ("second", "two\nlines", 1),
    ]


def test_what_json_has_no_word_for_becomes_text() -> None:
    value = {"a": [float("nan"), (float("inf"), -float("inf"))], "b": {"c": 1.5}}
    assert to_jsonable(value) == {"a": ["nan", ["inf", "-inf"]], "b": {"c": 1.5}}


@pytest.mark.parametrize("line", ['{"kind": "tor', "[1]", "3", "null", "", "[" * 100_000, b'{"a": "\xff"}'])
def test_a_line_that_is_no_object_is_none(line: str | bytes) -> None:
    assert parse_line(line) is None


def test_lines_are_read_around_what_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n\n[2]\n{"b": "\xff"}\n{"c": "\xe2\x80\xa8"}\n{"d": 4}\n{"e"')
    assert list(read_lines(path)) == [{"a": 1}, {"b": "\ufffd"}, {"c": "\u2028"}, {"d": 4}]
    with pytest.raises(FileNotFoundError):
        list(read_lines(tmp_path / "none"))


def test_processes_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from dslaunch.core.events import JsonlWriter\n"
        "writer = JsonlWriter(Path(sys.argv[1]))\n"
        "for i in range(300): writer.write('x', who=sys.argv[2], i=i, fill='y' * 3000)\n"
    )
    argv = [sys.executable, "-c", code, str(path)]
    writers = [subprocess.Popen([*argv, str(who)]) for who in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = lines(path)
    assert len(found) == 900
    for who in "012":
        assert [line["i"] for line in found if line["who"] == who] == list(range(300))
