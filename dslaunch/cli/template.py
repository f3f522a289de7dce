"""dslaunch template: the presets, templates and example hostfiles that come with dslaunch."""

from __future__ import annotations

import click

from dslaunch.cli import options
from dslaunch.cli.talk import talk

_WHOLE = "deepspeed/ds_config.json.j2"


@click.group("template", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List, show or copy presets, templates and example hostfiles.

    Presets are run files for the usual cases: copy one, put your model and data in.
    Templates are what the DeepSpeed JSON is rendered from: copy one to use with --template.
    """


@command.command("list")
@options.json_option
def list_templates(as_json: bool) -> None:
    """List them, each with what it is for."""
    from dslaunch.core.templating import load_description, shipped_files

    files = {name: (load_description(path), path) for name, path in shipped_files().items()}
    if as_json:
        import json

        listed = [
            {"name": name, "description": what, "path": str(path)} for name, (what, path) in files.items()
        ]
        click.echo(json.dumps({"schema_version": 1, "templates": listed}, indent=2))
        return
    width = max(map(len, files))
    for name, (what, _) in files.items():
        click.echo(f"{name:{width}}  {what}")


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
    text = _text(name)
    options.write_output(text, target, force=force)
    if target != "-":
        talk(f"wrote {target}{_next_step(name, target)}")


def _next_step(name: str, target: str) -> str:
    import shlex

    file = shlex.quote(target)
    if name.startswith("presets/"):
        return f"; put your model and data in, then: dslaunch plan {file}"
    return f"; use it with: dslaunch gen-config --template {file}" if name == _WHOLE else ""


def _text(name: str) -> str:
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.templating import shipped_files

    files = shipped_files()
    if name not in files:
        import difflib

        by_end = [known for known in files if known.rpartition("/")[2].split(".")[0] == name]
        near = by_end or difflib.get_close_matches(name, files, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "see dslaunch template list"
        raise ConfigError(f"no template {name!r}", hint=hint)
    return files[name].read_text(encoding="utf-8")
