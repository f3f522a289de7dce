"""Where a hub id lies in the local hub cache, if it does. Looks at files only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cached_model(name: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """The snapshot directory of ``org/model`` in the cache of huggingface_hub, or None."""
    folder = _cache(environ) / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    try:
        commit = reference.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision or ""
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and (snapshot / "config.json").is_file() else None


def _cache(environ: Mapping[str, str]) -> Path:
    if found := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(found)
    if home := environ.get("HF_HOME"):
        return Path(home) / "hub"
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "huggingface" / "hub"
