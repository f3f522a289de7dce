"""Preparing data: what is kept, dropped and reported; the cache; several ranks at once."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dslaunch.core.errors import ConfigError, ConfigErrors, EnvironmentNotReady
from dslaunch.core.plan import DataSource
from dslaunch.train.data import dataset as dataset_module
from dslaunch.train.data.dataset import TokenizedDataset, TokenizingOptions, prepare_dataset, prepare_on_rank
from dslaunch.train.data.token_store import StoreWriter

Write = Callable[..., DataSource]
ROWS = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(8)]


class Prepare:
    """Calls prepare_dataset with defaults, and counts how often something was tokenised."""

    def __init__(self, tokenizer: Any, cache_dir: Path) -> None:
        self.options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "max_length": 128,
            "cache_dir": cache_dir,
            "max_dropped_fraction": 0.05,
            "seed": 0,
        }
        self.built: list[str] = []

    def __call__(self, *sources: DataSource, **options: Any) -> TokenizedDataset:
        before = len(self.built)
        given = {**self.options, "progress": lambda path, count: self.built.append(path), **options}
        result = prepare_dataset(sources, TokenizingOptions(**given))
        self.was_built = len(self.built) > before
        return result


@pytest.fixture
def prepare(tokenizer: Any, tmp_path: Path) -> Prepare:
    return Prepare(tokenizer, tmp_path / "cache")


def texts(prepare: Prepare, data: TokenizedDataset) -> list[str]:
    decode = prepare.options["tokenizer"].decode
    return [decode(data[i].input_ids[data[i].completion_mask]) for i in range(len(data))]


def test_samples_lengths_and_counts_belong_together(prepare: Prepare, write_jsonl: Write) -> None:
    data = prepare(write_jsonl(ROWS))
    assert texts(prepare, data) == [f"answer {i}<|im_end|>" for i in range(8)]
    assert data.lengths.tolist() == [len(data[i].input_ids) for i in range(8)]
    assert data.num_supervised.tolist() == [int(data[i].completion_mask.sum()) for i in range(8)]
    assert data[0].input_ids.dtype == np.int32
    assert data[0].completion_mask.dtype == np.bool_
    with pytest.raises(IndexError):
        data[8]
    with pytest.raises(IndexError):
        data[-1]


def test_several_sources_each_sample_once(prepare: Prepare, write_jsonl: Write) -> None:
    data = prepare(write_jsonl(ROWS[:3], "a.jsonl"), write_jsonl(ROWS[3:], "b.jsonl"))
    assert texts(prepare, data) == [f"answer {i}<|im_end|>" for i in range(8)]
    assert data.report.drawn == (3, 5)


def test_report(prepare: Prepare, write_jsonl: Write) -> None:
    rows = [*ROWS, {"prompt": "q" * 200, "completion": "a"}, {"text": "t" * 200}]
    source = write_jsonl(rows)
    data = prepare(source, max_dropped_fraction=0.1)
    report = data.report
    assert (report.read, report.kept, report.dropped, report.truncated) == (10, 9, 1, 1)
    assert report.dropped_where == (f"{source.path}:9: truncation took all of its answer",)
    assert report.sources[0].formats == {"prompt_completion": 9, "text": 1}
    assert report.sources[0].num_tokens == data.lengths.sum()
    assert report.sources[0].num_supervised_tokens == data.num_supervised.sum()
    assert report.lines() == [
        f"{source.path}: 9 of 10 samples (prompt_completion, text), 9 an epoch, "
        f"{data.lengths.sum()} tokens, {data.num_supervised.sum()} of them trained",
        f"  1 truncated to max_length ({report.sources[0].num_cut_tokens} tokens cut)",
        f"  1 dropped, for example {source.path}:9: truncation took all of its answer",
    ]
    assert prepare(source, max_dropped_fraction=0.1).report == report  # from the cache as well
    assert not prepare.was_built


def test_too_many_dropped_is_an_error_also_from_the_cache(prepare: Prepare, write_jsonl: Write) -> None:
    source = write_jsonl([*ROWS, {"messages": [{"role": "user", "content": "no answer"}]}])
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            prepare(source)
        assert "1 of 9 samples" in caught.value.message
        assert "max_dropped_fraction 0.05" in caught.value.message
        assert f"{source.path}:9: it has no answer" in caught.value.message
    assert len(prepare(source, max_dropped_fraction=0.2)) == 8


def test_prompts_longer_than_max_length_stop_the_run_whatever_is_allowed(
    prepare: Prepare, write_jsonl: Write
) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_length 4"):
        prepare(write_jsonl(ROWS), max_length=4, max_dropped_fraction=1.0)


def test_all_problems_of_a_file_at_once(prepare: Prepare, write_jsonl: Write) -> None:
    source = write_jsonl([ROWS[0], {"nothing": 1}, ROWS[1], {"text": ""}])
    Path(source.path).write_text(Path(source.path).read_text() + "{\n")
    with pytest.raises(ConfigErrors) as caught:
        prepare(source)
    places = [problem.message.split(": ")[0] for problem in caught.value.problems]
    assert places == [f"{source.path}:{place}" for place in ("2", "4", "5:2")]


def test_a_hopeless_file_is_given_up_after_ten_problems(prepare: Prepare, write_jsonl: Write) -> None:
    with pytest.raises(ConfigErrors) as caught:
        prepare(write_jsonl([{"nothing": 1}] * 1000))
    assert len(caught.value.problems) == 10


def test_after_an_error_nothing_is_left_and_the_mended_file_works(
    prepare: Prepare, write_jsonl: Write
) -> None:
    with pytest.raises(ConfigError):
        prepare(write_jsonl([*ROWS, {"nothing": 1}]))
    cache = prepare.options["cache_dir"]
    assert all(path.suffix == ".lock" for path in cache.iterdir())
    assert len(prepare(write_jsonl(ROWS))) == 8


def test_an_empty_source_is_an_error(prepare: Prepare, write_jsonl: Write) -> None:
    with pytest.raises(ConfigError, match="holds no records"):
        prepare(write_jsonl([]))


def test_the_cache_is_used_for_the_same_question_only(prepare: Prepare, write_jsonl: Write) -> None:
    from tests.support.tiny import make_tiny_tokenizer

    source = write_jsonl(ROWS)
    first = prepare(source).fingerprint
    os.utime(source.path, (1, 1))  # the content decides
    assert prepare(source).fingerprint == first
    assert not prepare.was_built
    other_tokenizer = make_tiny_tokenizer(300)
    other_template = make_tiny_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    for options in ({"max_length": 127}, {"tokenizer": other_tokenizer}, {"tokenizer": other_template}):
        assert prepare(source, **options).fingerprint != first
        assert prepare.was_built
    forced = DataSource(path=source.path, kind="file", format="prompt_completion")
    prepare(forced)
    assert prepare.was_built
    write_jsonl([*ROWS[:7], {"prompt": "question 7", "completion": "answer 9"}])
    assert prepare(source).fingerprint != first
    assert prepare.was_built


def test_padding_left_on_by_others_changes_neither_key_nor_tokens(
    prepare: Prepare, write_jsonl: Write
) -> None:
    source = write_jsonl(ROWS)
    first = prepare(source)
    prepare.options["tokenizer"](["a", "b b b"], padding=True, truncation=True, max_length=2)
    assert prepare(source).fingerprint == first.fingerprint
    shutil.rmtree(prepare.options["cache_dir"])
    assert prepare(source).lengths.tolist() == first.lengths.tolist()


@pytest.mark.parametrize("damage", ["truncate", "remove", "meta"])
def test_a_damaged_store_is_built_again(prepare: Prepare, write_jsonl: Write, damage: str) -> None:
    source = write_jsonl(ROWS)
    expected = texts(prepare, prepare(source))
    (tokens,) = prepare.options["cache_dir"].glob("*/tokens.bin")
    if damage == "truncate":
        os.truncate(tokens, 8)
    elif damage == "remove":
        tokens.unlink()
    else:
        (tokens.parent / "meta.json").write_text("{")
    assert texts(prepare, prepare(source)) == expected
    assert prepare.was_built


def test_what_a_killed_build_left_behind_is_replaced(prepare: Prepare, write_jsonl: Write) -> None:
    source = write_jsonl(ROWS)
    prepare(source)
    (store,) = (path for path in prepare.options["cache_dir"].iterdir() if path.is_dir())
    leftover = store.with_name(f".{store.name}.new")
    store.rename(leftover)
    assert len(prepare(source)) == 8
    assert store.exists() and not leftover.exists()


def test_a_file_that_changes_while_it_is_read_is_refused(
    prepare: Prepare, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(ROWS)
    append = StoreWriter.append

    def grow(self: StoreWriter, *arguments: Any) -> None:
        with open(source.path, "a") as stream:
            stream.write("\n")
        append(self, *arguments)

    monkeypatch.setattr(StoreWriter, "append", grow)
    with pytest.raises(ConfigError, match="changed while it was read"):
        prepare(source)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_is_one_sentence(
    prepare: Prepare, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(self: StoreWriter, *arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(StoreWriter, "append", fail)
    with pytest.raises(EnvironmentNotReady, match="token cache") as caught:
        prepare(write_jsonl(ROWS))
    assert "data.cache_dir" in (caught.value.hint or "")
    assert not list(prepare.options["cache_dir"].glob(".*.new*"))


def test_a_cache_path_that_is_a_file(prepare: Prepare, write_jsonl: Write, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(EnvironmentNotReady, match="token cache"):
        prepare(write_jsonl(ROWS))


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_missing_sources(prepare: Prepare, tmp_path: Path, kind: Any) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        prepare(DataSource(path=str(tmp_path / "nope.jsonl"), kind=kind))


def test_memory_does_not_grow_with_the_data(
    prepare: Prepare, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_BATCH_RECORDS", 8)

    def peak(count: int) -> int:
        source = write_jsonl([{"text": "word " * 200}] * count, f"{count}.jsonl")
        tracemalloc.start()
        prepare(source)
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    peak(8)  # imports and caches
    assert peak(160) < 1.2 * peak(40)


# ---- mixing


def test_weights_are_shares_of_the_epoch(prepare: Prepare, write_jsonl: Write) -> None:
    small = write_jsonl([{"text": f"small {i}"} for i in range(4)], "s.jsonl", weight=3)
    large = write_jsonl([{"text": f"large {i}"} for i in range(12)], "l.jsonl", weight=1)
    data = prepare(small, large)
    assert len(data) == 16
    assert data.report.drawn == (12, 4)
    found = sorted(prepare.options["tokenizer"].decode(data[i].input_ids) for i in range(16))
    # Every small sample exactly three times before any a fourth time; no large one twice.
    assert [t for t in found if t.startswith("small")] == [
        f"small {i}<|im_end|>" for i in range(4) for _ in range(3)
    ]
    assert len({t for t in found if t.startswith("large")}) == 4
    assert data.lengths.tolist() == [len(data[i].input_ids) for i in range(16)]
    again, other = prepare(small, large), prepare(small, large, seed=1)
    assert [again[i].input_ids.tolist() for i in range(16)] == [data[i].input_ids.tolist() for i in range(16)]
    assert again.fingerprint == data.fingerprint != other.fingerprint


# ---- several processes


def test_of_many_that_ask_at_once_one_builds(prepare: Prepare, write_jsonl: Write) -> None:
    source = write_jsonl(ROWS * 50)
    results: list[TokenizedDataset] = []
    threads = [threading.Thread(target=lambda: results.append(prepare(source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [len(data) for data in results] == [400] * 4
    assert len(prepare.built) == -(-400 // dataset_module._BATCH_RECORDS)


def test_other_ranks_wait_for_the_builder(prepare: Prepare, write_jsonl: Write) -> None:
    source = write_jsonl(ROWS)
    barrier = threading.Barrier(3)
    done: dict[int, TokenizedDataset] = {}
    built: list[int] = []

    def rank(number: int) -> None:
        done[number] = prepare_on_rank(
            [source],
            TokenizingOptions(**prepare.options, progress=lambda path, count: built.append(number)),
            is_builder=number == 0,
            barrier=lambda: barrier.wait(60) and None,
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.3)
    assert threads[1].is_alive(), "a rank that does not build must wait"
    threads[0].start()
    for thread in threads:
        thread.join(60)
    assert {len(data) for data in done.values()} == {8}
    assert len({data.fingerprint for data in done.values()}) == 1
    assert built == [0]


def test_a_builder_that_has_gone_ends_the_wait(
    prepare: Prepare, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_BUILDER_GONE_S", 0.2)
    options = TokenizingOptions(**prepare.options)
    with pytest.raises(EnvironmentNotReady, match="has stopped before it was done"):
        prepare_on_rank([write_jsonl(ROWS)], options, is_builder=False, barrier=lambda: None)
