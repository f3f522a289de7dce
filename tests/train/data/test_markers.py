"""Markers of a chat template that the tokenizer cuts into pieces are told, with what to do."""

from __future__ import annotations

import pytest

from dslaunch.train.data.markers import marker_warning, split_markers
from dslaunch.train.data.report import DataReport, SourceReport
from tests.support.tiny import CHAT_TEMPLATE, make_tiny_tokenizer

GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<s>[INST] <<SYS>>{{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
THINKING = CHAT_TEMPLATE + "<think>\n"
OTHER = CHAT_TEMPLATE.replace("im_", "turn_")
ALWAYS_RAISES = "{{ raise_exception('no') }}<|who|>"


def report(*formats: str) -> DataReport:
    source = SourceReport(
        "d.jsonl", "train", 3, 3, 0, 0, 0, 9, 9, 0, formats=dict.fromkeys(formats, 3), dropped_where=()
    )
    return DataReport((source,), (3,))


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        (CHAT_TEMPLATE, []),
        (THINKING, []),
        (OTHER, ["<|turn_start|>", "<|turn_end|>"]),
        (GEMMA, ["<start_of_turn>", "<end_of_turn>"]),
        (LLAMA_2, ["</s>"]),
        (ALWAYS_RAISES, ["<|who|>"]),
    ],
)
def test_markers_that_are_no_tokens(template: str, markers: list[str]) -> None:
    tokenizer = make_tiny_tokenizer(chat_template=template)
    split = split_markers(tokenizer)
    assert list(split) == markers
    assert all(count == len(tokenizer.encode(marker)) > 1 for marker, count in split.items())


def test_they_are_told_with_what_to_do_and_are_gone_when_it_was_done() -> None:
    tokenizer = make_tiny_tokenizer(chat_template=OTHER)
    said = marker_warning(report("messages"), tokenizer)
    assert said is not None
    assert 'model.new_tokens: ["<|turn_start|>", "<|turn_end|>"]' in said
    tokenizer.add_tokens(["<|turn_start|>", "<|turn_end|>"], special_tokens=True)
    assert marker_warning(report("messages"), tokenizer) is None


def test_plain_text_is_not_rendered() -> None:
    assert marker_warning(report("text"), make_tiny_tokenizer(chat_template=OTHER)) is None
    assert marker_warning(report("text", "messages"), make_tiny_tokenizer(chat_template=None)) is None
