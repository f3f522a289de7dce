"""Rendered texts to token ids and the mask of what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from dslaunch.core.errors import ConfigError
from dslaunch.train.data.collate import Sample
from dslaunch.train.data.rendering import Rendered, Span


class Tokenized(NamedTuple):
    """A sample before the check that something of it is trained.

    ``num_cut`` is how many tokens truncation took; ``bos_removed`` whether a
    doubled BOS was made one.
    """

    sample: Sample
    num_cut: int
    bos_removed: bool

    @property
    def num_supervised(self) -> int:
        """Trained tokens; 0 means that the sample teaches nothing."""
        return int(self.sample.completion_mask.sum())


class SampleTokenizer:
    """Turns rendered texts into samples of at most ``max_length`` tokens.

    Raises ConfigError for a tokenizer that gives no character offsets (a "slow"
    one) or has no EOS token to teach stopping with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        check_tokenizer(tokenizer)
        if max_length < 2:
            raise ConfigError(f"data.max_length is {max_length}; a sample needs at least 2 tokens")
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._bos_id: int | None = tokenizer.bos_token_id
        self._added_bos_id = self._bos_id if adds_bos(tokenizer) else None

    def tokenize(self, batch: Sequence[Rendered], wheres: Sequence[str]) -> list[Tokenized]:
        """One result for each text. Each whole text is tokenised once, and the mask read from the offsets.

        Tokenising prompt and answer apart would give other ids at the seam. A
        token across the seam counts as answer. Truncation is on the right.
        Raises ConfigError, with its place, for a text that is not valid Unicode.
        """
        for rendered, where in zip(batch, wheres, strict=True):
            _check_unicode(rendered.text, where)
        encoded = self._tokenizer(
            [rendered.text for rendered in batch],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        results = zip(batch, wheres, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [self._finish(*result) for result in results]

    def _finish(
        self, rendered: Rendered, where: str, ids: list[int], offsets: list[tuple[int, int]]
    ) -> Tokenized:
        input_ids = np.asarray(ids, dtype=np.int32)
        mask = _answer_mask(offsets, rendered.answers)
        if not rendered.templated and self._added_bos_id is not None:
            input_ids = np.insert(input_ids, 0, self._added_bos_id)
            mask = np.insert(mask, 0, False)
        input_ids, mask, bos_removed = self._with_one_bos(input_ids, mask)
        if rendered.add_eos:
            eos_id = self._eos_id(where)
            if not len(input_ids) or input_ids[-1] != eos_id:  # data may end with it already
                input_ids = np.append(input_ids, np.int32(eos_id))
                mask = np.append(mask, True)
        num_cut = max(0, len(input_ids) - self._max_length)
        input_ids, mask = input_ids[: self._max_length], mask[: self._max_length]
        mask[:1] = False  # nothing predicts the first token
        return Tokenized(Sample(input_ids, mask), num_cut, bos_removed)

    def _with_one_bos(
        self, input_ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], bool]:
        """Drop all but the last of several BOS at the start: template, tokenizer or data each wrote one."""
        extra = 0
        if self._bos_id is not None and input_ids[:1].tolist() == [self._bos_id]:
            others = np.flatnonzero(input_ids != self._bos_id)
            extra = int(others[0] if len(others) else len(input_ids)) - 1
        return input_ids[extra:], mask[extra:], extra > 0

    def _eos_id(self, where: str) -> int:
        eos_id = self._tokenizer.eos_token_id
        if eos_id is None:
            raise ConfigError(
                f"{where}: the tokenizer has no EOS token, so the model would never learn to stop",
                hint="set eos_token in the tokenizer's tokenizer_config.json",
            )
        return int(eos_id)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError for a tokenizer without character offsets: masks could not be placed."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer ({type(tokenizer).__name__}) gives no character offsets, which masks need",
            hint="use a model that ships a tokenizer.json",
        )


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its BOS before plain text of its own accord."""
    if tokenizer.bos_token_id is None:
        return False
    ids = tokenizer("a", verbose=False)["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def _answer_mask(offsets: Sequence[tuple[int, int]], answers: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """True for each token that shares a character with an answer. Spans ascend and do not overlap."""
    ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, stops = ends[:, 0], ends[:, 1]
    mask = np.zeros(len(ends), dtype=np.bool_)
    for first, last in answers:
        # An empty token (some tokenizers write one before a word) stands where it stands.
        mask |= (starts < last) & (np.maximum(stops, starts + 1) > first)
    return mask


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: the text holds half a surrogate pair (U+{ord(text[error.start]):04X}), no character",
            hint="an emoji was cut in two when the data was written; fix or drop the record",
        ) from None
