"""Our reader and the hjson library give the same value, or both refuse; positions are right."""

from __future__ import annotations

import random
from typing import Any

import hjson
import pytest

from dslaunch.config.hjson_reader import HjsonError, read_hjson

TEXTS = [
    "",
    "{}",
    "[]",
    "[1, 2,]",
    "\ufeff{}",
    '{"a": 1}',
    '{"a": 1,}',
    '{"a": 1 "b": 2}',
    '{"a": 1\n"b": 2}',
    '{"a": True,\n"b": 2}',
    '{"a": True}',
    '{"a": True\n}',
    '{"a": true, "b": false, "c": null}',
    '{"a": true # yes\n}',
    '{"a": x // yes\n}',
    '{"a": 5e8, "b": 1e-5, "c": 1e10, "d": 0.1, "e": -3, "f": 01, "g": 1.}',
    '{"a": 5e8\n}',
    '{"a": 5 /* five */, "b": 6}',
    "{'a': 'it''s'}",
    "{'a': 'x\"y'}",
    "{a: b\nc: d}",
    "{a: $VAR,\n b: {{ x }}\n}",
    "a: 1\nb: {c: [1 2 3]}",
    "a b: 1",
    "just text",
    "12",
    '"text"',
    '{"a": {"b": {"c": [1, {"d": 2}]}}}',
    '{"a": 1}\n```',
    "```json\n{}\n```",
    "# only a remark",
    "{ // one\n/* two */ # three\n}",
    '{"a": "\\u00e9\\ud83d\\ude00\\n"}',
    '{"a": "\\x"}',
    '{"a": "x\ny"}',
    '{"a": "x',
    '{"a": [1, 2',
    '{"a": 1',
    '{"a"}',
    '{"a": }',
    '{"a": ,}',
    "{: 1}",
    '{"": 1}',
    "{,}",
    '{"a": 1,, "b": 2}',
    "{\n  a:\n    '''\n    one\n      two\n    '''\n}",
    "{\na: '''one'''}",
    "{a: ''}",
    '{"a": NaN, "b": -Infinity}',
    '{"a": nulls\n}',
    '{"a": 1.5e3}',
    '{"a": ./ds}',
    "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n",
    "configs/zero2.json",
    '{"a": 1e400}',
]


def outcome(read: Any, text: str) -> Any:
    """What a reader makes of a text. IndexError and OverflowError are ways in which hjson refuses, too."""
    try:
        value = read(text)
    except (HjsonError, hjson.HjsonDecodeError, IndexError, OverflowError):
        return "refused"
    return value


def theirs(text: str) -> Any:
    return hjson.loads(text, object_pairs_hook=dict)


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_as_hjson(text: str) -> None:
    ours = outcome(lambda t: read_hjson(t).value, text)
    expected = outcome(theirs, text)
    assert ours == expected
    assert repr(ours) == repr(expected), "5 and 5.0 are different to DeepSpeed"


def test_the_same_as_hjson_on_damaged_configs() -> None:
    """A config with characters dropped, doubled and swapped, 1500 times, the same each run."""
    base = '{\n  "a": {"b": true, c: 1e3 # r\n},\n  \'d\': [1, "x", false],\n  "e": True,\n}\n'
    rng = random.Random(7)
    refused = 0
    for _ in range(1500):
        text = list(base)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text[at : at + 1] = rng.choice(["", text[at] * 2, rng.choice("{}[],:\"'#\n e1/*")])
        damaged = "".join(text)
        expected = outcome(theirs, damaged)
        refused += expected == "refused"
        assert repr(outcome(lambda t: read_hjson(t).value, damaged)) == repr(expected), damaged
    assert 100 < refused < 1400


def test_positions_are_lines_and_columns() -> None:
    document = read_hjson('{\n  "fp16": {\n    "enabled": true\n  }, "x": [1]\n}')
    assert document.place(("fp16", "enabled")) == (3, 5)
    assert document.place(("x",)) == (4, 6)
    assert document.place(("fp16", "missing")) == (2, 3)
    assert document.place(()) is None


def test_windows_line_ends_are_line_ends() -> None:
    document = read_hjson('{\r\n  "a": x\r\n}')
    assert document.value == {"a": "x"}
    assert document.place(("a",)) == (2, 3)


def test_deviations_say_what_json_would_refuse() -> None:
    def kinds(text: str) -> list[str]:
        return [deviation.kind for deviation in read_hjson(text).deviations]

    assert kinds('{"a": [1, {"b": "x"}]}') == []
    assert kinds('{"a": 1,}') == ["comma"]
    assert kinds('{"a": 1\n"b": 2}') == ["comma"]
    assert kinds("{'a': 1}") == ["quotes"]
    assert kinds('{"a": True\n}') == ["string"]
    assert kinds('{"a": 1 // x\n}') == ["comment"]
    assert kinds("\ufeff{}") == ["bom"]
    assert kinds('"a": 1') == ["braces"]


def test_a_key_written_twice_is_kept() -> None:
    document = read_hjson('{"a": {"b": 1, "b": 2}}')
    assert document.duplicates == [("a", "b")]
    assert document.value == {"a": {"b": 2}}
