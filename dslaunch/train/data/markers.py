"""Markers of a chat template that are no tokens of the tokenizer: it cuts them into pieces."""

from __future__ import annotations

import re
from typing import Any

from dslaunch.train.data.report import DataReport

# What chat models have as single tokens. Not [INST] and <<SYS>>, which Llama 2 writes as plain text,
# nor <think> and <tool_call>, which many models spell.
_MARKER = re.compile(
    r"<[|｜][^<>|｜\s{}]{1,40}[|｜]>|</?(?:s|bos|eos|sop)>|<(?:start|end)_of_[a-z_]{1,20}>|<[a-z]{1,10}_(?:start|end)>"
)
_TURNS = [
    {"role": "system", "content": "c"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "c"},
]


def split_markers(tokenizer: Any) -> dict[str, int]:
    """Marker -> number of tokens, of each marker around a conversation's turns that is not one token."""
    found: dict[str, int] = {}
    for marker in _MARKER.findall(_frame(tokenizer)):
        count = len(tokenizer.encode(marker, add_special_tokens=False))
        if count > 1:
            found[marker] = count
    return found


def marker_warning(report: DataReport, tokenizer: Any) -> str | None:
    """A line about split markers, where conversations were rendered with the template; else None."""
    chats = any(name != "text" for source in report.sources for name in source.formats)
    if not chats or not tokenizer.chat_template or not (split := split_markers(tokenizer)):
        return None
    pieces = ", ".join(f"{marker} into {count}" for marker, count in split.items())
    names = ", ".join(f'"{marker}"' for marker in split)
    return (
        f"the chat template writes markers that the tokenizer cuts into pieces ({pieces}): the model learns"
        " to spell them, and only EOS after the last answer stops it. Make them tokens"
        f" (model.new_tokens: [{names}]), or give the template that the model was trained with"
        " (model.chat_template)"
    )


def _frame(tokenizer: Any) -> str:
    """A conversation as the template writes it; the template itself where it refuses this one."""
    for turns in (_TURNS, _TURNS[1:]):
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template is a program of the user's: it may raise anything
            continue
        return str(text)
    return str(tokenizer.chat_template)
