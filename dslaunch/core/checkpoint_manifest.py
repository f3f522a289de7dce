"""What a checkpoint directory holds, and whether it is all there. Standard library only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dslaunch.core.errors import ConfigError
from dslaunch.core.run_dir import checkpoint_step

MANIFEST = "manifest.json"
LATEST = "latest"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that must fit before a checkpoint is loaded.

    ``trainable``: parameter name -> shape, of those that require a gradient.
    ``trainable_only``: frozen parameters are not in the checkpoint (adapters).
    ``extra``: what the caller of ``save_checkpoint`` gave, plain JSON.
    ``files``: path inside the checkpoint -> entry, all files but the manifest.
    ``engine``: whose state it is, ``deepspeed`` or ``torch``.
    ``weight_sums``: of each rank, what ``trained.weight_sums`` gave; empty in older checkpoints.
    """

    step: int
    world_size: int
    zero_stage: int
    precision: str
    deepspeed_version: str
    trainable_only: bool
    trainable: Mapping[str, tuple[int, ...]]
    extra: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    weight_sums: tuple[tuple[float, float] | None, ...] = ()
    engine: str = "deepspeed"
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of one checkpoint directory.

    Raises ConfigError where it is missing (the save did not finish) or cannot be read.
    """
    path = checkpoint / MANIFEST
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{checkpoint} has no {MANIFEST}: saving it did not finish") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    found = value.get("schema_version") if isinstance(value, dict) else None
    if found != SCHEMA_VERSION:
        raise ConfigError(f"{path}: schema_version is {found!r}, this dslaunch reads {SCHEMA_VERSION}")
    try:
        files = {name: FileEntry(**entry) for name, entry in value.pop("files").items()}
        trainable = {name: tuple(shape) for name, shape in value.pop("trainable").items()}
        sums = tuple(None if pair is None else (pair[0], pair[1]) for pair in value.pop("weight_sums", ()))
        return Manifest(files=files, trainable=trainable, weight_sums=sums, **value)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a manifest: {error}") from None


def list_files(checkpoint: Path) -> list[str]:
    """Every file below ``checkpoint`` but the manifest, as sorted relative paths."""
    files = (p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file())
    return sorted(name for name in files if name != MANIFEST)


def hash_files(checkpoint: Path, names: Iterable[str], *, sync: bool) -> dict[str, FileEntry]:
    """Size and SHA-256 of each file. ``sync``: also push it to the disk before it is believed."""
    entries = {}
    for name in names:
        digest = hashlib.sha256()
        with (checkpoint / name).open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
            size = stream.tell()
            if sync:
                os.fsync(stream.fileno())
        entries[name] = FileEntry(size=size, sha256=digest.hexdigest())
    return entries


def find_fault(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """The first thing wrong with the files ``names`` (all sizes are looked at), or None."""
    for name, entry in manifest.files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != entry.size:
            return f"{name} has {size} bytes, the manifest says {entry.size}"
    try:
        found = hash_files(checkpoint, names, sync=False)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    for name, entry in found.items():
        if entry.sha256 != manifest.files[name].sha256:
            return f"the content of {name} is not what was saved (SHA-256 differs)"
    return None


def candidates(root: Path) -> list[Path]:
    """Checkpoint directories to try: the one that ``latest`` names, then the others, newest first."""
    if not root.is_dir():
        return []
    steps = {checkpoint_step(p): p for p in root.iterdir() if p.is_dir()}
    steps.pop(None, None)
    ordered = [steps[step] for step in sorted((s for s in steps if s is not None), reverse=True)]
    try:
        named = root / (root / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ordered
    return sorted(ordered, key=lambda path: path != named)  # stable: only `named` moves


def latest_checkpoint(root: Path) -> Path | None:
    """The first candidate that has a readable manifest; contents are not verified. None: there is none."""
    for path in candidates(root):
        try:
            read_manifest(path)
        except ConfigError:
            continue
        return path
    return None
