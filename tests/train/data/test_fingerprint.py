"""Hashes of large files are remembered, and never for a file that may have changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.plan import DataSource
from dslaunch.train import file_hash
from dslaunch.train.data import fingerprint
from dslaunch.train.data.fingerprint import fingerprint_source, fingerprint_tokenizer, source_files


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file is large enough to be remembered; the list tells which were read."""
    monkeypatch.setattr(file_hash, "_REMEMBER_FROM_BYTES", 0)
    monkeypatch.setattr(file_hash, "_SETTLED_S", -1.0)
    read: list[Path] = []
    original = file_hash._hash_content

    def spy(path: Path) -> str:
        read.append(path)
        return original(path)

    monkeypatch.setattr(file_hash, "_hash_content", spy)
    return read


def test_a_remembered_hash_follows_the_content(tmp_path: Path, hashed: list[Path]) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("one")
    source = DataSource(path=str(path), kind="file")
    first = fingerprint_source(source, tmp_path / "cache")
    assert fingerprint_source(source, tmp_path / "cache") == first
    assert len(hashed) == 1
    times = path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same modification time
    assert fingerprint_source(source, tmp_path / "cache") != first
    assert len(hashed) == 2


def test_a_file_just_written_is_not_remembered(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hash, "_SETTLED_S", 3600.0)
    path = tmp_path / "d.jsonl"
    path.write_text("one")
    for _ in range(2):
        fingerprint_source(DataSource(path=str(path), kind="file"), tmp_path / "cache")
    assert len(hashed) == 2


def test_a_directory_counts_with_names_and_without_hidden_files(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "a.jsonl").write_text("x")
    source = DataSource(path=str(folder), kind="directory")
    first = fingerprint_source(source, tmp_path / "cache")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "a.lock").write_text("y")
    assert [name for name, _ in source_files(source)] == ["train/a.jsonl"]
    assert fingerprint_source(source, tmp_path / "cache") == first
    (folder / "train" / "a.jsonl").rename(folder / "train" / "b.jsonl")
    assert fingerprint_source(source, tmp_path / "cache") != first


def test_a_tokenizer_counts_with_template_and_special_tokens(tokenizer: Any, bos_tokenizer: Any) -> None:
    first = fingerprint_tokenizer(tokenizer)
    assert first == fingerprint_tokenizer(tokenizer)
    assert first != fingerprint_tokenizer(bos_tokenizer)
    tokenizer.chat_template += " "
    second = fingerprint_tokenizer(tokenizer)
    tokenizer.eos_token = "<pad>"
    assert len({first, second, fingerprint_tokenizer(tokenizer)}) == 3


def test_both_ways_to_leave_out_padding_agree_on_what_counts(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for marker in ("added_tokens", "no such key"):
        before = fingerprint._backend_text(tokenizer)
        tokenizer.backend_tokenizer.enable_padding(length=7)
        tokenizer.backend_tokenizer.enable_truncation(5)
        assert fingerprint._backend_text(tokenizer) == before
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()
        if marker == "added_tokens":
            monkeypatch.setattr(fingerprint, "_KEYS", fingerprint.re.compile("(nothing)"))
