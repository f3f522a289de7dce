"""What resolving must know of the world, looked up here so that resolving itself is pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dslaunch.config.load import LoadedSpec
from dslaunch.config.spec import RunSpec
from dslaunch.core.devices import Inventory, probe_inventory
from dslaunch.core.errors import HostfileError
from dslaunch.core.hostfile import parse_hostfile
from dslaunch.core.topology import Host

_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".ndjson")


@dataclass(frozen=True)
class PathFact:
    """What a path of the run file is. ``absolute`` is it as seen from where it was written."""

    kind: Literal["file", "directory", "missing"]
    absolute: str
    parent_exists: bool = False
    nearest: str | None = None  # an existing path whose name is close


@dataclass(frozen=True)
class Facts:
    """The devices of this machine, the hostfile's hosts and the paths that the run file names.

    ``paths`` is keyed by key path (``model.path``, ``data.train[0].path``).
    ``hosts`` is None without a hostfile. ``model_dtype`` is what the model's
    config.json says of its weights, None where it says nothing or is not local.
    """

    inventory: Inventory
    hosts: tuple[Host, ...] | None = None
    local_names: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    paths: Mapping[str, PathFact] = field(default_factory=dict)
    model_dtype: str | None = None


def probe_facts(loaded: LoadedSpec[Any], *, cwd: Path, environ: Mapping[str, str]) -> Facts:
    """Look at this machine and at the files that the spec names. Opens no network connection.

    Raises HostfileError where the hostfile is missing or wrong, ConfigError for
    a local GPU that is not in the device table.
    """
    paths = {key: _path_fact(text, _base(loaded, key, cwd)) for key, text in written_paths(loaded.spec)}
    hosts = None
    if loaded.spec.cluster.hostfile is not None:
        hosts = load_hostfile(paths["cluster.hostfile"], loaded.where("cluster.hostfile"))
    model = paths.get("model.path")
    return Facts(
        inventory=probe_inventory(environ),
        hosts=hosts,
        local_names=("localhost", "127.0.0.1", "::1", os.uname().nodename),
        paths=paths,
        model_dtype=_model_dtype(Path(model.absolute)) if model and model.kind == "directory" else None,
    )


def load_hostfile(fact: PathFact, where: str) -> tuple[Host, ...]:
    """Read and parse a hostfile. A missing one is an error, never a local run."""
    if fact.kind != "file":
        what = "not found" if fact.kind == "missing" else "is a directory"
        hint = f"did you mean {fact.nearest}?" if fact.nearest else "for a local run leave hostfile out"
        raise HostfileError(f"{where}hostfile {what}: {fact.absolute}", hint=hint)
    try:
        text = Path(fact.absolute).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise HostfileError(f"{where}cannot read hostfile {fact.absolute}: {reason}") from None
    return parse_hostfile(text, fact.absolute)


def looks_like_path(text: str) -> bool:
    """Whether a text can only be meant as a path of this machine, not as a hub id."""
    return (
        text.startswith((".", "/", "~"))
        or text.endswith((".gguf", *_DATA_SUFFIXES))
        or text.count("/") > 1
        or "\\" in text
    )


def written_paths(spec: Any) -> list[tuple[str, str]]:
    """Key path and text of everything in the spec that is or may be a path."""
    found: list[tuple[str, str | None]] = [("cluster.hostfile", spec.cluster.hostfile)]
    if spec.model is not None:
        found += [("model.path", spec.model.path), ("model.tokenizer", spec.model.tokenizer)]
        found.append(("model.chat_template", spec.model.chat_template))
    for name in ("offload_optimizer", "offload_param"):
        if (part := getattr(spec.zero_optimization, name)) is not None:
            found.append((f"zero_optimization.{name}.nvme_path", part.nvme_path))
    if isinstance(spec, RunSpec):
        for kind in ("train", "eval"):
            for i, source in enumerate(getattr(spec.data, kind)):
                found.append((f"data.{kind}[{i}].path", source.path))
        found += [("data.cache_dir", spec.data.cache_dir), ("launch.cwd", spec.launch.cwd)]
        found.append(("output.run_dir", spec.output.run_dir))
    return [(key, text) for key, text in found if text is not None]


def _base(loaded: LoadedSpec[Any], key: str, cwd: Path) -> Path:
    """Paths in the file are relative to the file; on the command line, to where it was typed."""
    return loaded.base_dir if loaded.line(key) > 0 else cwd


def _path_fact(text: str, base: Path) -> PathFact:
    path = Path(os.path.normpath(base / Path(text).expanduser()))
    if path.is_dir():
        return PathFact("directory", str(path))
    if path.exists():
        return PathFact("file", str(path))
    return PathFact("missing", str(path), _names_a_place(text, path), _nearest(path))


def _names_a_place(text: str, path: Path) -> bool:
    return "/" in text and path.parent.is_dir()


def _nearest(path: Path) -> str | None:
    import difflib

    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, n=1)
    return str(path.parent / near[0]) if near else None


def _model_dtype(directory: Path) -> str | None:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the worker reports a broken model directory; here it is only advice
    value = config.get("dtype", config.get("torch_dtype")) if isinstance(config, dict) else None
    return value if isinstance(value, str) else None
