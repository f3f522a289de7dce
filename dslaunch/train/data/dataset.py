"""Data sources to tokenised samples: prepared once, cached on disk, read by memory map."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from dslaunch.core.errors import ConfigError, ConfigErrors, EnvironmentNotReady
from dslaunch.core.file_lock import exclusive, is_held, poll
from dslaunch.core.plan import DataSource
from dslaunch.train.data.collate import Sample
from dslaunch.train.data.fingerprint import (
    CODE_VERSION,
    digest,
    fingerprint_source,
    fingerprint_tokenizer,
    source_state,
)
from dslaunch.train.data.formats import parse_record
from dslaunch.train.data.mixing import draw_counts, draw_mix, resolve_weights
from dslaunch.train.data.rendering import Rendered, Renderer
from dslaunch.train.data.report import ANSWER_CUT, NO_ANSWER, DataReport, SourceReport
from dslaunch.train.data.sources import iterate_records
from dslaunch.train.data.token_store import StoreWriter, TokenStore, translated_disk_errors, write_store
from dslaunch.train.data.tokenize import SampleTokenizer, check_tokenizer
from dslaunch.train.waiting import waiting_for

__all__ = ["Sample", "TokenizedDataset", "TokenizingOptions", "prepare_dataset", "prepare_on_rank"]

Progress = Callable[[str, int], None]
"""Called now and then while tokenising, with the source's path and the records read so far."""

