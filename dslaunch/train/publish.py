"""A directory that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dslaunch.core.atomic import fsync_directory


@contextmanager
def new_directory(target: Path, *, locked: bool = False) -> Iterator[Path]:
    """Yields an empty directory beside ``target``; on success it takes that name.

    ``locked``: the caller holds a lock on ``target``. The directory's name is
    then always the same, so that what a killed process left of it is removed.

    What was written is flushed to disk first, with the permissions of the
    umask (safetensors makes its files 0600). A directory that had the name
    goes only once the new one is complete. On any error nothing has changed.
    """
    scratch = target.parent / (f".{target.name}.new" if locked else f".{target.name}.new-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)  # of a dead process that had our id, or the lock
    scratch.mkdir()
    try:
        yield scratch
        _settle(scratch)
        _swap(scratch, target)
        fsync_directory(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _settle(directory: Path) -> None:
    mode = directory.stat().st_mode & 0o666  # mkdir has followed the umask; a file has no x bits
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    fsync_directory(directory)


def _swap(scratch: Path, target: Path) -> None:
    if not target.exists():
        os.rename(scratch, target)
        return
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    try:
        os.rename(target, old)
        os.rename(scratch, target)
    except BaseException:  # a signal's, too
        if old.exists() and not target.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
