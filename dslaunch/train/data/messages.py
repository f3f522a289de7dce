"""Chat messages as data sets hold them, checked and brought to the chat template's terms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dslaunch.core.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
_OLD_ROLES = {"function": "tool"}  # OpenAI's, from before there were tools
_SCHEMAS_HINT = "give a list of objects with a name; rename the column if it is about something else"

Message = dict[str, Any]


def parse_messages(raw: Any, where: str) -> tuple[tuple[Message, ...], tuple[bool, ...]]:
    """Checked messages, and for each whether it is trained.

    Assistant messages are trained unless their ``weight`` is 0 (OpenAI's key) or
    they say nothing: to learn the end of turn alone is to learn to be silent.
    ``content`` comes out as text, also where it was a list of text parts; tool
    calls come out as ``{"type": "function", "function": {"name", "arguments"}}``
    with ``arguments`` an object, also where it was JSON text, as templates
    would encode such a text twice. So does OpenAI's older ``function_call``, and
    the role ``function`` as ``tool``. Other keys of a message pass to the template.

    Raises ConfigError with ``where`` and the index of the bad message.
    """
    if not isinstance(raw, list) or not raw:
        raise ConfigError(f"{where} must be a list of at least one message")
    messages = tuple(_parse_message(message, f"{where}[{i}]") for i, message in enumerate(raw))
    trained = tuple(_is_trained(message, f"{where}[{i}]") for i, message in enumerate(messages))
    for message in messages:
        message.pop("weight", None)
    return messages, trained


def parse_tools(record: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...] | None:
    """The schemas of the ``tools`` column: a list, or that list as JSON text. None where absent or empty.

    OpenAI's older ``functions`` column, bare schemas, is taken as well. Raises
    ConfigError where a column is no list of objects, or a record has both.
    """
    tools = _parse_schemas(record.get("tools"), f"{where}: tools")
    functions = _parse_schemas(record.get("functions"), f"{where}: functions")
    if tools and functions:
        raise ConfigError(f"{where}: a record has both tools and functions; keep one of the columns")
    return tools or tuple({"type": "function", "function": schema} for schema in functions) or None


def _parse_schemas(raw: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(raw, str) and raw.strip():
        try:
            raw = json.loads(raw)
        except ValueError:
            raise ConfigError(f"{where} is a text, but not JSON", hint=_SCHEMAS_HINT) from None
    if not raw:
        return ()
    if not isinstance(raw, list) or not all(isinstance(schema, dict) for schema in raw):
        raise ConfigError(f"{where} must be a list of JSON schemas", hint=_SCHEMAS_HINT)
    return tuple(raw)


def _parse_message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: a message must be an object with role and content")
    message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message and "from" in message:
        raise ConfigError(
            f"{where}: a message has role and content; this one has from and value",
            hint="rename the column messages to conversations, which is what such turns are called",
        )
    role = message["role"] = _parse_role(message.get("role"), where)
    calls = _take_calls(message, where)
    if calls:
        if role != "assistant":
            raise ConfigError(f"{where}: only an assistant message can have tool_calls")
        message["tool_calls"] = calls
    if "content" not in message and not calls:
        raise ConfigError(f"{where}: a message needs content; it has {', '.join(message)}")
    # Many templates join content without asking whether it is there.
    message["content"] = _parse_content(message.get("content", ""), where)
    return message


def _parse_role(role: Any, where: str) -> str:
    if role is None:
        raise ConfigError(f"{where}: a message needs a role", hint=f"roles are {', '.join(ROLES)}")
    role = _OLD_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ConfigError(f"{where}: unknown role {role!r}", hint=f"roles are {', '.join(ROLES)}")
    return str(role)


def _take_calls(message: Message, where: str) -> list[dict[str, Any]]:
    """What a message calls, taken out of it: its ``tool_calls``, or the one ``function_call``."""
    calls, old = message.pop("tool_calls", None), message.pop("function_call", None)
    if calls and old:
        raise ConfigError(f"{where}: a message has both tool_calls and function_call; keep one of them")
    if old:
        return [_parse_tool_call(old, f"{where}.function_call")]
    return _parse_tool_calls(calls, where) if calls else []


def _parse_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{where}: content must be a text or a list of text parts")
    texts = []
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type", "text") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ConfigError(f"{where}: content has a part of type {kind!r}; only text can be trained on")
        texts.append(part["text"])
    return "".join(texts)


def _parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ConfigError(f"{where}: tool_calls must be a list")
    return [_parse_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _parse_tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where}: a tool call needs a function with a name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise ConfigError(f"{where}: arguments is a text, but not JSON") from None
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where}: arguments must be an object")
    around = {} if function is call else {k: v for k, v in call.items() if k not in ("function", "type")}
    return {**around, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _is_trained(message: Mapping[str, Any], where: str) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1) or (weight is True or weight is False):
        raise ConfigError(f"{where}: weight must be 0 or 1, found {weight!r}")
    return bool(message["role"] == "assistant" and weight == 1 and _says_something(message))


def _says_something(message: Mapping[str, Any]) -> bool:
    said = (message["content"], message.get("reasoning_content"))
    return bool(message.get("tool_calls")) or any(isinstance(text, str) and text.strip() for text in said)
