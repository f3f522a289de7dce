"""Write a file so that a reader sees the old text or the new one, never half of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Replace ``path`` by ``data``: temp file beside it, fsync, rename, fsync of the folder.

    ``mode`` is the file's permission bits; without it the umask decides. What is no regular file
    (/dev/null, /dev/stdout, a pipe) is written to as it is, and a link stays one.
    Raises OSError as the file system gives it; ``path`` is then unchanged.
    """
    if path.parent == Path("/dev") or (path.exists() and not path.is_file() and not path.is_dir()):
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    fd, temp_name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temp_name, mode if mode is not None else 0o666 & ~umask())
        os.replace(temp_name, path)
    except BaseException:
        Path(temp_name).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """As :func:`write_bytes`, for UTF-8 text."""
    write_bytes(path, text.encode("utf-8"), mode=mode)


def write_json(path: Path, value: Mapping[str, Any], *, mode: int | None = None) -> None:
    """As :func:`write_bytes`, for an object as indented JSON. NaN and inf are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", mode=mode)


def fsync_directory(path: Path) -> None:
    """Make a rename in ``path`` durable. File systems that cannot do it are let be."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:  # some network file systems refuse fsync on a directory
        pass
    finally:
        os.close(fd)


def umask() -> int:
    """The process's umask."""
    # The only way to read it is to set it.
    current = os.umask(0o077)
    os.umask(current)
    return current
