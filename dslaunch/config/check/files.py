"""Files of any kind: what a file is, by its content, and what is wrong with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.config.check import CheckedConfig, Target, check_config, looks_like_deepspeed
from dslaunch.config.check.kinds import Kind, describe_bytes, describe_object, describe_text, find_kind
from dslaunch.core.data_files import JSON_LINES
from dslaunch.core.finding import Finding
from dslaunch.core.missing_path import nearest_path

if TYPE_CHECKING:
    from dslaunch.config.check.run_files import LoadModel

_WHERE_IT_GOES = {
    "a recorded plan": "dslaunch launch --plan runs it again",
    "a model's config.json": "dslaunch plan --model plans its memory; a run file names its directory",
}
_SPACED = re.compile(r"^#[ \t]+(SBATCH|PBS|BSUB|FLUX:)[ \t]", re.MULTILINE)


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
    if (what := describe_bytes(data)) is not None:
        hint = "save it as UTF-8: iconv -f UTF-16 -t UTF-8" if what == "UTF-16 text" else None
        return _no_config(path, what, hint)
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
    if (what := describe_object(checked.value)) is not None:
        return _no_config(path, what, _WHERE_IT_GOES[what])
    if (data_file := _explain_data(path, text, checked)) is not None:
        return data_file
    if kind == "unknown" and (checked.readable or "{" not in text):
        from dslaunch.config.check.syntax import find_causes

        if checked.readable or not find_causes(text):
            return _no_config(path, describe_text(text))
    return CheckedFile(path, kind, checked.findings, checked.readable)


def _no_config(path: str, what: str | None, hint: str | None = None) -> CheckedFile:
    if what is None:
        message = "neither a DeepSpeed config nor a run file, a hostfile or a batch script"
    elif what == "empty":
        message = "is empty"
    else:
        message = f"this is {what}, not a config"
    finding = Finding("unknown-kind", "error", "", message, hint=hint)
    return CheckedFile(path, "unknown", (finding,), readable=False)


def _explain_data(path: str, text: str, checked: CheckedConfig) -> CheckedFile | None:
    """What is said of training data; None for what may be meant as a config."""
    from dslaunch.config.not_a_run_file import DATA_HINT, describe_data

    named_so = path.lower().endswith(JSON_LINES) and not looks_like_deepspeed(checked.value)
    if checked.readable and not named_so:
        return None
    if (what := "data (JSON lines)" if named_so else describe_data(text)) is None:
        return None
    return _no_config(path, what, DATA_HINT)


def missing_file(path: str, cwd: Path) -> CheckedFile:
    """The finding for a path that is not there, with the nearest that is."""
    message = f"not found (in {cwd})"
    if Path(path).is_symlink():
        message = f"is a link to {Path(path).readlink()}, which is not there"
    near = nearest_path(Path(path))
    hint = f"did you mean {near}?" if near and near != path else None
    finding = Finding("not-found", "error", "", message, hint=hint)
    return CheckedFile(path, "unknown", (finding,), readable=False)


def unreadable_file(path: str, reason: str, hint: str | None = None) -> CheckedFile:
    """The finding for a directory, or a file that may not be read."""
    hint = hint or "name a readable file"
    finding = Finding("not-read", "error", "", f"cannot be read: {reason}", hint=hint)
    return CheckedFile(path, "unknown", (finding,), readable=False)


def _check_script(text: str, target: Target) -> tuple[Finding, ...]:
    from dslaunch.config.check.scripts import check_batch_script
    from dslaunch.config.check.scripts.job import read_job

    if read_job(text) is None:
        spaced = [
            Finding(
                "commented-directive",
                "warning",
                "",
                f"a space before {match[1]} makes it a comment, which the scheduler does not read",
                text.count("\n", 0, match.start()) + 1,
                hint=f"write #{match[1]}",
            )
            for match in _SPACED.finditer(text)
        ]
        if spaced:
            return tuple(spaced)
        note = "a script without a scheduler's directives (#SBATCH, #PBS, ...): nothing is checked"
        return (Finding("not-checked", "info", "", note),)
    return check_batch_script(text, target)
