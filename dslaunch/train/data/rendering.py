"""A conversation as the text that the model reads, and where in it the answers stand.

Answers are found as character spans, never by searching token ids. A chat
template is rendered as a whole; then

1. where it marks its answers with ``{% generation %}``, those marks are the spans;
2. else the messages up to an answer, rendered with the generation prompt, must
   be a true prefix of the whole: the answer starts there. The messages up to
   and with the answer must be one too: the answer ends there;
3. where a template rewrites earlier turns (drops old ``<think>`` blocks), so that
   the second prefix differs, the answer's text is replaced by a mark and the
   rest after the mark must be a true suffix of the whole.

What passes none of these is refused: a guessed mask trains on the wrong tokens
without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from dslaunch.core.errors import ConfigError, one_line
from dslaunch.train.data.formats import Conversation, TextSample

Span = tuple[int, int]
Around = tuple[str, str]
Messages = Sequence[Mapping[str, Any]]

_MARK = "\u2063answer-mark\u2063"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A text and its answers.

    ``answers``: [start, end) in characters, ascending, trained. ``templated``:
    the text is complete, no special token is to be added. ``add_eos``: end with
    the EOS token, trained.
    """

    text: str
    answers: tuple[Span, ...]
    templated: bool
    add_eos: bool


class Renderer:
    """Renders parsed records for one tokenizer. Raises ConfigError where an answer cannot be placed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._has_template = bool(tokenizer.chat_template)
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        self._special = tuple(sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True))
        self._end_of_turn: tuple[str, ...] | None = None

    def render(self, parsed: Conversation | TextSample, where: str) -> Rendered:
        """The training text of one record. ``where`` begins each error."""
        if isinstance(parsed, TextSample):
            return Rendered(parsed.text, ((0, len(parsed.text)),), templated=False, add_eos=True)
        if self._has_template:
            return self._render_chat(parsed, where)
        if parsed.plain is None:
            raise ConfigError(
                f"{where}: chat messages, but the tokenizer has no chat template",
                hint="set model.chat_template to a Jinja file, or use prompt/completion data",
            )
        prompt, completion = parsed.plain
        if not any(parsed.trained):  # an empty completion: nothing but EOS would be learned
            return Rendered(prompt, (), templated=False, add_eos=False)
        end = len(prompt) + len(completion)
        return Rendered(prompt + completion, ((len(prompt), end),), templated=False, add_eos=True)

    def _render_chat(self, chat: Conversation, where: str) -> Rendered:
        whole = self._apply(chat.messages, chat, where)
        wanted = [i for i, trained in enumerate(chat.trained) if trained]
        if not wanted:
            return Rendered(whole, (), templated=True, add_eos=False)
        if _GENERATION.search(self._template(chat)):
            spans = self._marked_spans(whole, chat, wanted, where)
        else:
            spans = [self._span(whole, chat, i, where) for i in wanted]
        for index, span in zip(wanted, spans, strict=True):
            last = index == len(chat.messages) - 1
            _check_holds_message(
                whole[slice(*span)], chat.messages[index], f"{where}: messages[{index}]", last
            )
        _check_names_tools(whole, chat, where)
        # The model must learn to stop, also where the template writes no end of turn.
        ends_the_text = wanted[-1] == len(chat.messages) - 1
        add_eos = ends_the_text and not whole[slice(*spans[-1])].rstrip().endswith(self._special)
        spans = [span for span in spans if not self._is_bare_end(whole[slice(*span)])]
        return Rendered(whole, tuple(spans), templated=True, add_eos=add_eos and bool(spans))

    def _template(self, chat: Conversation) -> str:
        return str(self._tokenizer.get_chat_template(None, tools=_list_or_none(chat.tools)))

    def _apply(
        self, messages: Messages, chat: Conversation, where: str, *, generation_prompt: bool = False
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=_list_or_none(chat.tools),
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # a template is a program of the user's: it may raise anything
            raise ConfigError(
                f"{where}: the chat template refuses these messages: {one_line(error)}",
                hint="check the roles and their order, or give another model.chat_template",
            ) from error
        assert isinstance(text, str)
        return text

    # ---- 1. {% generation %}

    def _marked_spans(self, whole: str, chat: Conversation, wanted: list[int], where: str) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marks = render_jinja_template(
            conversations=[[dict(message) for message in chat.messages]],
            tools=_list_or_none(chat.tools),
            chat_template=self._template(chat),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if texts[0] != whole or len(marks[0]) != len(answers):
            raise ConfigError(
                f"{where}: the chat template marks {len(marks[0])} answers with {{% generation %}}, "
                f"the messages have {len(answers)}",
                hint="mark each assistant message once, or leave the marks out of the template",
            )
        by_message = dict(zip(answers, marks[0], strict=True))
        return [self._to_end_of_turn(whole, by_message[i]) for i in wanted]

    # ---- 2. prefixes, 3. a mark in the answer's place

    def _span(self, whole: str, chat: Conversation, index: int, where: str) -> Span:
        place = f"{where}: messages[{index}]"
        start = self._prefix(whole, chat, index, where, generation_prompt=True)
        end = self._prefix(whole, chat, index + 1, where)
        if start is not None and end is not None and start < end:
            return self._to_end_of_turn(whole, (start, end))
        around = self._around_mark(chat, index, where)
        if around is not None:
            before, after = around
            if start is None and whole.startswith(before):
                start = len(before)
            end = len(whole) - len(after)
            if start is not None and whole.endswith(after) and start <= end:
                return self._to_end_of_turn(whole, (start, end))
        raise ConfigError(
            f"{place}: cannot tell which part of the rendered chat is this answer: "
            "the template writes the messages before it differently when others follow",
            hint="give a template with {% generation %} marks (model.chat_template)",
        )

    def _prefix(
        self, whole: str, chat: Conversation, count: int, where: str, *, generation_prompt: bool = False
    ) -> int | None:
        """Length of the first ``count`` messages' own rendering, where that is a prefix of the whole."""
        if count == len(chat.messages):
            return len(whole)
        try:  # a template may refuse a part of a conversation that it takes as a whole
            part = self._apply(chat.messages[:count], chat, where, generation_prompt=generation_prompt)
        except ConfigError:
            return None
        return len(part) if whole.startswith(part) else None

    def _around_mark(self, chat: Conversation, index: int, where: str) -> Around | None:
        message = chat.messages[index]
        if message.get("tool_calls") or not message["content"]:
            return None  # the answer is more than its content
        marked = [*chat.messages[:index], {**message, "content": _MARK}, *chat.messages[index + 1 :]]
        before, found, after = self._apply(marked, chat, where).partition(_MARK)
        return (before, after) if found and _MARK not in after else None

    # ---- the end of a turn

    def _to_end_of_turn(self, whole: str, span: Span) -> Span:
        """Make a span end with its end-of-turn token: extend one that stops short, trim one that goes on.

        The white space after the token is not trained: the model stops before it.
        """
        start, end = span
        tokens = "|".join(map(re.escape, self._end_of_turn_tokens()))
        follows = re.compile(rf"\s*(?:{tokens})").match(whole, end) if tokens else None
        if follows:
            return start, follows.end()
        stripped = start + len(whole[start:end].rstrip())
        return (start, stripped) if whole[start:stripped].endswith(self._special) else span

    def _is_bare_end(self, answer: str) -> bool:
        """Nothing but ends of turn: what the message says is not written here (an old turn's reasoning)."""
        for token in self._end_of_turn_tokens():
            answer = answer.replace(token, "")
        return not answer.strip()

    def _end_of_turn_tokens(self) -> tuple[str, ...]:
        """What ends an answer: EOS, and the special token this template writes after a lone answer."""
        if self._end_of_turn is None:
            found = {self._tokenizer.eos_token} if self._tokenizer.eos_token else set()
            probe = Conversation(
                ({"role": "user", "content": "q"}, {"role": "assistant", "content": _MARK}), ()
            )
            try:
                tail = self._apply(probe.messages, probe, "probe").partition(_MARK)[2]
            except ConfigError:  # a template with demands of its own: EOS alone
                tail = ""
            special = re.compile("|".join(re.escape(token) for token in self._special)).search(tail)
            if special and special.group():
                found.add(special.group())
            self._end_of_turn = tuple(sorted(found, key=len, reverse=True))
        return self._end_of_turn


