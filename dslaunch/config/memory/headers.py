"""Tensor names, shapes and types from the headers of .safetensors and .gguf files; no weight is read.

Formats: https://github.com/huggingface/safetensors (README, "Format") and
https://github.com/ggml-org/ggml (docs/gguf.md).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dslaunch.config.memory.tensors import Tensor
from dslaunch.core.bounded import open_regular
from dslaunch.core.errors import ConfigError

_MAX_HEADER = 100_000_000  # the safetensors library refuses more
_MAX_STRING = 1 << 28
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "U8": "uint8",
}


@dataclass(frozen=True)
class Header:
    """What a weight file says of itself. ``dtype``: of most bytes, torch's name (gguf: None)."""

    tensors: tuple[Tensor, ...]
    dtype: str | None
    metadata: dict[str, Any]


def read_safetensors(path: Path) -> Header:
    """The header of a .safetensors file. Raises ConfigError where it is none or is cut short."""
    try:
        with open_regular(path) as stream:
            (length,) = struct.unpack("<Q", _exactly(stream, 8))
            if length > min(_MAX_HEADER, path.stat().st_size):
                raise ValueError("its header is longer than the file")
            value = json.loads(_exactly(stream, length))
        if not isinstance(value, dict):
            raise ValueError("its header is no JSON object")
        metadata = dict(value.pop("__metadata__", {}))
        tensors = tuple(Tensor(name, tuple(map(int, item["shape"]))) for name, item in value.items())
        if not tensors:
            raise ValueError("it holds no tensor")
        if any(size < 0 for tensor in tensors for size in tensor.shape):
            raise ValueError("a size in it is below zero")
        kinds: dict[str, int] = {}
        for item in value.values():
            begin, end = item["data_offsets"]
            kinds[item["dtype"]] = kinds.get(item["dtype"], 0) + end - begin
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(
            f"{path} is no safetensors file: {error}",
            hint="a Git LFS pointer or an interrupted download looks like this: fetch it again",
        ) from None
    main = max(kinds, key=lambda kind: kinds[kind], default=None)
    return Header(tensors, _SAFETENSORS_DTYPES.get(main or "", main), metadata)


def read_gguf(path: Path) -> Header:
    """The header of a .gguf file (version 2 or 3, little-endian). Raises ConfigError where it is none.

    A long array of the metadata (the vocabulary) is given by its length alone.
    """
    try:
        with open_regular(path) as stream:
            magic, version, count, num_keys = struct.unpack("<4sIQQ", _exactly(stream, 24))
            if magic != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            if version not in (2, 3):
                raise ValueError(f"it is of version {version}, or big-endian; 2 and 3 can be read")
            metadata = {}
            for _ in range(num_keys):
                key = _string(stream)
                metadata[key] = _value(stream, _number(stream, "<I"))
            tensors = tuple(_tensor(stream) for _ in range(count))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, struct.error) as error:
        raise ConfigError(f"{path} is no readable GGUF file: {error}", hint="fetch it again") from None
    return Header(tensors, None, metadata)


_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


def _tensor(stream: BinaryIO) -> Tensor:
    name = _string(stream)
    rank = _number(stream, "<I")
    if rank > 8:
        raise ValueError(f"tensor {name!r} has {rank} dimensions")
    shape = struct.unpack(f"<{rank}Q", _exactly(stream, 8 * rank))
    _exactly(stream, 12)  # type and offset
    return Tensor(name, tuple(reversed(shape)))  # ggml's innermost dimension comes first


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(stream)
    if kind == _ARRAY:
        return _array(stream)
    return _number(stream, _NUMBERS[kind])


def _array(stream: BinaryIO) -> Any:
    kind, length = struct.unpack("<IQ", _exactly(stream, 12))
    if kind in _NUMBERS:
        size = struct.calcsize(_NUMBERS[kind])
        if length > 1024:
            stream.seek(size * length, 1)
            return length
        return [_number(stream, _NUMBERS[kind]) for _ in range(length)]
    skip: Callable[[BinaryIO], Any] = _string if kind == _STRING else _array
    for _ in range(length):
        skip(stream)
    return length


def _string(stream: BinaryIO) -> str:
    length = _number(stream, "<Q")
    if length > _MAX_STRING:
        raise ValueError("a text in it is impossibly long")
    return _exactly(stream, length).decode("utf-8", "replace")


def _number(stream: BinaryIO, form: str) -> Any:
    return struct.unpack(form, _exactly(stream, struct.calcsize(form)))[0]


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise ValueError("it is cut short")
    return data
