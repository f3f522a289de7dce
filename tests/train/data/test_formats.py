"""Every record shape becomes the same few things, and what is wrong in one is named with its place."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.formats import Conversation, TextSample, parse_record
from dslaunch.train.data.records import Record

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def parse(value: Any, wanted: Any = "auto") -> Any:
    return parse_record(Record("d.jsonl:7", value), wanted)[1]


def said(chat: Conversation) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in chat.messages]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"messages": [QUESTION, ANSWER]}, [("user", "q"), ("assistant", "a")]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [("user", "q"), ("assistant", "a")],
        ),
        ({"conversations": [QUESTION, ANSWER]}, [("user", "q"), ("assistant", "a")]),
        (
            {
                "system": "s",
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            },
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        ({"instruction": "do", "input": "x", "output": "y"}, [("user", "do\n\nx"), ("assistant", "y")]),
        ({"instruction": "do", "input": "", "output": "y"}, [("user", "do"), ("assistant", "y")]),
        ({"instruction": "do", "input": None, "output": "y"}, [("user", "do"), ("assistant", "y")]),
        (
            {"instruction": "3", "output": "y", "system": "s", "history": [["1", "2"]]},
            [("system", "s"), ("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "y")],
        ),
        ({"prompt": "p", "completion": "c", "id": 3}, [("user", "p"), ("assistant", "c")]),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, [("user", "q"), ("assistant", "a")]),
    ],
)
def test_common_shapes_become_messages(value: Any, expected: list[tuple[str, str]]) -> None:
    assert said(parse(value)) == expected


def test_text() -> None:
    assert parse({"text": "once"}) == TextSample("once")


def test_auto_prefers_the_more_specific_format_and_names_it() -> None:
    value = {"text": "t", "prompt": "p", "messages": [QUESTION, ANSWER]}
    assert parse_record(Record("x", value))[0] == "messages"
    assert parse_record(Record("x", value), "text") == ("text", TextSample("t"))


def test_only_the_completion_of_message_lists_is_trained() -> None:
    chat = parse({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]})
    assert chat.trained == (False, False, False, True)


def test_weight_zero_takes_an_answer_out_and_leaves_the_message() -> None:
    chat = parse({"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, {**ANSWER, "weight": 1}]})
    assert chat.trained == (False, False, False, True)
    assert len(chat.messages) == 4 and all("weight" not in message for message in chat.messages)


def test_a_format_without_template_keeps_the_plain_text() -> None:
    assert parse({"prompt": "2+2=", "completion": "4"}).plain == ("2+2=", "4")
    assert parse({"instruction": "do", "input": "x", "output": "y"}).plain == ("do\n\nx\n\n", "y")
    assert parse({"messages": [QUESTION, ANSWER]}).plain is None


def test_tool_calls_keep_exactly_their_arguments() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": None, "b": 1}}},
        {"function": {"name": "g", "arguments": '{"c": "d"}'}},
        {"name": "h", "arguments": {}},
    ]
    chat = parse({"messages": [QUESTION, {"role": "assistant", "tool_calls": calls}], "tools": "[]"})
    assert chat.messages[1]["content"] == ""
    assert chat.messages[1]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": None, "b": 1}}},
        {"type": "function", "function": {"name": "g", "arguments": {"c": "d"}}},
        {"type": "function", "function": {"name": "h", "arguments": {}}},
    ]


def test_sharegpt_function_calls_and_tools_as_text() -> None:
    chat = parse(
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": "a"},
            ],
            "tools": '[{"name": "f"}]',
        }
    )
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert chat.tools == ({"name": "f"},)
    assert chat.trained == (False, True, False, True)


def test_openais_older_functions_are_tool_calls() -> None:
    call = {"name": "f", "arguments": '{"a": 1}'}
    chat = parse(
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "content": "", "function_call": call},
                {"role": "function", "name": "f", "content": "1"},
                ANSWER,
            ],
            "functions": [{"name": "f"}],
        }
    )
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert chat.messages[2] == {"role": "tool", "name": "f", "content": "1"}
    assert chat.trained == (False, True, False, True)
    assert chat.tools == ({"type": "function", "function": {"name": "f"}},)
    without_content = {"role": "assistant", "content": None, "function_call": call}
    assert parse({"messages": [QUESTION, without_content]}).trained == (False, True)


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [QUESTION, {"role": "assistant", "content": ""}]},
        {"messages": [QUESTION, {"role": "assistant", "content": " \n"}]},
        {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [], "function_call": {}}]},
        {"messages": [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": ""}]}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]},
        {"instruction": "do", "output": ""},
        {"prompt": "p", "completion": ""},
        {"prompt": [QUESTION], "completion": [{"role": "assistant", "content": ""}]},
    ],
)
def test_an_empty_answer_is_not_trained(value: Any) -> None:
    assert not any(parse(value).trained)


def test_an_empty_answer_leaves_the_others_trained() -> None:
    chat = parse({"messages": [QUESTION, {**ANSWER, "content": ""}, QUESTION, ANSWER]})
    assert chat.trained == (False, False, False, True)
    thought = {"role": "assistant", "content": "", "reasoning_content": "why"}
    assert parse({"messages": [QUESTION, thought]}).trained == (False, True)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse({"messages": [{"role": "user", "content": parts}, ANSWER]}).messages[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1], "d.jsonl:7: a record must be a JSON object, found a list"),
        ({"chosen": "a", "rejected": "b"}, "d.jsonl:7: no known record format; it has 'chosen', 'rejected'"),
        (
            {"prompt": "a"},
            "d.jsonl:7: a record with prompt (format prompt_completion) has no completion; it has 'prompt'",
        ),
        (
            {"prompt": "a", "completion": None},
            "d.jsonl:7: a record with prompt (format prompt_completion) has completion null;"
            " it has 'prompt', 'completion'",
        ),
        (
            {"messages": [{"from": "gpt", "value": "a"}]},
            "d.jsonl:7: messages[0]: a message has role and content; this one has from and value",
        ),
        ({"messages": [{"content": "a"}]}, "d.jsonl:7: messages[0]: a message needs a role"),
        ({"messages": []}, "d.jsonl:7: messages must be a list of at least one message"),
        ({"messages": ["hi"]}, "d.jsonl:7: messages[0]: a message must be an object with role and content"),
        (
            {"messages": [{"role": "asistant", "content": "a"}]},
            "d.jsonl:7: messages[0]: unknown role 'asistant'",
        ),
        ({"messages": [{"role": "user"}]}, "d.jsonl:7: messages[0]: a message needs content; it has role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "d.jsonl:7: messages[0]: content has a part of type 'image'; only text can be trained on",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "d.jsonl:7: messages[0]: weight must be 0 or 1, found 0.5",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}]},
            "d.jsonl:7: messages[0]: only an assistant message can have tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "d.jsonl:7: messages[0].tool_calls[0]: arguments is a text, but not JSON",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "function_call": {"name": "f"}}]},
            "d.jsonl:7: messages[0]: only an assistant message can have tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]},
            "d.jsonl:7: messages[0].function_call: arguments is a text, but not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": "auto"}]},
            "d.jsonl:7: messages[0].function_call: a tool call needs a function with a name",
        ),
        (
            {"messages": [{**ANSWER, "function_call": {"name": "f"}, "tool_calls": [{"name": "f"}]}]},
            "d.jsonl:7: messages[0]: a message has both tool_calls and function_call",
        ),
        (
            {"messages": [QUESTION], "functions": [{"name": "f"}], "tools": [{"name": "f"}]},
            "d.jsonl:7: a record has both tools and functions",
        ),
        ({"messages": [QUESTION], "functions": "f()"}, "d.jsonl:7: functions is a text, but not JSON"),
        ({"prompt": "p", "completion": 3}, "d.jsonl:7: prompt is a text and completion is a number"),
        ({"instruction": "", "input": "", "output": "x"}, "d.jsonl:7: instruction and input are both empty"),
        ({"instruction": "a", "output": "x", "history": [["q"]]}, "d.jsonl:7: history must be a list of"),
        ({"text": ""}, "d.jsonl:7: text is empty"),
        ({"text": 3}, "d.jsonl:7: text must be a text, found a number"),
        (
            {"conversations": [{"from": "bot", "value": "x"}]},
            "d.jsonl:7: conversations[0]: unknown speaker 'bot'",
        ),
        ({"messages": [QUESTION], "tools": "{"}, "d.jsonl:7: tools is a text, but not JSON"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(value)
    assert caught.value.message.startswith(problem)


def test_a_record_that_is_not_of_the_format_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=r"d\.jsonl:7: a record of format prompt_completion without completion"
    ):
        parse({"prompt": "p"}, "prompt_completion")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ({"prompt": "a"}, "add completion, or leave the record out"),
        ({"prompt": "a", "answer": "b"}, "rename answer to completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "rename chosen to completion"),
        ({"Instruction": "a", "Response": "b"}, "rename Instruction to instruction and Response to output"),
        ({"question": "a", "answer": "b"}, "rename question to instruction and answer to output"),
        ({"input": "a", "output": "b"}, "rename input to instruction"),
        ({"dialogue": []}, "rename dialogue to messages"),
        ({"content": "a"}, "rename content to text"),
        ({"foo": 1}, "known formats: messages (messages); "),
    ],
)
def test_the_hint_says_which_column_is_called_otherwise(value: Any, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(value)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    "value",
    [{"question": "a", "answer": "b"}, {"input": "a", "output": "b"}, {"dialogue": [QUESTION, ANSWER]}],
)
def test_what_the_hint_says_works(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(value)
    renames = dict(re.findall(r"(\w+) to (\w+)", caught.value.hint or ""))
    assert parse({renames.get(key, key): item for key, item in value.items()})
