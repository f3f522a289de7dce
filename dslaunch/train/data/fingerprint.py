"""What a token cache depends on, as digests: data content, tokenizer, template, code."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import DataSource
from dslaunch.train.data.sources import load_dataset
from dslaunch.train.file_hash import hash_file

# Raise it when the same record would give other tokens, masks or drops.
CODE_VERSION = 2

_KEYS = re.compile(r'"(\w+)":')


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
    hashes = cache_dir / "hashes"
    return digest([source.kind, [[name, hash_file(path, hashes)] for name, path in source_files(source)]])


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
