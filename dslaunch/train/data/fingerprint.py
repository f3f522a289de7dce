"""What a token cache depends on, as digests: data content, tokenizer, template, code."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from dslaunch.core.atomic import write_text
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import DataSource
from dslaunch.train.data.file_lock import exclusive
from dslaunch.train.data.sources import load_dataset

# Raise it when the same record would give other tokens, masks or drops.
CODE_VERSION = 1

_KEYS = re.compile(r'"(\w+)":')
_REMEMBER_FROM_BYTES = 8 << 20
_SETTLED_S = 2.0
_CHUNK_BYTES = 1 << 20


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of everything of the tokenizer that decides ids and rendered text."""
    return digest(
        {
            "class": type(tokenizer).__name__,
            "backend": hashlib.sha256(_backend_text(tokenizer).encode()).hexdigest(),
            "special_tokens": {key: str(value) for key, value in tokenizer.special_tokens_map.items()},
            "chat_template": tokenizer.chat_template,
            "versions": [tokenizers.__version__, transformers.__version__],
        }
    )


def _backend_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer.json text without truncation and padding, which an earlier call may have set."""
    text: str = tokenizer.backend_tokenizer.to_str()
    before, found, after = text.partition('"added_tokens"')
    if found and set(_KEYS.findall(before)) >= {"truncation", "padding"} and len(before) < 1000:
        return after  # they stand first: no need to parse megabytes at every start
    backend = json.loads(text)
    return json.dumps({key: backend[key] for key in sorted(backend) if key not in ("truncation", "padding")})


def fingerprint_source(source: DataSource, cache_dir: Path) -> str:
    """Digest of a source's content (files) or of the fingerprint its builder gives it (hub)."""
    if source.kind == "hub":
        # Of the downloaded revision; datasets derives it from the content's own hashes.
        return digest(["hub", source.path, source.split, str(load_dataset(source)._fingerprint)])
    return digest([source.kind, [[name, _hash_file(path, cache_dir)] for name, path in source_files(source)]])


def source_state(source: DataSource) -> list[tuple[str, int, int]]:
    """(name, size, mtime in ns) of a local source's files: what changes when somebody writes to them."""
    if source.kind == "hub":
        return []
    return [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in source_files(source)]


def source_files(source: DataSource) -> list[tuple[str, Path]]:
    """The files of a local source: name within it, and path; sorted. Hidden ones do not count."""
    path = Path(source.path)
    if path.is_file():
        return [(path.suffix.lower(), path)]
    if not path.is_dir():
        raise ConfigError(f"data {source.kind} {path} does not exist", hint="check data.train and data.eval")
    names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return [
        (name, path / name) for name in names if not any(part.startswith(".") for part in name.split("/"))
    ]


def _hash_file(path: Path, cache_dir: Path) -> str:
    """SHA-256 of a file. Large ones are hashed once for each state the file system tells apart.

    The change time is part of that state: it moves on every write, also where
    size and modification time were put back. Ranks of one host that ask at the
    same time wait for the first.
    """
    stat = path.stat()
    if stat.st_size < _REMEMBER_FROM_BYTES:
        return _hash_content(path)
    state = [str(path.resolve()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    known = cache_dir / "hashes" / digest(state)
    known.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(known.with_suffix(".lock"), f"hashing {path}"):
        if known.exists():
            return known.read_text(encoding="ascii")
        result = _hash_content(path)
        # A write within the clock's grain of the last change would leave the same state.
        if time.time() - stat.st_ctime > _SETTLED_S and os.stat(path).st_ctime_ns == stat.st_ctime_ns:
            write_text(known, result)
        return result


def _hash_content(path: Path) -> str:
    total = hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                total.update(chunk)
    except OSError as error:
        raise ConfigError(f"data file {path} cannot be read: {error.strerror}") from None
    return total.hexdigest()
