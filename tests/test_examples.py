"""The example's data: held-out questions are new wordings of facts that the training data states."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "quickstart"
Pair = tuple[str, str]


def read(name: str) -> list[Pair]:
    """(question, answer) of each line; fails on any other shape."""
    pairs = []
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert list(record) == ["messages"]
        question, answer = record["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        pairs.append((question["content"], answer["content"]))
    return pairs


@pytest.fixture(scope="module")
def train() -> list[Pair]:
    return read("train.jsonl")


@pytest.fixture(scope="module")
def heldout() -> list[Pair]:
    return read("heldout.jsonl")


def test_no_question_stands_twice(train: list[Pair], heldout: list[Pair]) -> None:
    questions = Counter(question.casefold().strip(" ?.") for question, _ in [*train, *heldout])
    assert [question for question, count in questions.items() if count > 1] == []


def test_every_fact_is_trained_and_held_out(train: list[Pair], heldout: list[Pair]) -> None:
    trained = Counter(answer for _, answer in train)
    held_out = Counter(answer for _, answer in heldout)
    assert trained.keys() == held_out.keys()
    assert min(trained.values()) >= 6
    assert set(held_out.values()) <= {1, 2}


def test_answers_are_short_sentences(train: list[Pair]) -> None:
    for _, answer in train:
        assert len(answer) <= 90
        assert answer.endswith((".", '"')) and "\n" not in answer
