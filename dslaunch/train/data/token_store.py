"""Tokenised samples of one source on disk, read by memory map.

    <cache_dir>/<key>/tokens.bin      int32, all samples end to end
                      mask.bin        uint8, 1 = trained
                      offsets.bin     int64, [num_samples + 1], where each sample begins
                      supervised.bin  int32, [num_samples], trained tokens of each
                      places.txt      where each sample's record stands in its source, a line each
                      meta.json       the source's report; its presence makes the folder complete
    <cache_dir>/<key>.lock            held by the process that builds it

A store is written under a temporary name and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.train.data.collate import Sample
from dslaunch.train.data.report import SourceReport
from dslaunch.train.publish import new_directory

_ARRAYS = {"tokens": np.int32, "mask": np.uint8, "offsets": np.int64, "supervised": np.int32}
_PLACES = "places.txt"
_FILES = {**{name: f"{name}.bin" for name in _ARRAYS}, "places": _PLACES}


class TokenStore:
    """A finished store. Raises ValueError where a file has not the size that meta.json says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        report = meta["report"]
        self.report = SourceReport(**{**report, "dropped_where": tuple(report["dropped_where"])})
        arrays = {
            name: _map_array(path / f"{name}.bin", kind, meta["sizes"][name])
            for name, kind in _ARRAYS.items()
        }
        self._tokens, self._mask = arrays["tokens"], arrays["mask"]
        self.offsets: npt.NDArray[np.int64] = arrays["offsets"]
        self.num_supervised: npt.NDArray[np.int32] = arrays["supervised"]

    def __len__(self) -> int:
        return len(self.num_supervised)

    def __getitem__(self, index: int) -> Sample:
        start, stop = self.offsets[index], self.offsets[index + 1]
        return Sample(self._tokens[start:stop], self._mask[start:stop].view(np.bool_))

    def where(self, index: int) -> str:
        """``file:line`` or the like of sample ``index``; for messages, since it is looked up in a text."""
        try:
            with open(self._path / _PLACES, encoding="utf-8") as lines:
                place = next(islice(lines, index, None)).rstrip("\n")
        except (OSError, StopIteration):  # a cache of an earlier version has none
            return f"{self.report.path} kept record {index + 1}"
        return self.report.path + place

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, [num_samples]."""
        return np.diff(self.offsets)


class StoreWriter:
    """Appends samples to a store that is being built, in constant memory."""

    def __init__(self, files: Mapping[str, IO[bytes]]) -> None:
        self._files = files
        self._position = 0
        files["offsets"].write(np.int64(0).tobytes())

    def append(self, sample: Sample, num_supervised: int, place: str) -> None:
        """Add one sample at the end. ``place``: what follows its source's path in the place of its record."""
        self._position += len(sample.input_ids)
        self._files["tokens"].write(sample.input_ids.astype(np.int32, copy=False).tobytes())
        self._files["mask"].write(sample.completion_mask.astype(np.uint8).tobytes())
        self._files["offsets"].write(np.int64(self._position).tobytes())
        self._files["supervised"].write(np.int32(num_supervised).tobytes())
        self._files["places"].write(f"{place}\n".encode())


class StoreInProgress:
    """A store being written: append through ``writer``, then set ``report`` before the block ends."""

    def __init__(self, writer: StoreWriter) -> None:
        self.writer = writer
        self.report: SourceReport | None = None


@contextmanager
def write_store(path: Path) -> Iterator[StoreInProgress]:
    """Build the store at ``path``; it appears when the block ends without an error.

    The caller holds the lock of ``path``. Raises EnvironmentNotReady when the
    disk is full or not writable.
    """
    with translated_disk_errors(path.parent), new_directory(path, locked=True) as folder:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(folder / file, "wb")) for name, file in _FILES.items()}
            store = StoreInProgress(StoreWriter(files))
            yield store
        assert store.report is not None
        _write_meta(folder, store.report)


@contextmanager
def translated_disk_errors(cache_dir: Path) -> Iterator[None]:
    """Turn the OSErrors of a cache folder into a sentence for the user."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free space there, or set data.cache_dir to another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            hint = "set data.cache_dir to a folder that you can write to"
        else:
            raise
        raise EnvironmentNotReady(
            f"the token cache {cache_dir} cannot be written: {error.strerror}", hint=hint
        ) from error


def _write_meta(folder: Path, report: SourceReport) -> None:
    sizes = {name: (folder / f"{name}.bin").stat().st_size for name in _ARRAYS}
    text = json.dumps({"sizes": sizes, "report": dataclasses.asdict(report)}, indent=2)
    (folder / "meta.json").write_text(text, encoding="utf-8")


def _map_array(path: Path, kind: Any, size: int) -> npt.NDArray[Any]:
    if path.stat().st_size != size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {size}")
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=kind)
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))
