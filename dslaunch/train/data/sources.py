"""The raw records of a data source, one at a time, in bounded memory.

A source is a file (.jsonl, .ndjson, .json, .parquet; the first three also
gzipped), a ``datasets`` directory (``save_to_disk``), a directory of data files,
or a hub id. Each record carries the place it came from.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from dslaunch.core.data_files import JSON, JSON_LINES, PARQUET, describe_data_suffixes
from dslaunch.core.errors import ConfigError, EnvironmentNotReady, one_line
from dslaunch.core.plan import DataSource
from dslaunch.train.data.json_array import iterate_json_array
from dslaunch.train.data.records import Record

_PARQUET_BATCH_ROWS = 256


def iterate_records(source: DataSource) -> Iterator[Record]:
    """Every record of ``source``, in its order.

    Raises ConfigError, naming the file and where it can the line, for a source
    that is missing or of no known kind, or that cannot be read any further.
    """
    if source.kind == "file":
        yield from _iterate_file(Path(source.path))
    else:
        yield from _iterate_dataset(load_dataset(source), f"{source.path}[{source.split}]")


def load_dataset(source: DataSource) -> Any:
    """The ``datasets.Dataset`` of a directory or hub source; memory-mapped, read lazily.

    Raises ConfigError if it or its split does not exist, EnvironmentNotReady if
    the hub cannot be reached.
    """
    import datasets

    datasets.disable_progress_bars()
    if source.kind == "directory":
        return _load_directory(Path(source.path), source.split)
    try:
        return datasets.load_dataset(source.path, split=source.split)
    except Exception as error:  # unknown id or split, no network, a loading script, ...: many kinds
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise EnvironmentNotReady(
                f"data set {source.path!r} could not be fetched: {one_line(error)}",
                hint="download it on a machine with network, or give a local file",
            ) from error
        raise ConfigError(
            f"data set {source.path!r}, split {source.split!r}: {one_line(error)}",
            hint="check the id and the split; a local file or directory must exist",
        ) from error


def drop_nulls(value: Any) -> Any:
    """``value`` without the keys that hold None, at every depth.

    Columnar storage gives every struct the union of all keys, so a None there
    mostly means "not in this record": a tool call would otherwise gain
    arguments that the data never had.
    """
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def _iterate_dataset(dataset: Any, name: str) -> Iterator[Record]:
    number = 0
    try:
        for value in dataset:
            number += 1
            yield Record(f"{name} row {number}", drop_nulls(value))
    except Exception as error:  # a streamed file is parsed only now; each format has its own errors
        raise ConfigError(f"{name} cannot be read after row {number}: {one_line(error)}") from error


def _iterate_file(path: Path) -> Iterator[Record]:
    name = path.name.lower()
    if not path.is_file():
        raise ConfigError(f"data file {path} does not exist", hint="check data.train and data.eval")
    if name.endswith(PARQUET):
        yield from _iterate_parquet(path)
    elif name.endswith(JSON_LINES):
        yield from _iterate_json_lines(path)
    elif name.endswith(JSON):
        yield from _iterate_json(path)
    else:
        raise ConfigError(
            f"data file {path} has none of the endings dslaunch reads",
            hint=f"write it as {describe_data_suffixes()}",
        )


def _open_binary(path: Path) -> IO[bytes]:
    try:
        if path.name.lower().endswith(".gz"):
            return cast(IO[bytes], gzip.open(path, "rb"))
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"data file {path} cannot be opened: {error.strerror}") from None


def _iterate_json_lines(path: Path) -> Iterator[Record]:
    with _open_binary(path) as stream:
        lines = enumerate(stream, start=1)
        while True:
            try:
                number, raw = next(lines)
            except StopIteration:
                return
            except (OSError, EOFError) as error:  # a truncated or damaged gzip file
                raise ConfigError(f"data file {path} cannot be read: {one_line(error)}") from None
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield _parse_line(raw, f"{path}:{number}")


def _parse_line(raw: bytes, where: str) -> Record:
    try:
        return Record(where, json.loads(raw.decode("utf-8").rstrip("\r\n")))
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start + 1} of the line is 0x{raw[error.start]:02x})"
    except RecursionError:
        problem = "nested too deeply to be read"
    except json.JSONDecodeError as error:
        where, problem = f"{where}:{error.colno}", f"not valid JSON: {error.msg}"
    return Record(where, error=ConfigError(f"{where}: {problem}", hint="one JSON object a line"))


def _iterate_json(path: Path) -> Iterator[Record]:
    """A .json file: an array of records, or, as many such files are, JSON Lines."""
    with _open_binary(path) as stream:
        head = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        with _open_binary(path) as stream:
            yield from iterate_json_array(stream, str(path))
    elif head.startswith(b"{") and _first_line_is_json(path):
        yield from _iterate_json_lines(path)
    else:
        raise ConfigError(
            f"data file {path} is neither a JSON array of records nor one JSON object a line",
            hint="if the records are under a key, write that list alone to a file",
        )


def _first_line_is_json(path: Path) -> bool:
    first = next(_iterate_json_lines(path), None)
    return first is not None and first.error is None


def _iterate_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(f"{path} row {number}", drop_nulls(value))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"data file {path} after row {number} is not readable parquet: {one_line(error)}"
        ) from None


def _load_directory(path: Path, split: str) -> Any:
    import datasets

    if not path.is_dir():
        raise ConfigError(f"data directory {path} does not exist", hint="check data.train and data.eval")
    if not ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        try:
            return datasets.load_dataset(str(path), split=split, streaming=True)
        except Exception as error:  # datasets raises its own kinds for every sort of bad folder
            raise ConfigError(f"data directory {path}, split {split!r}: {one_line(error)}") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # arrow, JSON and OS errors alike mean a damaged directory
        raise ConfigError(f"data directory {path} cannot be read: {one_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(
                f"data directory {path} has no split {split!r}", hint=f"it has {', '.join(loaded)}"
            )
        return loaded[split]
    return loaded
