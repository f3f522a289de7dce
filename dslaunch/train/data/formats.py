"""The common shapes of SFT records, made into one of two things: a conversation or a text.

| format              | columns                                                        |
|---------------------|----------------------------------------------------------------|
| messages            | messages [, tools]                                             |
| conversations       | conversations [, system] [, tools]: from/value or role/content |
| instruction         | instruction, output [, input] [, system] [, history]           |
| prompt_completion   | prompt, completion: both texts or both message lists [, tools] |
| text                | text                                                           |

``auto`` takes the first of these, in this order, whose columns a record has. For
``tools`` there may be ``functions``, as OpenAI's older records have it. Other
columns (ids, scores) are let be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.messages import parse_messages, parse_tools
from dslaunch.train.data.records import Record

Format = Literal["messages", "conversations", "instruction", "prompt_completion", "text"]

FORMATS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}

# What columns are called in other data, in lower case.
_ANSWER = ("answer", "response", "output", "target", "completion", "chosen", "label", "reply")
_QUESTION = ("question", "query", "input", "prompt", "instruction", "source")
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("message", "dialog", "dialogue", "chat", "turns"),
    "conversations": ("conversation",),
    "instruction": _QUESTION,
    "output": _ANSWER,
    "prompt": _QUESTION,
    "completion": _ANSWER,
    "text": ("content", "document", "body"),
}

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}


@dataclass(frozen=True)
class Conversation:
    """Chat messages in the chat template's terms.

    ``trained`` [len(messages)] is True for the messages whose text is learned;
    only assistant messages that say something can be. ``plain`` is what to train on where the
    tokenizer has no chat template: (prompt, completion), or None where the
    messages make sense only through a template.
    """

    messages: tuple[Mapping[str, Any], ...]
    trained: tuple[bool, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    plain: tuple[str, str] | None = None


@dataclass(frozen=True)
class TextSample:
    """A text of which every token is learned."""

    text: str


def parse_record(
    record: Record, wanted: Format | Literal["auto"] = "auto"
) -> tuple[Format, Conversation | TextSample]:
    """Make a record into what it is trained as, and the name of the format it has.

    Raises ConfigError, with the record's place, when it has no known shape or not
    the ``wanted`` one, or when a value in it has the wrong type.
    """
    if record.error is not None:
        raise record.error
    value = record.value
    if not isinstance(value, dict):
        raise ConfigError(f"{record.where}: a record must be a JSON object, found {_kind(value)}")
    name = _detect(value, record.where) if wanted == "auto" else wanted
    missing = [column for column in FORMATS[name] if value.get(column) is None]
    if missing:
        raise ConfigError(
            f"{record.where}: a record of format {name} without {' and '.join(missing)}; "
            f"it has {_columns(value)}",
            hint=f"format {name} needs {' and '.join(FORMATS[name])}; set format to what the data is",
        )
    return name, _PARSERS[name](value, record.where)


def _detect(value: Mapping[str, Any], where: str) -> Format:
    for name, columns in FORMATS.items():
        if all(value.get(column) is not None for column in columns):
            return name
    for name, columns in FORMATS.items():
        if any(value.get(column) is not None for column in columns):
            raise _incomplete(value, name, where)
    raise ConfigError(f"{where}: no known record format; it has {_columns(value)}", hint=_format_hint(value))


def _incomplete(value: Mapping[str, Any], name: Format, where: str) -> ConfigError:
    """The error for a record with some of the columns of the format ``name``, but not all."""
    there = [column for column in FORMATS[name] if value.get(column) is not None]
    missing = [column for column in FORMATS[name] if column not in there]
    null = [column for column in missing if column in value]
    lacks = f"{' and '.join(null)} null" if null else f"no {' and '.join(missing)}"
    renamed = _renames(value, missing)
    return ConfigError(
        f"{where}: a record with {' and '.join(there)} (format {name}) has {lacks}; it has {_columns(value)}",
        hint=f"rename {renamed}" if renamed else f"add {' and '.join(missing)}, or leave the record out",
    )


def _format_hint(value: Mapping[str, Any]) -> str:
    for columns in FORMATS.values():
        if renamed := _renames(value, columns):
            return f"rename {renamed}"
    known = "; ".join(f"{name} ({' + '.join(columns)})" for name, columns in FORMATS.items())
    return f"known formats: {known}"


def _renames(value: Mapping[str, Any], missing: Sequence[str]) -> str | None:
    """Which columns of ``value`` are most likely the ``missing`` ones; None where not all can be found."""
    pairs = []
    for column in missing:
        names = (column, *_OTHER_NAMES[column])
        taken = [name for name, _ in pairs]
        found = (key for key in value if isinstance(key, str) and key.lower() in names and key not in taken)
        if (name := next(found, None)) is None or name == column:
            return None
        pairs.append((name, column))
    return " and ".join(f"{name} to {column}" for name, column in pairs)


def _parse_messages(value: Mapping[str, Any], where: str) -> Conversation:
    messages, trained = parse_messages(value["messages"], f"{where}: messages")
    return Conversation(messages, trained, parse_tools(value, where))


def _parse_conversations(value: Mapping[str, Any], where: str) -> Conversation:
    turns = value["conversations"]
    if not isinstance(turns, list):
        raise ConfigError(f"{where}: conversations must be a list, found {_kind(turns)}")
    raw = [_translate_turn(turn, f"{where}: conversations[{i}]") for i, turn in enumerate(turns)]
    system = _optional_text(value, "system", where)
    if system:
        raw.insert(0, {"role": "system", "content": system})
    messages, trained = parse_messages(raw, f"{where}: conversations")
    return Conversation(messages, trained, parse_tools(value, where))


def _translate_turn(turn: Any, where: str) -> Any:
    """One from/value turn as a role/content message; role/content turns pass as they are."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker = turn["from"]
    role = _SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise ConfigError(f"{where}: unknown speaker {speaker!r}", hint=f"known: {', '.join(_SPEAKERS)}")
    others = {key: item for key, item in turn.items() if key not in ("from", "value")}
    if role != "function_call":
        return {"role": role, "content": turn.get("value"), **others}
    try:
        call = json.loads(turn.get("value") or "")
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: the value of a function_call must be a JSON object") from None
    calls = call if isinstance(call, list) else [call]
    return {"role": "assistant", "content": "", "tool_calls": calls, **others}


