"""dslaunch template: the templates and example hostfiles that come with dslaunch."""

from __future__ import annotations

import click

from dslaunch.cli import options
from dslaunch.cli.talk import talk


@click.group("template", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List, show or copy the templates and example hostfiles."""


@command.command("list")
@options.json_option
def list_templates(as_json: bool) -> None:
    """List them by name."""
    from dslaunch.core.templating import shipped_files

    if as_json:
        import json

        files = [{"name": name, "path": str(path)} for name, path in shipped_files().items()]
        click.echo(json.dumps({"schema_version": 1, "templates": files}, indent=2))
        return
    for name in shipped_files():
        click.echo(name)


@command.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Print one of them."""
    click.echo(_text(name), nl=False)


@command.command("copy")
@click.argument("name")
@click.option("-o", "--output", metavar="FILE", help="Where to; default: its own name in this directory.")
@options.force_option
def copy(name: str, output: str | None, force: bool) -> None:
    """Copy one of them to a file, to edit it."""
    target = output if output is not None else name.rpartition("/")[2]
    options.write_output(_text(name), target, force=force)
    if target != "-":
        talk(f"wrote {target}")


def _text(name: str) -> str:
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.templating import shipped_files

    files = shipped_files()
    if name not in files:
        import difflib

        near = difflib.get_close_matches(name, files, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "see dslaunch template list"
        raise ConfigError(f"no template {name!r}", hint=hint)
    return files[name].read_text(encoding="utf-8")
