"""What a file is, by its content; and in words, where it is none of what can be checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dslaunch.config.check import looks_like_deepspeed

Kind = Literal["deepspeed-config", "run-file", "hostfile", "batch-script", "unknown"]

_SCRIPT = re.compile(
    r"\A\ufeff?#!|^#(?:SBATCH|PBS|BSUB|PJM|FLUX:|\$ -)|^#[ \t]+(?:SBATCH|PBS|BSUB)\s+-", re.MULTILINE
)
# Lines of a script that has neither: what no config and no hostfile has.
_COMMAND = re.compile(
    r"^\s*(?:(?:srun|sbatch|mpirun|mpiexec|torchrun|deepspeed)\s.*(?:\.py\b|\s--?\w)|module (?:load|purge)\b"
    r"|export \w+=|set -[a-z])",
    re.MULTILINE,
)
_SCRIPT_NAMES = (".sh", ".bash", ".slurm", ".sbatch", ".pbs", ".lsf", ".job")
_HOST_LINE = re.compile(r"^[^\s#{\":]\S*\s+slots\s*=", re.MULTILINE)
# A host line as people mean it: a name, and perhaps one word and a number, or ids.
_MEANT_AS_HOST = re.compile(
    r"(?P<host>[A-Za-z0-9_.@:\[\]-]+)(?:[\s:,]+(?:(?P<word>[A-Za-z_]+)\s*[=:]?\s*)?(?P<slots>\d[\d,]*)?)?"
)
_SLOT_WORDS = ("slots", "max_slots", "gpus", "gpu", "num_gpus", "ngpus", "cpus", "cpu", "np", "procs", "ppn")
_RUN_KEY = re.compile(r"^(?:model|data|task|adapter|precision|cluster|launch|output)\s*:", re.MULTILINE)
_BINARY = {
    b"PAR1": "a parquet file",
    b"GGUF": "a .gguf model",
    b"PK\x03\x04": "a zip file",
    b"\x1f\x8b": "gzip",
    b"\x80\x02": "a pickle",
}


def find_kind(path: str, text: str) -> Kind:
    """What a file is: by what stands in it, and only where that leaves it open by its name."""
    suffix = Path(path).suffix.lower()
    begins = re.sub(r"\A(?:[^{}\n]*\n)?\s*```\w*\n", "", text).lstrip("\ufeff \t\r\n")[:1]
    if begins != "{" and _SCRIPT.search(text):
        return "batch-script"
    if begins != "{" and _COMMAND.search(text) and not _RUN_KEY.search(text):
        return "batch-script"
    if _HOST_LINE.search(text):
        return "hostfile"
    if begins == "{":
        return "run-file" if _is_run_file_in_json(text) else "deepspeed-config"
    if suffix in (".json", ".hjson", ".json5"):
        return "deepspeed-config"
    if _RUN_KEY.search(text) or suffix in (".yaml", ".yml"):
        return "run-file"
    if suffix in _SCRIPT_NAMES:
        return "batch-script"
    value = _read(text)
    if looks_like_deepspeed(value):
        return "deepspeed-config"
    return "hostfile" if _is_meant_as_hostfile(path, text) else "unknown"


def describe_bytes(data: bytes) -> str | None:
    """What a file is that holds no text; None for text in some encoding."""
    for magic, what in _BINARY.items():
        if data.startswith(magic):
            return what
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text"
    return "a binary file" if b"\0" in data[:4096] else None


def describe_object(value: Any) -> str | None:
    """What a JSON object is that other tools, or dslaunch itself, have written; None for any other."""
    if not isinstance(value, Mapping):
        return None
    if {"schema_version", "launch"} <= value.keys():
        return "a recorded plan"
    if ("model_type" in value or "architectures" in value) and not looks_like_deepspeed(value):
        return "a model's config.json"
    return None


def describe_text(text: str) -> str | None:
    """What a text is that is neither a config nor meant as one; None where that is not plain."""
    if not text.strip("\ufeff \t\r\n"):
        return "empty"
    if text.lstrip().startswith("<"):
        return "HTML or XML (a download that failed?)"
    if re.search(r"^(?:import|from) \w[\w.]*(?: import .*)?$", text, re.MULTILINE):
        return "a Python program"
    return None


def _is_run_file_in_json(text: str) -> bool:
    if not ('"model"' in text and '"data"' in text):
        return False
    value = _read(text)
    return isinstance(value, dict) and {"model", "data"} <= value.keys()


def _is_meant_as_hostfile(path: str, text: str) -> bool:
    """Whether every line is a host with slots in some spelling, or a bare name of one."""
    lines = [line.split("#", 1)[0].strip() for line in text.removeprefix("\ufeff").splitlines()]
    found = [_MEANT_AS_HOST.fullmatch(line) for line in lines if line]
    if not found or None in found:
        return False
    if any(match and (match["slots"] or _means_slots(match["word"])) for match in found):
        return all(match and (not match["word"] or _means_slots(match["word"])) for match in found)
    names = [match["host"] for match in found if match]
    named_so = "host" in Path(path).name.lower()
    return named_so or (len(names) > 1 and all(re.search(r"[A-Za-z._-]\d|^[\d.]+$", name) for name in names))


def _means_slots(word: str | None) -> bool:
    import difflib

    return word is not None and bool(difflib.get_close_matches(word.lower(), _SLOT_WORDS, n=1, cutoff=0.6))


def _read(text: str) -> Any:
    """The value of a text as DeepSpeed reads it (hjson); None where it is none."""
    from dslaunch.config.hjson_reader import HjsonError, read_hjson

    try:
        return read_hjson(text).value
    except (HjsonError, RecursionError):
        return None