_BATCH_RECORDS = 256
_BATCH_CHARACTERS = 1 << 18
_MOST_PROBLEMS = 10
_MOST_PLACES = 20
_BUILDER_GONE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class TokenizingOptions:
    """How sources become samples: samples of at most ``max_length`` tokens, kept in ``cache_dir``.

    ``seed`` draws the mix where sources have weights; ``max_dropped_fraction`` is
    how many of the records may have no trained token.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    cache_dir: Path
    max_dropped_fraction: float
    seed: int
    progress: Progress | None = None


class TokenizedDataset:
    """Samples of all sources, in the order of the files or of the mix.

    ``lengths`` and ``num_supervised`` are int64 [len(self)]: tokens, and trained
    tokens, of each sample. ``fingerprint`` changes when any sample, its place or
    its mask does. ``report`` tells what was read, kept and dropped.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        rows: npt.NDArray[np.int64] | None,
        report: DataReport,
        fingerprint: str,
    ) -> None:
        self._stores = list(stores)
        self._starts = np.cumsum([0, *(len(store) for store in stores)])
        self._rows = rows  # None: every sample once
        self.report = report
        self.fingerprint = fingerprint
        self.lengths = self._select([store.lengths for store in stores])
        self.num_supervised = self._select([store.num_supervised for store in stores])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``: views into the cache, not to be written to."""
        store, row = self._find(index)
        return store[row]

    def where(self, index: int) -> str:
        """The place of sample ``index`` in its source, as ``file:line`` or the like; for messages."""
        store, row = self._find(index)
        return store.where(row)

    def _find(self, index: int) -> tuple[TokenStore, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = index if self._rows is None else int(self._rows[index])
        store = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._stores[store], row - int(self._starts[store])

    def _select(self, per_store: Sequence[npt.NDArray[np.integer]]) -> npt.NDArray[np.int64]:
        values = np.concatenate(per_store).astype(np.int64)
        return values if self._rows is None else values[self._rows]


def prepare_dataset(sources: Sequence[DataSource], options: TokenizingOptions) -> TokenizedDataset:
    """Tokenise ``sources``, or find them tokenised in the cache.

    Any number of processes may call it at the same time: one builds, the others
    wait for it.

    Raises ConfigError where a source is missing or holds broken records (up to
    ten at once, each with its line), where the chat template cannot be used, or
    where more than ``max_dropped_fraction`` of the records have no trained token
    within ``max_length`` tokens. Raises EnvironmentNotReady where the cache
    cannot be written.
    """
    assert sources
    shares = resolve_weights(sources)
    keys = _source_keys(sources, options)
    stores = [_open_or_build(source, key, options) for source, key in zip(sources, keys, strict=True)]
    sizes = [len(store) for store in stores]
    drawn = sizes if shares is None else draw_counts(sum(sizes), shares)
    report = DataReport(tuple(store.report for store in stores), tuple(drawn))
    _check_enough_kept(report, options.max_length, options.max_dropped_fraction)
    rows = None if shares is None else draw_mix(sizes, drawn, options.seed)
    return TokenizedDataset(stores, rows, report, digest([keys, shares, options.seed if shares else None]))


def prepare_on_rank(
    sources: Sequence[DataSource],
    options: TokenizingOptions,
    *,
    is_builder: bool,
    barrier: Callable[[], None],
) -> TokenizedDataset:
    """As :func:`prepare_dataset`, on every rank of a run; only the builder (one a host) tokenises.

    The others watch the cache, so that no collective times out however long it
    takes, and all meet in ``barrier`` when it is there. Raises
    EnvironmentNotReady on a rank that waits when the builder has gone.
    """
    if not is_builder:
        _await_builder([options.cache_dir / key for key in _source_keys(sources, options)])
        options = replace(options, progress=None)
    dataset = prepare_dataset(sources, options)
    barrier()
    return dataset


def _source_keys(sources: Sequence[DataSource], options: TokenizingOptions) -> list[str]:
    cache_dir = options.cache_dir
    with translated_disk_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
    check_tokenizer(options.tokenizer)
    common = [CODE_VERSION, fingerprint_tokenizer(options.tokenizer), options.max_length]
    # The path is part of the key because reports name it.
    return [
        digest([*common, s.path, s.split, s.format, fingerprint_source(s, cache_dir)])[:32] for s in sources
    ]


def _await_builder(paths: Sequence[Path]) -> None:
    seen_at_work = time.monotonic()

    def is_built() -> bool:
        nonlocal seen_at_work
        missing = [path for path in paths if not (path / "meta.json").exists()]
        if any(is_held(_lock_of(path)) for path in missing):
            seen_at_work = time.monotonic()
        elif missing and time.monotonic() - seen_at_work > _BUILDER_GONE_S:
            raise EnvironmentNotReady(
                "the rank that tokenises the data has stopped before it was done",
                hint="see that rank's log for its error",
            )
        return not missing

    def say(waited_s: float) -> None:
        text = f"waiting for the rank that tokenises the data ({waited_s:.0f} s)"
        print(text, file=sys.stderr, flush=True)

    poll(is_built, on_wait=say)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _open_or_build(source: DataSource, key: str, options: TokenizingOptions) -> TokenStore:
    path = options.cache_dir / key
    lock = exclusive(_lock_of(path), on_wait=waiting_for(f"tokenising {source.path}"))
    with translated_disk_errors(path.parent), lock:
        store = _open_if_whole(path)
        if store is None:
            _build(source, path, options)
            store = TokenStore(path)
        return store


def _open_if_whole(path: Path) -> TokenStore | None:
    try:
        return TokenStore(path)
    except (OSError, ValueError, KeyError, TypeError):  # absent, or damaged: built again
        return None


def _build(source: DataSource, path: Path, options: TokenizingOptions) -> None:
    before = source_state(source)
    tokenizer = SampleTokenizer(options.tokenizer, options.max_length)
    with write_store(path) as store:
        builder = _SourceBuilder(source, store.writer, Renderer(options.tokenizer), tokenizer)
        builder.run(options.progress)
        if source_state(source) != before:
            raise ConfigError(
                f"{source.path} changed while it was read", hint="start again when it is complete"
            )
        store.report = builder.report()


class _SourceBuilder:
    """Reads one source to its end, in batches, and counts what becomes of each record."""

    def __init__(
        self, source: DataSource, writer: StoreWriter, renderer: Renderer, tokenizer: SampleTokenizer
    ) -> None:
        self._source = source
        self._writer = writer
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._counts: Counter[str] = Counter()
        self._formats: Counter[str] = Counter()
        self._dropped_where: list[str] = []

    def run(self, progress: Progress | None) -> None:
        """Everything from the source to the store. Raises ConfigError or ConfigErrors for its records."""
        problems: list[ConfigError] = []
        for batch in self._batches(problems):
            self._write([text for text, _ in batch], [where for _, where in batch])
            if progress is not None:
                progress(self._source.path, self._counts["read"])
        if problems:
            raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
        if not self._counts["read"]:
            raise ConfigError(f"data source {self._source.path} holds no records")

    def _batches(self, problems: list[ConfigError]) -> Iterator[list[tuple[Rendered, str]]]:
        batch: list[tuple[Rendered, str]] = []
        characters = 0
        for rendered in self._rendered(problems):
            batch.append(rendered)
            characters += len(rendered[0].text)
            if len(batch) >= _BATCH_RECORDS or characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def _rendered(self, problems: list[ConfigError]) -> Iterator[tuple[Rendered, str]]:
        for record in iterate_records(self._source):
            self._counts["read"] += 1
            try:
                name, parsed = parse_record(record, self._source.format)
                rendered = self._renderer.render(parsed, record.where)
            except ConfigError as error:
                problems.append(error)
                if len(problems) == _MOST_PROBLEMS:
                    return
                continue
            self._formats[name] += 1
            yield rendered, record.where

    def _write(self, texts: list[Rendered], wheres: list[str]) -> None:
        for text, where, done in zip(texts, wheres, self._tokenizer.tokenize(texts, wheres), strict=True):
            self._counts["bos_removed"] += done.bos_removed
            if not done.num_supervised:
                self._drop(where, ANSWER_CUT if text.answers else NO_ANSWER)
                continue
            self._writer.append(done.sample, done.num_supervised, where.removeprefix(self._source.path))
            self._counts["kept"] += 1
            self._counts["truncated"] += done.num_cut > 0
            self._counts["num_cut_tokens"] += done.num_cut
            self._counts["num_tokens"] += len(done.sample.input_ids)
            self._counts["num_supervised_tokens"] += done.num_supervised

    def _drop(self, where: str, reason: str) -> None:
        self._counts["dropped"] += 1
        if len(self._dropped_where) < _MOST_PLACES:
            self._dropped_where.append(f"{where}: {reason}")

    def report(self) -> SourceReport:
        """The counts, once ``run`` is through."""
        names = ("read", "kept", "dropped", "truncated", "bos_removed")
        tokens = ("num_tokens", "num_supervised_tokens", "num_cut_tokens")
        return SourceReport(
            path=self._source.path,
            split=self._source.split,
            formats=dict(self._formats),
            dropped_where=tuple(self._dropped_where),
            **{name: self._counts[name] for name in chain(names, tokens)},
        )


def _check_enough_kept(report: DataReport, max_length: int, max_dropped_fraction: float) -> None:
    empty = [source.path for source in report.sources if not source.kept]
    if not empty and report.dropped <= max_dropped_fraction * report.read:
        return
    places = "; ".join(report.dropped_where[:3])
    of_which = f"all samples of {empty[0]} are" if empty else f"{report.dropped} of {report.read} samples are"
    raise ConfigError(
        f"{of_which} without a trained token within data.max_length {max_length}, "
        f"more than data.max_dropped_fraction {max_dropped_fraction} allows: {places}",
        hint="raise data.max_length, shorten the prompts, or raise data.max_dropped_fraction",
    )
