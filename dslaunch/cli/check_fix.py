"""The part of ``dslaunch check`` that mends: --fix, --in-place, -o, --diff."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dslaunch.cli.talk import talk
from dslaunch.core.errors import ConfigError

if TYPE_CHECKING:
    from dslaunch.config.check import Target
    from dslaunch.config.check.files import CheckedFile
    from dslaunch.config.check.repair import Repaired


@dataclass(frozen=True)
class Mending:
    """What the flags ask for. ``fix`` is False for --diff alone, which reports the file as it is."""

    fix: bool
    write_to: str | None
    in_place: bool
    show: bool
    force: bool
    as_json: bool

    @property
    def diff_on_stderr(self) -> bool:
        return self.write_to == "-" or self.as_json

    @property
    def report_on_stderr(self) -> bool:
        """stdout holds the config with ``-o -``, the diff with --diff unless a program asks for --json."""
        return self.write_to == "-" or (self.show and not self.as_json)


def mend_files(files: Sequence[str], target: Target, mending: Mending) -> list[CheckedFile]:
    """Mend each file and write it where asked; returns what remains to be said about each."""
    return [_mend_file(path, target, mending) for path in files]


def _mend_file(path: str, target: Target, mending: Mending) -> CheckedFile:
    from dslaunch.cli.check import read_bytes
    from dslaunch.config.check.files import CheckedFile, check_file

    data = read_bytes(path)
    if not isinstance(data, bytes):
        return data
    name = "<stdin>" if path == "-" else path
    checked = check_file(name, data, target)
    if not checked.readable:
        return checked
    if checked.kind != "deepspeed-config":
        if mending.write_to is not None:
            raise ConfigError(
                f"{name} is a {checked.kind}; nothing was written",
                hint="--fix mends DeepSpeed configs alone",
            )
        return checked
    repaired = _mend(name, data.decode("utf-8"), target, mending)
    if mending.write_to is not None or (mending.in_place and repaired.done):
        write_to = path if mending.in_place else str(mending.write_to)
        _write(repaired, write_to, force=mending.force or mending.in_place)
    if not mending.fix:
        return checked
    return CheckedFile(_name_of_result(name, mending), "deepspeed-config", repaired.left.findings)


def _name_of_result(name: str, mending: Mending) -> str:
    """What the lines of the remaining findings are counted in."""
    if mending.write_to is not None:
        return "<stdout>" if mending.write_to == "-" else mending.write_to
    return name if mending.in_place else f"{name} (mended)"


def _mend(name: str, text: str, target: Target, mending: Mending) -> Repaired:
    from dslaunch.config.check.repair import repair_config, show_diff
    from dslaunch.config.hjson_reader import read_hjson

    repaired = repair_config(text, target)
    assert repaired is not None
    for finding in repaired.done:
        talk(f"{name}: {finding.key or 'the file'}: {finding.fix or 'mended'}")
    if repaired.done and any(deviation.kind == "comment" for deviation in read_hjson(text).deviations):
        talk(f"note: {name}: // comments are not kept, since JSON has none")
    if mending.show:
        click.echo(show_diff(text, repaired.text, name), nl=False, err=mending.diff_on_stderr)
    return repaired


def _write(repaired: Repaired, path: str, *, force: bool) -> None:
    from dslaunch.cli.options import write_output

    if path == "-":
        click.echo(repaired.text, nl=False)
        return
    if Path(path).is_dir():
        raise ConfigError(f"{path} is a directory", hint="name a file")
    write_output(repaired.text, path, force=force)
    talk(f"wrote {path}")
