"""What resolving must know of the world, looked up here so that resolving itself is pure."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dslaunch.config.load import LoadedSpec
from dslaunch.config.spec import RunSpec
from dslaunch.core.allocation import Allocation, probe_allocation
from dslaunch.core.bounded import hint_of, open_regular, read_bounded
from dslaunch.core.data_files import DATA_SUFFIXES, OTHER_SUFFIXES, is_data_file
from dslaunch.core.devices import Inventory, probe_inventory
from dslaunch.core.errors import ConfigError, ConfigErrors, HostfileError
from dslaunch.core.host_lookup import check_named_once
from dslaunch.core.host_memory import local_memory_bytes
from dslaunch.core.hostfile import read_hostfile
from dslaunch.core.missing_path import nearest_path
from dslaunch.core.plan import is_image_file
from dslaunch.core.templating import TemplateFile
from dslaunch.core.topology import Host, is_this_machine

_NO_DATA = "has none of the endings that are read as data"
_MOST_ERRORS = 100  # of a hostfile that are told at once


class ModelAttention(NamedTuple):
    """What a local model's config.json says that attention depends on. ``type``: its model_type."""

    type: str | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class PathFact:
    """What a path of the run file is. ``absolute`` is it as seen from where it was written.

    ``fault``: why it cannot be read as data, or is no model, as the end of "FILE ..."; of what is
    missing, if its ending alone says so.
    """

    kind: Literal["file", "directory", "missing"]
    absolute: str
    parent_exists: bool = False
    nearest: str | None = None  # an existing path whose name is close
    fault: str | None = None


