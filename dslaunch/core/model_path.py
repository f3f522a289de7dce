"""What a user means by the path of a model, by its name alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

ModelKind = Literal["hub", "directory", "gguf"]


def is_gguf(path: str) -> bool:
    """Whether ``path`` is the name of a .gguf file, in any case."""
    return path.lower().endswith(".gguf")


def model_kind(path: str) -> ModelKind:
    """A directory that exists, a .gguf file (which may be missing), or else a hub id."""
    if Path(path).is_dir():
        return "directory"
    return "gguf" if is_gguf(path) else "hub"
