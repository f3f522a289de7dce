"""The ``dslaunch`` command. Each verb's module is imported only when it runs.

``dslaunch --help`` must feel instant: this file imports click and the standard
library alone, and shows the verbs from the table below.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys
from typing import Any

import click

from dslaunch import __version__
from dslaunch.core.errors import EXIT_CANCELLED_INT, EXIT_NOT_READY, EXIT_OUR_BUG, DslaunchError

# verb -> (module, what --help says). The module holds a click command named `command`.
VERBS: dict[str, tuple[str, str]] = {
    "gen-config": ("dslaunch.cli.gen_config", "Print the DeepSpeed JSON of a run file or of flags."),
    "check": ("dslaunch.cli.check", "Check a DeepSpeed config, run file, hostfile or batch script."),
    "explain": ("dslaunch.cli.explain", "Say what a DeepSpeed key or the loss scale does."),
    "plan": ("dslaunch.cli.plan", "Show every resolved value with its reason and source, and its memory."),
    "hosts": ("dslaunch.cli.hosts", "Show the hosts and slots of a hostfile, a batch job or this machine."),
    "doctor": ("dslaunch.cli.doctor", "Say what this machine, or the hosts of a run, lack."),
    "launch": ("dslaunch.cli.launch", "Start the ranks of a run file, or of any command."),
    "compare": ("dslaunch.cli.compare", "Run a run file twice, as it is and changed, and compare the two."),
    "status": ("dslaunch.cli.status", "Say how a run stands, from its directory."),
    "logs": ("dslaunch.cli.logs", "Show what the ranks of a run wrote."),
    "diagnose": ("dslaunch.cli.diagnose", "Say what is wrong with a run's numbers, from its log."),
    "replay": ("dslaunch.cli.replay", "Run a step again and name what went inf or nan first."),
    "export": ("dslaunch.cli.export", "Write a checkpoint as a Hugging Face directory."),
    "generate": ("dslaunch.cli.generate", "Answer prompts with an exported model or adapter."),
    "template": ("dslaunch.cli.template", "List, show or copy the templates."),
}

# Verbs that read and print, and leave nothing to be ended or cleaned up.
READERS = frozenset({"gen-config", "check", "explain", "plan", "hosts", "status", "diagnose", "template"})

# A disk or quota that is full, most often that of stdout: the user's to mend, and no bug of ours.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LazyGroup(click.Group):
    """A group that knows its verbs by name and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name][0]).command
        add_verbosity(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


def add_verbosity(command: click.Command) -> None:
    """Give a command, and each command below it, -q and -v."""
    if all(param.name != "quiet" for param in command.params):
        command.params += [_verbosity_option(flag) for flag in _VERBOSITY]
    for child in getattr(command, "commands", {}).values():
        add_verbosity(child)


# flag -> (its short form, the value of DSLAUNCH_VERBOSE, help)
_VERBOSITY = {
    "--quiet": ("-q", "-1", "Say errors and results alone: no notes, no talk on stderr."),
    "--verbose": ("-v", "1", "Let transformers, DeepSpeed and other libraries say all they have to say."),
}


def _verbosity_option(flag: str) -> click.Option:
    short, level, text = _VERBOSITY[flag]

    def choose(ctx: click.Context, param: click.Parameter, given: bool) -> None:
        from dslaunch.core.verbosity import VARIABLE

        if not given:
            return
        if ctx.meta.setdefault(VARIABLE, level) != level:
            raise click.UsageError("--quiet and --verbose exclude each other", ctx)
        os.environ[VARIABLE] = level  # which the ranks inherit

    return click.Option([short, flag], is_flag=True, expose_value=False, callback=choose, help=text)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dslaunch")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def dslaunch(ctx: click.Context, debug: bool) -> None:
    """Fine-tune LLMs with DeepSpeed: configs that are right, ranks that start and stop."""
    ctx.obj = {"debug": debug}


add_verbosity(dslaunch)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors are shown, never a traceback."""
    args = sys.argv[1:] if argv is None else argv
    debug = "--debug" in args[:1]
    try:
        result: Any = dslaunch.main(args=args, prog_name="dslaunch", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # or a full disk would show only after the exit code is chosen
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            from dslaunch.cli.unknown_option import explain

            error = explain(error, args)
        error.show()
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        print("cancelled", file=sys.stderr)
        return EXIT_CANCELLED_INT
    except DslaunchError as error:
        if debug:
            raise
        print(error.format(), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our stdout went away (`dslaunch plan | head`): nothing is wrong.
        _give_up_stdout()
        return 0
    except Exception as error:
        if debug:
            raise
        message, code = _explain_unexpected(error)
        print(message, file=sys.stderr)
        return code


def _give_up_stdout() -> None:
    """Let what is still buffered go nowhere: Python's end would try to write it again, and fail with 120."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # no real file beneath it
        pass


def _explain_unexpected(error: Exception) -> tuple[str, int]:
    """What to say about an error that is not one of ours to raise, and the exit code."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        _give_up_stdout()
        return f"Error: cannot write {error.filename or 'the output'}: {error.strerror}", EXIT_NOT_READY
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except OSError:
            return "Error: the current directory is gone\n\nhint: cd to one that exists", EXIT_NOT_READY
    if isinstance(error, ModuleNotFoundError):
        from dslaunch.core.packages import explain_missing_module

        if (missing := explain_missing_module(error)) is not None:
            return missing.format(), missing.exit_code
    return (
        f"Error: internal error in dslaunch: {type(error).__name__}: {error}\n\n"
        "hint: this is our bug; run `dslaunch --debug ...` and report the traceback"
    ), EXIT_OUR_BUG


def entry() -> None:
    """The console script."""
    _open_closed_streams()
    gc.set_threshold(50_000)  # imports make objects by the ten thousand, and hardly any garbage
    code = main()
    if sys.argv[1:2] and sys.argv[1] in READERS:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """End at once: to take down every module costs such a verb a tenth of its time. Returns if it cannot."""
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def _open_closed_streams() -> None:
    """What the caller closed (``<&-``) reads as empty and writes to nowhere.

    Else the next file that is opened would get its number, and be written to by whoever prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
