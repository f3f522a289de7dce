"""dslaunch check: what DeepSpeed would refuse, ignore or read as something else, before a job starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dslaunch.cli import options
from dslaunch.cli.talk import talk
from dslaunch.core.errors import EXIT_NO, EXIT_OK, EXIT_USAGE, ConfigError

if TYPE_CHECKING:
    from dslaunch.config.check import Target
    from dslaunch.config.check.files import CheckedFile
    from dslaunch.config.facts import Facts
    from dslaunch.config.load import LoadedSpec
    from dslaunch.config.memory.tensors import ModelFacts

SCHEMA_VERSION = 1


@click.command("check", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--for",
    "reader",
    type=click.Choice(["raw", "hf-trainer", "accelerate"]),
    default="raw",
    show_default=True,
    help="Who reads the config: decides which auto values are filled in, and whether it must be strict JSON.",
)
@click.option(
    "--world-size", type=click.IntRange(min=1), metavar="N", help="Number of ranks, for the batch sizes."
)
@click.option("--gpu", metavar="NAME", help="Device of the nodes: a100, v100, cpu, ...; commas join several.")
@click.option(
    "--deepspeed-version", metavar="X.Y.Z", help="Version to check for (default: the installed one)."
)
@click.option("--lenient", is_flag=True, help="A key that DeepSpeed ignores is a warning, no error.")
@click.option("--strict", is_flag=True, help="Warnings, too, make the exit code 1.")
@click.option("--fix", "fix", is_flag=True, help="Mend what needs no choice; write to -o or with --in-place.")
@click.option("-o", "--output", metavar="FILE", help="Where --fix writes; - is stdout.")
@click.option("--in-place", is_flag=True, help="Let --fix write over the file itself.")
@click.option("--diff", "diff", is_flag=True, help="Show what --fix changes.")
@click.option(
    "--against", metavar="FILE", help="Show what differs in effect from another config; exit 1 if any."
)
@options.force_option
@options.json_option
def command(
    files: tuple[str, ...],
    reader: str,
    world_size: int | None,
    gpu: str | None,
    deepspeed_version: str | None,
    lenient: bool,
    strict: bool,
    fix: bool,
    output: str | None,
    in_place: bool,
    diff: bool,
    against: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Check DeepSpeed configs, run files, hostfiles and batch scripts (-: stdin), without DeepSpeed.

    Exit code 0: no errors; 1: errors (with --strict also warnings); 2: a file cannot be read.
    """
    _check_flags(files, fix=fix, output=output, in_place=in_place, diff=diff, against=against)
    target = build_target(reader, world_size, gpu, deepspeed_version, lenient=lenient)
    if against is not None:
        return _compare(files[0], against, as_json)
    if fix or diff:
        from dslaunch.cli.check_fix import Mending, mend_files

        mending = Mending(fix, output, in_place, diff, force, as_json)
        remaining = mend_files(files, target, mending)
        return report(remaining, strict=strict, as_json=as_json, err=mending.report_on_stderr)
    return report([_check(path, target) for path in files], strict=strict, as_json=as_json)


def build_target(
    reader: str, world_size: int | None, gpu: str | None, version: str | None, *, lenient: bool
) -> Target:
    """What the flags say the config is for. Raises ConfigError for an unknown device, or a host's."""
    from dslaunch.config.check import Target
    from dslaunch.config.schema import VERSION

    devices = None
    for flag, value in (("--gpu", gpu), ("--deepspeed-version", version)):
        if value is not None and not value.strip():
            raise ConfigError(f"{flag} is empty", hint="give it a value, or leave it out")
    if gpu:
        from dslaunch.core.devices import lookup_device

        if "=" in gpu:
            hint = "name the devices alone, such as a100,v100: the weakest of them counts"
            raise ConfigError(f"--gpu {gpu!r}: check knows no hosts to match a pattern with", hint=hint)
        devices = tuple(lookup_device(name) for name in gpu.split(","))
    if version and not version[0].isdigit():
        raise ConfigError(f"--deepspeed-version {version!r} is no version", hint=f"such as {VERSION}")
    version = version or installed_version() or VERSION
    return Target(reader, world_size, devices, version, lenient)  # type: ignore[arg-type]


def installed_version() -> str | None:
    """The version of the DeepSpeed of this Python, without importing it; None where there is none."""
    import os

    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # a zip file, or a folder that is not there
            continue
        for name in names:
            if name.startswith("deepspeed-") and name.endswith(".dist-info"):
                return name.removeprefix("deepspeed-").removesuffix(".dist-info")
    return None


def read_bytes(path: str) -> bytes | CheckedFile:
    """The content of a file or of stdin (``-``); what is said about it where it cannot be read."""
    from dslaunch.config.check.files import missing_file, unreadable_file
    from dslaunch.core.bounded import hint_of, read_bounded, read_stream

    try:
        if path == "-":
            return read_stream(sys.stdin.buffer, path)
        return read_bounded(Path(path))
    except FileNotFoundError:
        return missing_file(path, Path.cwd())
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return unreadable_file(path, getattr(error, "strerror", None) or str(error), hint_of(error))


