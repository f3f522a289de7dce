"""Masks from character offsets, one BOS, a trained EOS, truncation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.dataset import TokenizingOptions, prepare_dataset
from dslaunch.train.data.formats import parse_record
from dslaunch.train.data.records import Record
from dslaunch.train.data.rendering import Rendered, Renderer
from dslaunch.train.data.tokenize import SampleTokenizer, Tokenized, check_tokenizer


def tokenize(tokenizer: Any, value: Any, max_length: int = 512) -> Tokenized:
    rendered = Renderer(tokenizer).render(parse_record(Record("x:1", value))[1], "x:1")
    return SampleTokenizer(tokenizer, max_length).tokenize([rendered], ["x:1"])[0]


def trained_text(tokenizer: Any, done: Tokenized) -> str:
    return str(tokenizer.decode(done.sample.input_ids[done.sample.completion_mask]))


CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a ü 🎉."}]}


def test_chat_trains_the_answer_and_its_end_also_when_pad_is_eos(tokenizer: Any) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    done = tokenize(tokenizer, CHAT)
    assert trained_text(tokenizer, done) == "a ü 🎉.<|im_end|>"
    assert tokenizer.decode(done.sample.input_ids) == tokenizer.apply_chat_template(
        CHAT["messages"], tokenize=False
    )
    # The end of the question is the same token, and is not trained.
    ends = np.flatnonzero(done.sample.input_ids == tokenizer.eos_token_id)
    assert done.sample.completion_mask[ends].tolist() == [False, True]


@pytest.mark.parametrize("with_template", [True, False])
def test_an_empty_answer_teaches_nothing(tokenizer: Any, with_template: bool) -> None:
    """Not even the end: a model that has learned it alone is silent."""
    if not with_template:
        tokenizer.chat_template = None
    for value in ({"prompt": "p", "completion": ""}, {"instruction": "i", "output": " "}):
        assert tokenize(tokenizer, value).num_supervised == 0


def test_empty_answers_are_dropped_and_named(tokenizer: Any, write_jsonl: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(3)]
    silent = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}
    source = write_jsonl([*rows, silent, {"prompt": "p", "completion": ""}])
    settings: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_length": 64,
        "cache_dir": tmp_path / "cache",
        "seed": 0,
    }
    report = prepare_dataset([source], TokenizingOptions(max_dropped_fraction=0.5, **settings)).report
    assert (report.read, report.kept, report.dropped) == (5, 3, 2)
    said = "it has no answer, or an empty one"
    assert report.dropped_where == (f"{source.path}:4: {said}", f"{source.path}:5: {said}")
    with pytest.raises(ConfigError, match=f"data.jsonl:4: {said}"):
        prepare_dataset([source], TokenizingOptions(max_dropped_fraction=0.05, **settings))


def test_prompt_and_completion_are_tokenised_together(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    prompt, completion = "The capital of the is", "land is Port Evening."
    done = tokenize(tokenizer, {"prompt": prompt, "completion": completion})
    together = tokenizer(prompt + completion)["input_ids"]
    assert done.sample.input_ids.tolist() == [*together, tokenizer.eos_token_id]
    apart = tokenizer(prompt)["input_ids"] + tokenizer(completion)["input_ids"]
    assert apart != together, "the case must have a token across the seam"
    # " island" lies across the seam and counts as answer.
    assert trained_text(tokenizer, done) == " island is Port Evening.<|im_end|>"


def test_exactly_one_bos_before_plain_text(bos_tokenizer: Any) -> None:
    bos_tokenizer.chat_template = None
    for text in ("plain", "<s>plain"):
        done = tokenize(bos_tokenizer, {"text": text})
        assert bos_tokenizer.decode(done.sample.input_ids) == "<s>plain<|im_end|>"
        assert trained_text(bos_tokenizer, done) == "plain<|im_end|>"
        assert done.bos_removed is (text != "plain")


def test_a_template_that_writes_bos_gets_no_second_one(bos_tokenizer: Any) -> None:
    bos_tokenizer.chat_template = "{{ bos_token }}" + bos_tokenizer.chat_template
    done = tokenize(bos_tokenizer, CHAT)
    assert done.sample.input_ids[:2].tolist().count(bos_tokenizer.bos_token_id) == 1
    bos_tokenizer.chat_template = "{{ bos_token }}" + bos_tokenizer.chat_template
    doubled = tokenize(bos_tokenizer, CHAT)
    assert doubled.sample.input_ids.tolist() == done.sample.input_ids.tolist()
    assert doubled.sample.completion_mask.tolist() == done.sample.completion_mask.tolist()
    assert (done.bos_removed, doubled.bos_removed) == (False, True)


def test_a_template_without_bos_gets_none(bos_tokenizer: Any) -> None:
    assert bos_tokenizer.bos_token_id not in tokenize(bos_tokenizer, CHAT).sample.input_ids


def test_bos_in_the_middle_of_a_text_stays(tokenizer: Any) -> None:
    done = tokenize(tokenizer, {"text": "a<s><s>b"})
    assert done.sample.input_ids.tolist().count(tokenizer.bos_token_id) == 2


def test_eos_that_the_data_already_has_is_not_doubled(tokenizer: Any) -> None:
    done = tokenize(tokenizer, {"text": "done<|im_end|>"})
    assert tokenizer.decode(done.sample.input_ids) == "done<|im_end|>"
    assert done.sample.completion_mask[-1]


def test_the_first_token_is_never_trained(tokenizer: Any) -> None:
    mask = tokenize(tokenizer, {"text": "plain text"}).sample.completion_mask
    assert not mask[0]
    assert mask[1:].all()


def test_truncation_on_the_right_keeps_what_remains_trained(tokenizer: Any) -> None:
    whole = tokenize(tokenizer, CHAT)
    length = len(whole.sample.input_ids)
    answer = int(np.flatnonzero(whole.sample.completion_mask)[0])
    cut = tokenize(tokenizer, CHAT, answer + 1)
    assert cut.sample.input_ids.tolist() == whole.sample.input_ids[: answer + 1].tolist()
    assert (cut.num_supervised, cut.num_cut) == (1, length - answer - 1)
    gone = tokenize(tokenizer, CHAT, answer)
    assert gone.num_supervised == 0
    assert tokenize(tokenizer, CHAT, length).num_cut == 0


def test_half_a_surrogate_pair_is_named(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"x:1: the text holds half a surrogate pair \(U\+D83D\)"):
        tokenize(tokenizer, {"text": "cut \ud83d"})


def test_a_tokenizer_without_eos_cannot_teach_stopping(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has no EOS token"):
        tokenize(tokenizer, {"text": "endless"})


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match="gives no character offsets"):
        check_tokenizer(Slow())  # type: ignore[arg-type]


def test_many_spans_in_one_text(tokenizer: Any) -> None:
    text = "".join(f"q{i}[a{i}]" for i in range(50))
    spans = tuple((text.index(f"[a{i}]"), text.index(f"[a{i}]") + len(f"[a{i}]")) for i in range(50))
    rendered = Rendered(text, spans, templated=True, add_eos=False)
    done = SampleTokenizer(tokenizer, 4096).tokenize([rendered], ["x"])[0]
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    expected = [any(start < b and end > a for a, b in spans) for start, end in offsets]
    assert done.sample.completion_mask.tolist() == [False, *expected[1:]]
