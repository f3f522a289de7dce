"""docs/commands.md, made from the commands themselves: ``python -m dslaunch.cli.reference``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from dslaunch.cli.main import VERBS, dslaunch
from dslaunch.core.atomic import write_text

_HEAD = """\
<!-- Made by `python -m dslaunch.cli.reference` (make docs). Change the commands, not this file. -->

# Commands

Flags mean the same wherever they stand. A value comes from a flag, else from the run file, else
from the default; `dslaunch plan` shows which. Data goes to stdout and talk to stderr; `-` is stdin
or stdout; `-o` never overwrites without `--force`.

`-q` leaves out notes and talk on stderr; errors, results and what the ranks print stay. `-v` lets the
libraries (transformers, DeepSpeed, the hub) say what they otherwise keep to themselves. Both work before
and after the command's name, and stand for `DSLAUNCH_VERBOSE=-1` and `=1` in the environment, which the
ranks inherit. `--debug`, before the command's name, shows the traceback of an error.

Exit codes: 0 done; 1 an expected "no"; 2 the command line, the run file or a hostfile is wrong;
3 the environment is not ready (a package, port, disk or compiler); 70 a bug of dslaunch; 75 stopped
at a checkpoint, go on with `--resume`; 130 and 143 cancelled. A failed run ends with the first
failing rank's own code, 128 + n where signal n ended it.
"""


def render_reference() -> str:
    """The whole file: each verb's own ``--help``, 100 columns wide."""
    parts = [_HEAD, _section(dslaunch, "dslaunch", None)]
    root = _context(dslaunch, "dslaunch", None)
    for verb in VERBS:
        command = dslaunch.get_command(root, verb)
        assert command is not None
        parts.extend(_sections(command, verb, root))
    return "\n".join(parts)


def _sections(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    yield _section(command, name, parent)
    if isinstance(command, click.Group):
        context = _context(command, name, parent)
        for child_name in command.list_commands(context):
            child = command.get_command(context, child_name)
            assert child is not None
            yield from _sections(child, child_name, context)


def _section(command: click.Command, name: str, parent: click.Context | None) -> str:
    context = _context(command, name, parent)
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    return f"## {context.command_path}\n\n```text\n{text}\n```\n"


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(
        command,
        info_name=name,
        parent=parent,
        terminal_width=100,
        max_content_width=100,
        help_option_names=["-h", "--help"],
    )


def main(argv: list[str]) -> int:
    """Write the file named by the one argument, docs/commands.md of this checkout by default."""
    default = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
    write_text(Path(argv[0]) if argv else default, render_reference())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