def _parse_instruction(value: Mapping[str, Any], where: str) -> Conversation:
    instruction, output = _text(value, "instruction", where), _text(value, "output", where)
    context, system = _optional_text(value, "input", where), _optional_text(value, "system", where)
    prompt = "\n\n".join(part for part in (instruction, context) if part)
    if not prompt:
        raise ConfigError(f"{where}: instruction and input are both empty")
    raw = [{"role": "system", "content": system}] if system else []
    history = _parse_history(value.get("history"), where)
    raw += [*history, {"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
    messages, trained = parse_messages(raw, where)
    plain = None if history else ("\n\n".join([*filter(None, [system]), prompt, ""]), output)
    return Conversation(messages, trained, plain=plain)


def _parse_history(history: Any, where: str) -> list[dict[str, Any]]:
    """Earlier (question, answer) pairs as messages, oldest first."""
    messages: list[dict[str, Any]] = []
    for turn in history or []:
        if not (isinstance(turn, (list, tuple)) and len(turn) == 2 and all(isinstance(t, str) for t in turn)):
            raise ConfigError(f"{where}: history must be a list of [question, answer] pairs of texts")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return messages


def _parse_prompt_completion(value: Mapping[str, Any], where: str) -> Conversation:
    prompt, completion = value["prompt"], value["completion"]
    tools = parse_tools(value, where)
    if isinstance(prompt, str) and isinstance(completion, str):
        raw = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        messages, trained = parse_messages(raw, where)
        return Conversation(messages, trained, tools, plain=(prompt, completion))
    if isinstance(prompt, list) and isinstance(completion, list):
        before, _ = parse_messages(prompt, f"{where}: prompt")
        after, trained = parse_messages(completion, f"{where}: completion")
        return Conversation(before + after, (False,) * len(before) + trained, tools)
    raise ConfigError(
        f"{where}: prompt is {_kind(prompt)} and completion is {_kind(completion)}",
        hint="make both texts, or both lists of messages",
    )


def _parse_text(value: Mapping[str, Any], where: str) -> TextSample:
    text = _text(value, "text", where)
    if not text:
        raise ConfigError(f"{where}: text is empty")
    return TextSample(text)


_PARSERS: dict[Format, Callable[[Mapping[str, Any], str], Conversation | TextSample]] = {
    "messages": _parse_messages,
    "conversations": _parse_conversations,
    "instruction": _parse_instruction,
    "prompt_completion": _parse_prompt_completion,
    "text": _parse_text,
}


def _text(value: Mapping[str, Any], column: str, where: str) -> str:
    text = value[column]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {column} must be a text, found {_kind(text)}")
    return text


def _optional_text(value: Mapping[str, Any], column: str, where: str) -> str:
    return "" if value.get(column) is None else _text(value, column, where)


def _columns(value: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in list(value)[:20]) or "no columns"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
