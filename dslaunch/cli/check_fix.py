"""The part of ``dslaunch check`` that mends: --fix, --in-place, -o, --diff."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dslaunch.core.errors import ConfigError

if TYPE_CHECKING:
    from dslaunch.config.check import Target
    from dslaunch.config.check.files import CheckedFile
    from dslaunch.config.check.repair import Repaired

Report = Callable[["list[CheckedFile]", bool], int]


def mend_files(
    files: tuple[str, ...],
    target: Target,
    *,
    write_to: str | None,
    in_place: bool,
    show: bool,
    force: bool,
    report: Report,
) -> int:
    """Mend each file, write it where asked, and report what remains; returns the exit code of that."""
    from dslaunch.cli.check import read_bytes
    from dslaunch.config.check.files import CheckedFile, check_file, missing_file

    remaining: list[CheckedFile] = []
    for path in files:
        data = read_bytes(path)
        if data is None:
            remaining.append(missing_file(path, Path.cwd()))
            continue
        name = "<stdin>" if path == "-" else path
        checked = check_file(name, data, target)
        if checked.kind == "deepspeed-config" and checked.readable:
            repaired = _mend(name, data.decode("utf-8"), target, show, err=write_to == "-")
            if write_to is not None or (in_place and repaired.done):
                _write(repaired, path if in_place else str(write_to), force=force or in_place)
                checked = CheckedFile(name, "deepspeed-config", repaired.left.findings)
        remaining.append(checked)
    return report(remaining, show or write_to == "-")


def _mend(name: str, text: str, target: Target, show: bool, *, err: bool) -> Repaired:
    from dslaunch.config.check.repair import repair_config, show_diff
    from dslaunch.config.hjson_reader import read_hjson

    repaired = repair_config(text, target)
    assert repaired is not None
    for finding in repaired.done:
        click.echo(f"{name}: {finding.key or 'the file'}: {finding.fix or 'mended'}", err=True)
    if repaired.done and any(deviation.kind == "comment" for deviation in read_hjson(text).deviations):
        click.echo(f"note: {name}: // comments are not kept, since JSON has none", err=True)
    if show:
        click.echo(show_diff(text, repaired.text, name), nl=False, err=err)
    return repaired


def _write(repaired: Repaired, path: str, *, force: bool) -> None:
    from dslaunch.cli.options import write_output

    if path == "-":
        click.echo(repaired.text, nl=False)
        return
    if Path(path).is_dir():
        raise ConfigError(f"{path} is a directory", hint="name a file")
    write_output(repaired.text, path, force=force)
