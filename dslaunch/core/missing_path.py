"""What to say of a path that is not there: where it was looked for, and the nearest that is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dslaunch.core.errors import ConfigError

Entry = os.DirEntry[str]


def not_found(
    what: str, path: Path | str, *, hint: str | None = None, wanted: Callable[[Entry], bool] | None = None
) -> ConfigError:
    """The error for ``what`` that is not at ``path``; ``hint`` where nothing there is called alike."""
    near = nearest_path(Path(path), wanted)
    hint = f"did you mean {near}?" if near else hint
    return ConfigError(f"{what} not found: {path}{looked_in(path)}", hint=hint)


def looked_in(path: Path | str) -> str:
    """The directory that a relative ``path`` was looked for in, in brackets; nothing for an absolute one."""
    return "" if os.path.isabs(path) else f" (in {Path.cwd()})"


def nearest_path(path: Path, wanted: Callable[[Entry], bool] | None = None) -> str | None:
    """An existing path with a name close to ``path``'s, or with its name in a folder near.

    ``wanted``: which entries of a folder count; all, where not given.
    """
    if path.parent.is_dir():
        near = _near_name(path.parent, path.name, wanted)
        return str(path.parent / near) if near else _in_a_folder(path) if wanted is None else None
    folder = _near_name(path.parent.parent, path.parent.name, os.DirEntry.is_dir)
    candidate = path.parent.parent / folder / path.name if folder else None
    return str(candidate) if candidate is not None and candidate.exists() else None


def _in_a_folder(path: Path) -> str | None:
    """The file of that name one folder further down, where there is but one."""
    try:
        with os.scandir(path.parent) as entries:
            folders = [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return None
    found = [str(path.parent / folder / path.name) for folder in folders]
    there = [name for name in found if os.path.isfile(name)]
    return there[0] if len(there) == 1 else None


def _near_name(folder: Path, name: str, wanted: Callable[[Entry], bool] | None) -> str | None:
    import difflib

    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if wanted is None or wanted(entry)]
    except OSError:
        return None
    near = difflib.get_close_matches(name, names, n=1)
    return near[0] if near else None