def _check_holds_message(answer: str, message: Mapping[str, Any], place: str, last: bool) -> None:
    """A template may drop what it does not know; then the answer would be learned without it.

    Reasoning (``<think>`` blocks, ``reasoning_content``) may be missing from
    earlier turns, where templates drop it on purpose, but not from the last.
    """
    thought, closed, said = message["content"].rpartition("</think>")
    parts = [said]
    if last:
        parts += [thought.rpartition("<think>")[2] if closed else "", message.get("reasoning_content", "")]
    if any(part.strip() not in answer for part in parts if isinstance(part, str)):
        raise ConfigError(
            f"{place}: its content does not stand in the rendered answer as written",
            hint="the chat template changes or drops a part of it; give another model.chat_template",
        )
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in answer:
            raise ConfigError(
                f"{place}: the chat template does not write its tool call {call['function']['name']!r}",
                hint="give a template that renders tool_calls (model.chat_template)",
            )


def _check_names_tools(whole: str, chat: Conversation, where: str) -> None:
    for tool in chat.tools or ():
        name = tool.get("function", tool).get("name")
        if isinstance(name, str) and name not in whole:
            raise ConfigError(
                f"{where}: the chat template does not write the tools column ({name} is missing)",
                hint="give a template that renders tools (model.chat_template), or drop the column",
            )


def _list_or_none(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    return None if tools is None else [dict(tool) for tool in tools]
