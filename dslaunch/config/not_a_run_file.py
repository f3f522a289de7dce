"""What a file is that cannot be read as a run file, for the message. Looked at only after that failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dslaunch.core.command import quote
from dslaunch.core.data_files import JSON_LINES, PARQUET
from dslaunch.core.errors import ConfigError

_DATA = (*JSON_LINES, *PARQUET, ".csv", ".tsv", ".txt")
DATA_HINT = "a run file names it under data.train; see examples/quickstart.yaml"
_START_HINT = "examples/quickstart.yaml is one to start from; docs/run-file.md has every key"


def explain_directory(path: Path) -> ConfigError:
    """The error for a directory that was given as run file."""
    word = quote(str(path))
    if (path / "plan.json").is_file():
        hint = f"it holds a run: dslaunch launch --plan {word}/plan.json runs that again"
    elif (path / "config.json").is_file():
        hint = "it holds a model, which a run file names under model.path"
    elif found := sorted([*path.glob("*.yaml"), *path.glob("*.yml")]):
        hint = f"did you mean {' or '.join(map(str, found[:3]))}?"
    else:
        hint = _START_HINT
    return ConfigError(f"{path} is a directory, not a run file", hint=hint)


def explain_bytes(data: bytes, name: str) -> ConfigError | None:
    """The error for what is no text at all; None for text in some encoding."""
    from dslaunch.config.check.kinds import describe_bytes

    if (what := describe_bytes(data)) is None:
        return None
    if what == "UTF-16 text":
        fix = f"iconv -f UTF-16 -t UTF-8 {_word(name)} > NEW.yaml"
        return ConfigError(f"{name}:1: UTF-16 text; a run file is UTF-8", hint=fix)
    return ConfigError(f"{name} is {what}, not a run file", hint=_START_HINT)


def explain_text(text: str, name: str) -> ConfigError | None:
    """The error for a text that is something else than a run file; None where it may be meant as one."""
    from dslaunch.config.check.kinds import find_kind

    if not text.strip():
        return ConfigError(f"{name} is empty; a run file needs model and data", hint=_START_HINT)
    if text.lstrip()[:1] in ("{", "["):
        return _explain_json(text, name)
    kind = find_kind(name, text)
    if kind == "batch-script":
        return ConfigError(f"{name}: this is a script, not a run file", hint=_command_hint(name))
    if kind == "hostfile":
        return ConfigError(f"{name}: this is a hostfile, not a run file", hint=f"--hostfile {_word(name)}")
    if name.lower().endswith(_DATA) and not re.search(r"^(model|data)\s*:", text, re.MULTILINE):
        return ConfigError(f"{name}: this is data, not a run file", hint=DATA_HINT)
    return None


def describe_data(text: str) -> str | None:
    """What kind of data a text in JSON is; None where it may be one object of settings."""
    value = _read(text)
    if isinstance(value, list):
        return "data (a JSON array)"
    lines = [line for line in text.splitlines() if line.strip()][:2] if value is None else []
    objects = len(lines) == 2 and all(isinstance(_read(line), dict) for line in lines)
    return "data (JSON lines)" if objects else None


def _explain_json(text: str, name: str) -> ConfigError | None:
    if (data := describe_data(text)) is not None:
        return ConfigError(f"{name}: this is {data}, not a run file", hint=DATA_HINT)
    value = _read(text)
    return _explain_mapping(value, name) if isinstance(value, dict) else None


def _explain_mapping(value: dict[str, Any], name: str) -> ConfigError | None:
    from dslaunch.config.check import looks_like_deepspeed
    from dslaunch.config.check.kinds import describe_object

    word, known = _word(name), describe_object(value)
    if known == "a recorded plan":
        what, hint = known, f"dslaunch launch --plan {word}"
    elif "model" in value or "data" in value:
        return None  # a run file may be written as JSON
    elif known is not None:
        what = known
        hint = f"a run file names its directory under model; dslaunch plan --model {word} plans its memory"
    elif looks_like_deepspeed(value):
        what = "a DeepSpeed config"
        hint = f"dslaunch check {word} looks at it; a run file has its keys, and model and data beside them"
    elif name.lower().endswith(JSON_LINES):
        what, hint = "data (JSON lines)", DATA_HINT
    else:
        return None
    return ConfigError(f"{name}: this is {what}, not a run file", hint=hint)


def _read(text: str) -> Any:
    """The value of JSON as DeepSpeed reads it (hjson); None where it is none."""
    from dslaunch.config.hjson_reader import HjsonError, read_hjson

    try:
        return read_hjson(text).value
    except (HjsonError, RecursionError):
        return None


def _word(name: str) -> str:
    """A file's name for a command line; what came on stdin can be read there again."""
    return "-" if name == "<stdin>" else quote(name)


def _command_hint(name: str) -> str:
    interpreter = "python" if name.endswith(".py") else "bash"
    return f"dslaunch launch --num-gpus-per-node N -- {interpreter} {_word(name)}"
