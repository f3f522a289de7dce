"""Tokenizers and data files for the data tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.plan import DataSource
from tests.support.tiny import make_tiny_tokenizer


@pytest.fixture
def tokenizer() -> Any:
    """ChatML template, adds no special tokens by itself."""
    return make_tiny_tokenizer()


@pytest.fixture
def bos_tokenizer() -> Any:
    """Puts its BOS before every text, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., DataSource]:
    """Writes records, one a line, and returns the source."""

    def write(records: list[Any], name: str = "data.jsonl", **options: Any) -> DataSource:
        path = tmp_path / name
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
        return DataSource(path=str(path), kind="file", **options)

    return write
