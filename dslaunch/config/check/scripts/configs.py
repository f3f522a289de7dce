"""DeepSpeed configs that a script writes by a here-document are checked like any other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.config.check import Target, check_config, looks_like_deepspeed
from dslaunch.config.check.scripts.job import Job
from dslaunch.config.check.scripts.shell import Command
from dslaunch.core.finding import Finding

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_KEY = re.compile(r"\b(?:zero_optimization|train_(?:micro_)?batch_size\w*|gradient_accumulation_steps)\b")
_LITERAL = re.compile(r"^(?:export\s+)?(\w+)=[\"']?([^\s\"'$`]*)[\"']?$")


def check_written_configs(job: Job, target: Target) -> Iterator[Finding]:
    """Errors and warnings about configs in here-documents, at the script's lines.

    Variables take the value that the script gives them in plain text. Where one has none, its line
    is left alone, and so is what concerns the config as a whole.
    """
    for lines in _documents(job):
        start, body = lines[0].line, "\n".join(command.text for command in lines) + "\n"
        if not body.lstrip().startswith("{"):
            continue
        quoted = not any(command.live for command in lines)
        text, open_lines = (body, set()) if quoted else _fill(job, start, body)
        checked = check_config(text, target)
        if not (looks_like_deepspeed(checked.value) if checked.readable else _KEY.search(text)):
            continue
        for found in checked.findings:
            line = found.line or 1
            open_ended = line in open_lines or (open_lines and (found.line is None or not checked.readable))
            if found.severity != "info" and not open_ended:
                yield replace(found, line=start + line - 1, fix=None, edits=())


def _documents(job: Job) -> Iterator[list[Command]]:
    """The lines of each here-document."""
    lines: list[Command] = []
    for command in job.commands:
        if lines and not (command.heredoc and command.line == lines[-1].line + 1):
            yield lines
            lines = []
        if command.heredoc:
            lines.append(command)
    if lines:
        yield lines


def _fill(job: Job, start: int, body: str) -> tuple[str, set[int]]:
    """The text with variables filled in, and its lines that hold one without a value in the script."""
    values: dict[str, str] = {}
    for command in job.commands:
        if command.line < start and not command.heredoc and (match := _LITERAL.match(command.text)):
            values[match[1]] = match[2]
    filled, unknown = [], set()
    for number, line in enumerate(body.replace("\\$", "$").split("\n"), start=1):
        names = {match[1] or match[2] for match in _VARIABLE.finditer(line)}
        if names - values.keys() or "$(" in line:
            unknown.add(number)
        filled.append(_VARIABLE.sub(lambda match: values.get(match[1] or match[2], "1"), line))
    return "\n".join(filled), unknown