class _NamesOfThisMachine:
    """Holds every name of this machine. Only what is asked for is looked up: a hostfile may be long."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and is_this_machine(name)


@dataclass(frozen=True)
class Facts:
    """The devices of this machine, the hostfile's hosts and the paths that the run file names.

    ``paths`` is keyed by key path (``model.path``, ``data.train[0].path``).
    ``allocation`` is the batch job that this process runs in, None where there is a hostfile, where
    the job is this machine alone, and for ``via: local``; ``allocation_problem`` says why the job's
    hosts cannot be read.
    ``template`` is the user's own for the DeepSpeed JSON, None where there is none or where
    ``template_problem`` says why it cannot be read.
    ``hosts`` is None without a hostfile, or with one that cannot be read: ``hostfile_problem``
    says why, to be shown with all other problems; the same goes for ``inventories``, what the
    hosts of ``cluster.inventory`` have, and ``inventory_problem``. ``model_dtype`` is what the model's
    config.json says of its weights, None where it says nothing or is not local.
    """

    inventory: Inventory
    hosts: tuple[Host, ...] | None = None
    local_names: Container[str] = ("localhost", "127.0.0.1", "::1")
    paths: Mapping[str, PathFact] = field(default_factory=dict)
    model_dtype: str | None = None
    model_quantization: Mapping[str, Any] | None = None  # the block of config.json, where it has one
    model_attention: ModelAttention = field(default_factory=ModelAttention)
    flash_attn: bool = False  # whether this Python has it
    hostfile_problem: ConfigError | None = None
    host_memory_bytes: int | None = None  # RAM of this machine that we may use
    allocation: Allocation | None = None
    allocation_problem: ConfigError | None = None
    template: TemplateFile | None = None
    template_problem: ConfigError | None = None
    inventories: Mapping[str, Inventory] | None = None
    inventory_problem: ConfigError | None = None


def probe_facts(loaded: LoadedSpec[Any], *, cwd: Path, environ: Mapping[str, str]) -> Facts:
    """Look at this machine and at the files that the spec names. No other machine is contacted.

    Raises nothing: a wrong hostfile, for one, is ``hostfile_problem``, and a local GPU that is
    not in the device table has precisions that are "unknown".
    """
    paths = {
        key: look_at_path(key, text, _base(loaded, key, cwd)) for key, text in written_paths(loaded.spec)
    }
    hosts, problem = None, None
    if loaded.spec.cluster.hostfile is not None:
        try:
            hosts = load_hostfile(paths["cluster.hostfile"], loaded.where("cluster.hostfile"))
        except ConfigError as error:
            problem = error
    allocation, allocation_problem = None, None
    if loaded.spec.cluster.hostfile is None and not _asks_for_this_machine(loaded):
        try:
            allocation = probe_allocation(environ)
        except ConfigError as error:
            allocation_problem = error
    template, template_problem = None, None
    if (fact := paths.get("deepspeed_template")) is not None:
        try:
            template = load_template(fact, loaded.where("deepspeed_template"), cwd)
        except ConfigError as error:
            template_problem = error
    inventories, inventory_problem = None, None
    if loaded.spec.cluster.inventory is not None:
        try:
            inventories = load_inventory(paths["cluster.inventory"], loaded.where("cluster.inventory"))
        except ConfigError as error:
            inventory_problem = error
    model = paths.get("model.path")
    return Facts(
        inventory=probe_inventory(environ),
        hosts=hosts,
        local_names=_NamesOfThisMachine(),
        paths=paths,
        model_dtype=model_dtype(Path(model.absolute)) if model and model.kind != "missing" else None,
        model_quantization=model_quantization(Path(model.absolute)) if model else None,
        model_attention=model_attention(model.absolute if model and model.kind != "missing" else None),
        flash_attn=importlib.util.find_spec("flash_attn") is not None,
        hostfile_problem=problem,
        host_memory_bytes=local_memory_bytes(),
        allocation=allocation,
        allocation_problem=allocation_problem,
        template=template,
        template_problem=template_problem,
        inventories=inventories,
        inventory_problem=inventory_problem,
    )


def _asks_for_this_machine(loaded: LoadedSpec[Any]) -> bool:
    return isinstance(loaded.spec, RunSpec) and loaded.spec.launch.via == "local"


def load_inventory(fact: PathFact, where: str) -> dict[str, Inventory]:
    """Read and parse a ``cluster.inventory`` file. Raises ConfigError where it is not one."""
    from dslaunch.core.inventory import parse_inventory

    return parse_inventory(_read(fact, where, "inventory", ConfigError, None), fact.absolute)


def load_hostfile(fact: PathFact, where: str) -> tuple[Host, ...]:
    """Read and parse a hostfile. A missing one is an error, never a local run.

    Raises HostfileError, or ConfigErrors with all lines of the file that are wrong.
    """
    text = _read(fact, where, "hostfile", HostfileError, "for a local run leave hostfile out")
    return parse_all(text, fact.absolute)


def parse_all(text: str, name: str) -> tuple[Host, ...]:
    """The hosts of a hostfile's text; ``name`` is the file's.

    A name server is asked where names and addresses are mixed. Raises HostfileError,
    or ConfigErrors with all lines that are wrong.
    """
    hosts, errors = read_hostfile(text, name)
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(list(errors[:_MOST_ERRORS]))
    check_named_once(hosts, name)
    return hosts


def load_template(fact: PathFact, where: str, cwd: Path) -> TemplateFile:
    """Read a user's template; messages call it by its path from ``cwd``. Raises ConfigError."""
    path = Path(fact.absolute)
    name = str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
    if fact.kind != "file":
        what = "not found" if fact.kind == "missing" else "is a directory"
        copy = "dslaunch template copy deepspeed/ds_config.json.j2 gives one to edit"
        hint = f"did you mean {fact.nearest}?" if fact.nearest else copy
        raise ConfigError(f"{where}deepspeed_template: {name} {what}", hint=hint)
    try:
        return TemplateFile(name, read_bounded(path).decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"{where}deepspeed_template: cannot read {name}: {reason}", hint=hint_of(error)
        ) from None


