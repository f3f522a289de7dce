"""SHA-256 of files that may be large, remembered for as long as the file is the same."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from dslaunch.core.atomic import write_text
from dslaunch.core.errors import ConfigError
from dslaunch.core.file_lock import exclusive
from dslaunch.train.waiting import waiting_for

_REMEMBER_FROM_BYTES = 8 << 20
_SETTLED_S = 2.0
_CHUNK_BYTES = 1 << 20


def hash_file(path: Path, hashes_dir: Path) -> str:
    """SHA-256 of a file. Large ones are hashed once for each state the file system tells apart.

    The change time is part of that state: it moves on every write, also where
    size and modification time were put back. What is known is kept in
    ``hashes_dir``; ranks of one host that ask at the same time wait for the first.
    Raises ConfigError where the file cannot be read, OSError where ``hashes_dir``
    cannot be written.
    """
    stat = path.stat()
    if stat.st_size < _REMEMBER_FROM_BYTES:
        return _hash_content(path)
    state = [str(path.resolve()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    known = hashes_dir / hashlib.sha256(json.dumps(state).encode()).hexdigest()
    hashes_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(known.with_suffix(".lock"), on_wait=waiting_for(f"hashing {path}")):
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
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return total.hexdigest()
