"""A .gguf file as an ordinary Hugging Face directory, made once and kept in the cache.

transformers reads a .gguf slowly (every rank parses it anew), refuses to save
what it read, and loads it whole on every rank under ZeRO-3. So the first
process that needs the file writes it as safetensors, with its tokenizer, and
everything else reads that.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dslaunch.core.errors import ConfigError, EnvironmentNotReady, one_line
from dslaunch.core.file_lock import exclusive
from dslaunch.train.file_hash import hash_file
from dslaunch.train.publish import new_directory
from dslaunch.train.waiting import waiting_for

_COMPLETE = "dslaunch-source.json"  # written last: a directory without it is not used


def convert_gguf(path: Path, dtype: torch.dtype, models_dir: Path) -> Path:
    """The Hugging Face directory of the .gguf file ``path`` at ``dtype``; converts it where needed.

    ``models_dir`` holds all conversions; each is keyed by the file's content,
    the dtype and the versions of the libraries that read it. Several processes
    may call this at once: one converts, the others wait for it.
    Raises ConfigError where the file cannot be read as a causal language model,
    EnvironmentNotReady where the disk is too small or cannot be written.
    """
    if not path.is_file():
        raise ConfigError(f"no model file {path}")
    path = path.resolve()  # a link and its file are one model
    try:
        target = models_dir / f"{path.stem}-{_key(path, dtype, models_dir)}"
        if (target / _COMPLETE).exists():
            return target
        models_dir.mkdir(parents=True, exist_ok=True)
        lock = models_dir / f".{target.name}.lock"
        with exclusive(lock, on_wait=waiting_for(f"converting {path.name}")):
            if not (target / _COMPLETE).exists():
                _convert_into(path, dtype, target)
    except OSError as error:
        raise EnvironmentNotReady(
            f"cannot keep the converted {path.name} in {models_dir}: {error.strerror or error}",
            hint="set DSLAUNCH_CACHE to a directory with room for the model",
        ) from error
    return target


def _key(path: Path, dtype: torch.dtype, models_dir: Path) -> str:
    content = hash_file(path, models_dir / "hashes")  # remembered: each rank asks several times
    readers = (f"{name} {version(name)}" for name in ("transformers", "gguf", "torch"))
    return hashlib.sha256("\n".join([content, str(dtype), *readers]).encode()).hexdigest()[:16]


def _convert_into(path: Path, dtype: torch.dtype, target: Path) -> None:
    print(
        f"converting {path.name} to safetensors ({dtype}), once; this may take a minute",
        file=sys.stderr,
        flush=True,
    )
    model, tokenizer = _read_gguf(path, dtype)
    _check_room(model, target.parent)
    with new_directory(target, locked=True) as scratch:
        save_whole(_unquantized(model), scratch)
        tokenizer.save_pretrained(scratch)
        (scratch / _COMPLETE).write_text(json.dumps({"source": str(path)}) + "\n", encoding="utf-8")


def save_whole(model: Any, directory: Path) -> None:
    """``save_pretrained`` that writes on whichever rank calls it.

    transformers 5 writes nothing, without a word, where torch.distributed is
    initialised and this is not rank 0 (transformers/distributed/mixin.py,
    should_save_on_this_rank); the rank that converts is the first to need it.
    """
    model.should_save_on_this_rank = lambda is_main_process: True
    model.save_pretrained(directory)
    assert (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def _read_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
    except ImportError as error:
        raise EnvironmentNotReady(
            f"reading {path.name} needs another package: {error}", hint="pip install gguf"
        ) from error
    except Exception as error:  # the readers raise whatever they trip over in a broken file
        raise ConfigError(
            f"{path} cannot be read as a language model: {type(error).__name__}: {one_line(error)}",
            hint="the file may be cut short, or of an architecture that transformers does not know",
        ) from error
    return model, tokenizer


def _unquantized(model: Any) -> Any:
    """The same weights in a model that was never quantized: transformers refuses to save the other."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict(), strict=True, assign=True)
    _assign_buffers(fresh, model)
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    return fresh


def _assign_buffers(fresh: Any, model: Any) -> None:
    # Buffers outside the state dict (rotary tables) would stay on the meta device.
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        fresh.get_submodule(owner)._buffers[leaf] = buffer


def _check_room(model: Any, directory: Path) -> None:
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    free = shutil.disk_usage(directory).free
    if free < needed * 1.05:
        raise EnvironmentNotReady(
            f"{directory} has {free / 2**30:.1f} GiB free; the converted model takes "
            f"{needed / 2**30:.1f} GiB",
            hint="set DSLAUNCH_CACHE to a directory with more room",
        )
