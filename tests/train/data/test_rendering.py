"""What of a rendered chat is trained, for the ways in which real chat templates are written."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.formats import parse_record
from dslaunch.train.data.records import Record
from dslaunch.train.data.rendering import Rendered, Renderer
from tests.support.tiny import CHAT_TEMPLATE, make_tiny_tokenizer

TWO_TURNS = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]

# Each in its own words, each the shape of a family of published templates.
HEADERS = (  # BOS first, header ids around the role, end of turn without newline, content trimmed
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
BRACKETS = (  # no generation prompt at all; EOS after each answer
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
FINAL_EOS = (  # the whole ends with EOS where no generation prompt is wanted: prefixes end differently
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
DROPS_OLD_THOUGHTS = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
MARKED = (  # the mark stops short of the end of turn
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = CHAT_TEMPLATE.replace(
    "%}",
    "%}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
    1,
)
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNPREDICTABLE = (  # what stands before an answer depends on all that is said, the answer too
    "{{ messages | map(attribute='content') | join | length }}" + CHAT_TEMPLATE
)


def render(template: str | None, value: Any, tokenizer: Any = None) -> Rendered:
    tokenizer = tokenizer or make_tiny_tokenizer(chat_template=template)
    return Renderer(tokenizer).render(parse_record(Record("d.jsonl:7", value))[1], "d.jsonl:7")


def answers(template: str | None, value: Any) -> list[str]:
    rendered = render(template, value)
    return [rendered.text[start:end] for start, end in rendered.answers]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, ["a1<|im_end|>", "a2<|im_end|>"]),
        (HEADERS, ["a1<|im_end|>", "a2<|im_end|>"]),
        (BRACKETS, [" a1<|im_end|>", " a2<|im_end|>"]),
        (STRICT, ["a1<|im_end|>", "a2<|im_end|>"]),
        (DROPS_OLD_THOUGHTS, ["a1<|im_end|>", "a2<|im_end|>"]),
        (MARKED, ["a1<|im_end|>", "a2<|im_end|>"]),
        (NO_END, ["a1\n", "a2\n"]),
    ],
)
def test_answers_and_their_end_of_turn(template: str, expected: list[str]) -> None:
    assert answers(template, {"messages": TWO_TURNS}) == expected


def test_a_template_that_ends_the_whole_with_eos() -> None:
    tokenizer = make_tiny_tokenizer(chat_template=FINAL_EOS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|end|>"]})
    rendered = render(None, {"messages": TWO_TURNS}, tokenizer)
    assert [rendered.text[a:b] for a, b in rendered.answers] == ["a1<|end|>", "a2<|end|>\n<|im_end|>"]
    assert not rendered.add_eos


@pytest.mark.parametrize(("template", "add_eos"), [(CHAT_TEMPLATE, False), (NO_END, True)])
def test_eos_is_added_only_where_the_template_writes_no_end(template: str, add_eos: bool) -> None:
    assert render(template, {"messages": TWO_TURNS}).add_eos is add_eos
    assert not render(template, {"messages": TWO_TURNS[:3]}).add_eos  # ends with a question


def test_dropped_thoughts_of_earlier_turns_are_not_trained_and_the_last_are() -> None:
    turns = [dict(turn) for turn in TWO_TURNS]
    turns[1]["content"] = "<think>old</think>\n\na1"
    turns[3]["content"] = "<think>new</think>\n\na2"
    assert answers(DROPS_OLD_THOUGHTS, {"messages": turns}) == [
        "a1<|im_end|>",
        "<think>new</think>\n\na2<|im_end|>",
    ]


def test_only_wanted_answers(tmp_path: Any) -> None:
    value = {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}
    for template in (CHAT_TEMPLATE, MARKED):
        assert answers(template, value) == ["a2<|im_end|>"]


def test_equal_answers_and_answers_inside_questions_are_told_apart() -> None:
    turns = [{"role": role, "content": "same"} for role in ("user", "assistant", "user", "assistant")]
    rendered = render(CHAT_TEMPLATE, {"messages": turns})
    assert [rendered.text[a:b] for a, b in rendered.answers] == ["same<|im_end|>"] * 2
    assert rendered.answers[0][0] == rendered.text.index("assistant\n") + len("assistant\n")


def test_an_answer_that_contains_the_end_of_turn_token() -> None:
    turns = [TWO_TURNS[0], {"role": "assistant", "content": "a<|im_end|>b"}]
    assert answers(CHAT_TEMPLATE, {"messages": turns}) == ["a<|im_end|>b<|im_end|>"]


HOSTILE = [
    *("a", "b ", " ", "\n", "\n\n", "\t", "\r\n", "é", "e\u0301", "🎉", "中", "\u200b", "'", '"', "\\n"),
    *(
        "<|im_end|>",
        "<|im_start|>",
        "<s>",
        "assistant\n",
        "user",
        "<think>",
        "</think>",
        "{{",
        "{%",
        "[/INST]",
    ),
]


@pytest.mark.parametrize(
    ("template", "before", "trims"),
    [(CHAT_TEMPLATE, "", False), (MARKED, "", False), (BRACKETS, " ", False), (HEADERS, "", True)],
    ids=["chatml", "marked", "brackets", "trimming"],
)
def test_any_text_is_found_exactly(template: str, before: str, trims: bool) -> None:
    rng = random.Random(0)
    renderer = Renderer(make_tiny_tokenizer(chat_template=template))
    for _ in range(100):
        said = ["".join(rng.choices(HOSTILE, k=rng.randint(0, 8))) for _ in range(2 * rng.randint(1, 3))]
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)
        ]
        rendered = renderer.render(parse_record(Record("x", {"messages": messages}))[1], "x")
        heard = [text for text in said[1::2] if text.replace("<|im_end|>", "").strip()]
        expected = [before + (text.strip() if trims else text) + "<|im_end|>" for text in heard]
        assert [rendered.text[a:b] for a, b in rendered.answers] == expected


def test_a_conversation_that_starts_with_the_assistant() -> None:
    turns = [{"role": "assistant", "content": "hello"}, *TWO_TURNS]
    assert answers(CHAT_TEMPLATE, {"messages": turns})[0] == "hello<|im_end|>"


SILENCE = {"role": "assistant", "content": ""}


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED, HEADERS, NO_END])
def test_an_empty_answer_does_not_train_its_end(template: str) -> None:
    rendered = render(template, {"messages": [TWO_TURNS[0], SILENCE]})
    assert (rendered.answers, rendered.add_eos) == ((), False)
    with_another = [TWO_TURNS[0], SILENCE, *TWO_TURNS[2:]]
    assert answers(template, {"messages": with_another}) == answers(template, {"messages": TWO_TURNS})[1:]


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
@pytest.mark.parametrize("value", [{"prompt": "p", "completion": ""}, {"instruction": "p", "output": ""}])
def test_an_empty_completion_does_not_train_eos(template: str | None, value: Any) -> None:
    rendered = render(template, value)
    assert (rendered.answers, rendered.add_eos) == ((), False)


def test_an_old_turn_of_which_only_the_end_is_written_is_not_trained() -> None:
    """All that it says is its reasoning, which templates leave out of earlier turns."""
    thought = {"role": "assistant", "content": "", "reasoning_content": "why"}
    assert answers(CHAT_TEMPLATE, {"messages": [TWO_TURNS[0], thought, *TWO_TURNS[2:]]}) == ["a2<|im_end|>"]


def test_openais_older_function_calls_are_trained() -> None:
    call = {"name": "look_up", "arguments": '{"city": "Oslo"}'}
    silent_call = {"role": "assistant", "content": "", "function_call": call}
    expected = '<tool_call>{"name": "look_up", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
    assert answers(WITH_TOOLS, {"messages": [TWO_TURNS[0], silent_call]}) == [expected]
    with pytest.raises(ConfigError, match="does not write its tool call 'look_up'"):
        answers(CHAT_TEMPLATE, {"messages": [TWO_TURNS[0], silent_call]})


def test_tool_calls_are_trained_with_exactly_their_arguments() -> None:
    call = {"function": {"name": "look_up", "arguments": {"city": "Oslo"}}}
    messages = [
        TWO_TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        TWO_TURNS[3],
    ]
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    assert answers(WITH_TOOLS, {"messages": messages, "tools": tools}) == [
        '<tool_call>{"name": "look_up", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>',
        "a2<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "value", "problem"),
    [
        (
            CHAT_TEMPLATE,
            {"messages": [TWO_TURNS[0], {"role": "assistant", "tool_calls": [{"name": "look_up"}]}]},
            "d.jsonl:7: messages[1]: the chat template does not write its tool call 'look_up'",
        ),
        (
            CHAT_TEMPLATE,
            {"messages": TWO_TURNS, "tools": [{"function": {"name": "look_up"}}]},
            "d.jsonl:7: the chat template does not write the tools column (look_up is missing)",
        ),
        (
            STRICT,
            {"messages": [TWO_TURNS[0], TWO_TURNS[0]]},
            "d.jsonl:7: the chat template refuses these messages: roles must alternate",
        ),
        (UNPREDICTABLE, {"messages": TWO_TURNS}, "d.jsonl:7: messages[1]: cannot tell which part"),
        (None, {"messages": TWO_TURNS}, "d.jsonl:7: chat messages, but the tokenizer has no chat template"),
        (
            CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]"),
            {"messages": [TWO_TURNS[0], {"role": "assistant", "content": "<think>why</think>a"}]},
            "d.jsonl:7: messages[1]: its content does not stand in the rendered answer",
        ),
        (
            CHAT_TEMPLATE,
            {"messages": [TWO_TURNS[0], {"role": "assistant", "content": "a", "reasoning_content": "why"}]},
            "d.jsonl:7: messages[1]: its content does not stand in the rendered answer",
        ),
        (
            "{% generation %}all{% endgeneration %}" + CHAT_TEMPLATE,
            {"messages": TWO_TURNS},
            "d.jsonl:7: the chat template marks 1 answers with {% generation %}, the messages have 2",
        ),
        (
            "{% for",
            {"messages": TWO_TURNS},
            "d.jsonl:7: the chat template refuses these messages",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(template: str | None, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(template, value)
    assert caught.value.message.startswith(problem)


def test_without_a_template_prompt_and_completion_are_joined() -> None:
    rendered = render(None, {"prompt": "2+2=", "completion": "4"})
    assert rendered == Rendered("2+2=4", ((4, 5),), templated=False, add_eos=True)


def test_plain_text_is_trained_as_a_whole() -> None:
    assert render(CHAT_TEMPLATE, {"text": "once"}) == Rendered(
        "once", ((0, 4),), templated=False, add_eos=True
    )
