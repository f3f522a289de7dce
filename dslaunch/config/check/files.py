"""Files of any kind: what a file is, by its content, and what is wrong with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dslaunch.config.check import CheckedConfig, Target, check_config, looks_like_deepspeed
from dslaunch.core.data_files import JSON_LINES
from dslaunch.core.finding import Finding

if TYPE_CHECKING:
    from dslaunch.config.check.run_files import LoadModel

Kind = Literal["deepspeed-config", "run-file", "hostfile", "batch-script", "unknown"]

_SCRIPT = re.compile(r"\A\ufeff?#!|^#(?:SBATCH|PBS|BSUB|PJM|FLUX:|\$ -)", re.MULTILINE)
_HOST_LINE = re.compile(r"^[^\s#{}\":]\S*\s+slots\s*=", re.MULTILINE)
_RUN_KEY = re.compile(r"^(?:model|data|task|adapter|precision|cluster|launch|output)\s*:", re.MULTILINE)


@dataclass(frozen=True)
class CheckedFile:
    """``readable`` is false where nothing could be checked: exit code 2."""

    path: str
    kind: Kind
    findings: tuple[Finding, ...]
    readable: bool = True

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """One entry of ``files`` in ``--json``."""
        found = [finding.to_json() for finding in self.findings]
        return {"path": self.path, "kind": self.kind, "findings": found}


def check_file(path: str, data: bytes, target: Target, load_model: LoadModel | None = None) -> CheckedFile:
    """Check the content of a file (``path`` names it and hints at its kind). Raises nothing for it.

    ``load_model``: see :func:`dslaunch.config.check.run_files.check_run_file`.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        finding = Finding("encoding", "error", "", "not UTF-8 text", line, None, "save the file as UTF-8")
        return CheckedFile(path, "unknown", (finding,), readable=False)
    kind = find_kind(path, text)
    if kind == "hostfile":
        from dslaunch.config.check.hostfiles import check_hostfile

        return CheckedFile(path, kind, check_hostfile(path, text))
    if kind == "run-file":
        from dslaunch.config.check.run_files import check_run_file

        return CheckedFile(path, kind, check_run_file(path, text, target, load_model))
    if kind == "batch-script":
        return CheckedFile(path, kind, _check_script(text, target))
    checked = check_config(text, target)
    if (data_file := _explain_data(path, text, checked)) is not None:
        return data_file
    if kind == "unknown" and checked.readable:
        none = Finding(
            "unknown-kind",
            "error",
            "",
            "neither a DeepSpeed config nor a run file, a hostfile or a batch script",
        )
        return CheckedFile(path, kind, (none,), readable=False)
    return CheckedFile(path, kind, checked.findings, checked.readable)


def _explain_data(path: str, text: str, checked: CheckedConfig) -> CheckedFile | None:
    """What is said of training data; None for what may be meant as a config."""
    from dslaunch.config.not_a_run_file import DATA_HINT, describe_data

    named_so = path.lower().endswith(JSON_LINES) and not looks_like_deepspeed(checked.value)
    if checked.readable and not named_so:
        return None
    if (what := "data (JSON lines)" if named_so else describe_data(text)) is None:
        return None
    finding = Finding("unknown-kind", "error", "", f"this is {what}, not a config", hint=DATA_HINT)
    return CheckedFile(path, "unknown", (finding,), readable=False)


def find_kind(path: str, text: str) -> Kind:
    """What a file is: by what stands in it, and only where that leaves it open by its name."""
    suffix = Path(path).suffix.lower()
    if _SCRIPT.search(text):
        return "batch-script"
    if _HOST_LINE.search(text):
        return "hostfile"
    begins = text.lstrip("\ufeff \t\r\n")[:1]
    if begins == "{" or suffix in (".json", ".hjson", ".json5"):
        return "deepspeed-config"
    if _RUN_KEY.search(text) or suffix in (".yaml", ".yml"):
        return "run-file"
    from dslaunch.config.hjson_reader import HjsonError, read_hjson

    try:
        return "deepspeed-config" if looks_like_deepspeed(read_hjson(text).value) else "unknown"
    except (HjsonError, RecursionError):
        return "unknown"


def missing_file(path: str, cwd: Path) -> CheckedFile:
    """The finding for a path that is not there, with the nearest that is."""
    message = f"not found (in {cwd})"
    near = nearest_path(path)
    hint = f"did you mean {near}?" if near else None
    finding = Finding("not-found", "error", "", message, hint=hint)
    return CheckedFile(path, "unknown", (finding,), readable=False)


def nearest_path(path: str) -> str | None:
    """An existing path that differs little in its folders or its last part."""
    import difflib

    wanted = Path(path)
    parent = wanted.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    names = [str(found) for found in parent.glob("*")]
    names += [str(found) for found in parent.glob(f"*/{wanted.name}")]
    near = difflib.get_close_matches(path, names, n=1, cutoff=0.75)
    return near[0] if near else None


def unreadable_file(path: str, reason: str) -> CheckedFile:
    """The finding for a directory, or a file that may not be read."""
    finding = Finding("not-read", "error", "", f"cannot be read: {reason}", hint="name a readable file")
    return CheckedFile(path, "unknown", (finding,), readable=False)


def _check_script(text: str, target: Target) -> tuple[Finding, ...]:
    from dslaunch.config.check.scripts import check_batch_script
    from dslaunch.config.check.scripts.job import read_job

    if read_job(text) is None:
        note = "a script without a scheduler's directives (#SBATCH, #PBS, ...): nothing is checked"
        return (Finding("not-checked", "info", "", note),)
    return check_batch_script(text, target)