def report(checked: list[CheckedFile], *, strict: bool, as_json: bool, err: bool = False) -> int:
    """Print the findings and return the exit code. ``err``: stdout is taken, print to stderr."""
    if as_json:
        import json

        from dslaunch.core.finding import encodable

        found = {"schema_version": SCHEMA_VERSION, "files": [file.to_json() for file in checked]}
        click.echo(encodable(json.dumps(found, indent=2, ensure_ascii=False)), err=err)
    else:
        for file in checked:
            _print(file, err)
        _print_summary(checked)
    if not all(file.readable for file in checked):
        return EXIT_USAGE
    wrong = sum(file.count("error") + (file.count("warning") if strict else 0) for file in checked)
    return EXIT_NO if wrong else EXIT_OK


def _check(path: str, target: Target) -> CheckedFile:
    from dslaunch.config.check.files import check_file

    data = read_bytes(path)
    if not isinstance(data, bytes):
        return data
    return check_file("<stdin>" if path == "-" else path, data, target, _load_model)


def _load_model(loaded: LoadedSpec[Any], facts: Facts) -> ModelFacts:
    from dslaunch.cli.plan_memory import model_facts

    return model_facts(loaded, facts)


def _print(file: CheckedFile, err: bool) -> None:
    from dslaunch.core.finding import encodable

    for finding in file.findings:
        place = "".join(f":{number}" for number in (finding.line, finding.column) if number is not None)
        line = f"{file.path}{place}: {finding.severity}: {finding.message} [{finding.code}]"
        click.echo(encodable(line), err=err)
        if finding.hint:
            click.echo(encodable(f"    hint: {finding.hint}"), err=err)


def _print_summary(checked: list[CheckedFile]) -> None:
    counts = {word: sum(file.count(word) for file in checked) for word in ("error", "warning", "info")}
    if any(counts.values()):
        words = [
            f"{count} {word}{'s' if count != 1 and word != 'info' else ''}" for word, count in counts.items()
        ]
        text = ", ".join(words)
    else:
        text = "nothing to say"
    files = f"{len(checked)} files" if len(checked) > 1 else checked[0].path
    fixable = sum(bool(f.edits) and f.severity != "info" for file in checked for f in file.findings)
    talk(f"{files}: {text}{f'; --fix mends {fixable}' if fixable else ''}")


def _check_flags(
    files: tuple[str, ...], *, fix: bool, output: str | None, in_place: bool, diff: bool, against: str | None
) -> None:
    if fix and not (output or in_place or diff):
        raise click.UsageError("--fix needs -o FILE, --in-place or --diff")
    if (output or in_place) and not fix:
        raise click.UsageError("-o and --in-place go with --fix")
    if output and in_place:
        raise click.UsageError("-o and --in-place exclude each other")
    if in_place and "-" in files:
        raise click.UsageError("--in-place needs a file: stdin has none to write over")
    if [*files, against].count("-") > 1:
        raise click.UsageError("- is stdin, which can be read once only")
    if output and len(files) > 1:
        raise click.UsageError("-o takes one FILE; use --in-place for several")
    if against is not None and (len(files) > 1 or fix or diff):
        raise click.UsageError("--against compares one FILE, without --fix and --diff")


def _compare(path: str, other: str, as_json: bool) -> int:
    import json

    from dslaunch.config.check.compare import compare_configs
    from dslaunch.core.finding import encodable

    found = compare_configs(_load(path), _load(other))
    if as_json:
        differences = [difference.to_json() for difference in found]
        report = {"schema_version": SCHEMA_VERSION, "a": path, "b": other, "differences": differences}
        click.echo(encodable(json.dumps(report, indent=2, ensure_ascii=False)))
    else:
        for item in found:
            line = f"{item.key}: {json.dumps(item.a)} in {path}, {json.dumps(item.b)} in {other}"
            click.echo(encodable(line))
        if not found:
            talk(f"{path} and {other} mean the same")
    return EXIT_NO if found else EXIT_OK


def _load(path: str) -> dict[str, object]:
    """The config of a file, to be compared. Raises ConfigError where it is none."""
    from dslaunch.config.check import Target, check_config
    from dslaunch.config.check.files import check_file

    data = read_bytes(path)
    if isinstance(data, bytes):
        checked = check_file(path, data, Target())
    else:
        checked = data
    if not checked.readable:
        problem = checked.findings[0]
        line = f":{problem.line}" if problem.line else ""
        raise ConfigError(f"{path}{line}: {problem.message}", hint=problem.hint)
    value = check_config(data.decode("utf-8")).value if isinstance(data, bytes) else None
    if checked.kind != "deepspeed-config" or value is None:
        hint = "render it with dslaunch gen-config, and compare what comes out"
        raise ConfigError(
            f"{path}: --against compares DeepSpeed configs, and this is a {checked.kind}",
            hint=hint if checked.kind == "run-file" else None,
        )
    return value