def _read(fact: PathFact, where: str, what: str, kind: type[ConfigError], hint: str | None) -> str:
    if fact.kind != "file":
        state = "not found" if fact.kind == "missing" else "is a directory"
        hint = f"did you mean {fact.nearest}?" if fact.nearest else hint
        raise kind(f"{where}{what} {state}: {fact.absolute}", hint=hint)
    try:
        return read_bounded(Path(fact.absolute)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise kind(f"{where}cannot read {what} {fact.absolute}: {reason}", hint=hint_of(error)) from None


def looks_like_path(text: str) -> bool:
    """Whether a text can only be meant as a path of this machine, not as a hub id."""
    return (
        text.startswith((".", "/", "~"))
        or text.lower().endswith((".gguf", *DATA_SUFFIXES, *OTHER_SUFFIXES))
        or text.count("/") > 1
        or "\\" in text
    )


def written_paths(spec: Any) -> list[tuple[str, str]]:
    """Key path and text of everything in the spec that is or may be a path."""
    cluster = spec.cluster
    found: list[tuple[str, str | None]] = [("cluster.hostfile", cluster.hostfile)]
    found += [("cluster.inventory", cluster.inventory), ("deepspeed_template", spec.deepspeed_template)]
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
        container = spec.launch.container
        if container is not None and is_image_file(container.runtime, container.image or ""):
            found.append(("launch.container.image", container.image))
        if "/" in (spec.launch.python or ""):  # a bare name is looked up in PATH
            found.append(("launch.python", spec.launch.python))
    return [(key, text) for key, text in found if text is not None]


def _base(loaded: LoadedSpec[Any], key: str, cwd: Path) -> Path:
    """Paths in the file are relative to the file; on the command line, to where it was typed."""
    return loaded.base_dir if loaded.line(key) > 0 else cwd


def is_hub_key(key: str) -> bool:
    """Whether a key (of :func:`written_paths`) may hold a hub id in place of a path."""
    return key in ("model.path", "model.tokenizer") or _is_data_key(key)


def _is_data_key(key: str) -> bool:
    return key.startswith(("data.train[", "data.eval["))


def look_at_path(key: str, text: str, base: Path) -> PathFact:
    """What ``text``, written for ``key`` (of :func:`written_paths`), is as seen from ``base``."""
    path = Path(os.path.normpath(base / Path(text).expanduser()))
    if path.is_dir():
        look = _data_fault if _is_data_key(key) else _model_fault if key == "model.path" else None
        return PathFact("directory", str(path), fault=look(path) if look is not None else None)
    if path.exists():
        return PathFact("file", str(path), fault=_data_fault(path) if _is_data_key(key) else None)
    fault = _NO_DATA if _is_data_key(key) and text.lower().endswith(OTHER_SUFFIXES) else None
    # What stands for a model or data is no other file, which may resemble it.
    near = nearest_path(path, _may_be_model_or_data if is_hub_key(key) else None)
    return PathFact("missing", str(path), _names_a_place(text, path), near, fault)


def _data_fault(path: Path) -> str | None:
    """What keeps a file or directory from being read as data, as far as it can be told without reading it."""
    try:
        if path.is_dir():
            return None if any(path.iterdir()) else "is an empty directory"
        if not is_data_file(path.name):
            return _NO_DATA
        if not os.access(path, os.R_OK):
            return "may not be read by this user"
        if not path.is_file():
            return "is no regular file"
        return "is empty" if path.stat().st_size == 0 else None
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _model_fault(directory: Path) -> str | None:
    return None if (directory / "config.json").is_file() else "holds no config.json"


def _names_a_place(text: str, path: Path) -> bool:
    return "/" in text and path.parent.is_dir()


def _may_be_model_or_data(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith((".gguf", *DATA_SUFFIXES)) or entry.is_dir()


def model_dtype(path: Path) -> str | None:
    """The type of the weights by config.json, given as it or its directory; None where it says nothing."""
    for section in _config_sections(path):
        if isinstance(value := section.get("dtype", section.get("torch_dtype")), str):
            return value
    return None


def model_quantization(path: Path) -> Mapping[str, Any] | None:
    """What config.json says of weights that are quantised on disk; None where they are not."""
    blocks = [section.get("quantization_config") for section in _config_sections(path)[:1]]
    return next((block for block in blocks if isinstance(block, dict)), None)


def model_attention(path: str | None) -> ModelAttention:
    """What config.json of a local model says of its attention; nothing for None."""
    for section in _config_sections(Path(path)) if path is not None else ():
        kind, dropout = section.get("model_type"), section.get("attention_dropout")
        if isinstance(kind, str):
            return ModelAttention(kind, float(dropout) if isinstance(dropout, (int, float)) else 0.0)
    return ModelAttention()


def _config_sections(path: Path) -> list[dict[str, Any]]:
    """config.json, given as it or its directory, and the part of it about text."""
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        return []
    try:
        with open_regular(file) as stream:
            config = json.loads(stream.read().decode("utf-8"))
    except (OSError, ValueError):
        return []  # the worker reports a broken model directory, here it is only advice
    sections = (config, config.get("text_config")) if isinstance(config, dict) else ()
    return [section for section in sections if isinstance(section, dict)]
