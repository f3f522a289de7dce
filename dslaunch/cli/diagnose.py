"""dslaunch diagnose: what is wrong with a run's numbers, from its log or its directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dslaunch.cli import options
from dslaunch.core.errors import EXIT_NO, EXIT_OK

if TYPE_CHECKING:
    from dslaunch.observe.diagnose.course import Course
    from dslaunch.observe.diagnose.read import Diagnosis
    from dslaunch.observe.diagnose.verdicts import Verdict

_MAX_GROWTHS = 8
_MAX_TEXT = 160
_LAST_SCALE = {
    "logged": "at the end",
    "inferred": "at the end (inferred)",
    "last overflow": "after the last overflow",
}


@click.command("diagnose", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", metavar="LOG_OR_RUN_DIR...", nargs=-1, required=True)
@click.option(
    "--set",
    "set_",
    multiple=True,
    metavar="fp16.KEY=VALUE",
    help="A setting that the log does not name, such as fp16.loss_scale_window=1000.",
)
@click.option("-o", "--output", metavar="FILE.png", help="Draw to FILE.png too (needs matplotlib).")
@options.force_option
@options.json_option
def command(
    paths: tuple[str, ...], set_: tuple[str, ...], output: str | None, force: bool, as_json: bool
) -> int:
    """Say what is wrong with a run's numbers: loss scale, loss and gradient norm.

    Reads run directories and logs of DeepSpeed, Megatron, apex and fairseq (.gz too; -: stdin). Exit code 0:
    nothing is wrong; 1: something is; 2: a file cannot be read, or tells of none of these.
    """
    from dslaunch.observe.diagnose.read import diagnose

    stated = stated_settings(set_)
    if output is not None:
        _check_output(output, force)
    found = diagnose(paths, stated)
    if output is not None:
        from dslaunch.observe.diagnose.png import draw_png

        draw_png(found, output)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        click.echo("\n".join(diagnosis_lines(found)))
    return EXIT_NO if found.is_wrong else EXIT_OK


def stated_settings(set_: tuple[str, ...]) -> dict[str, float]:
    """``fp16.KEY=VALUE`` as numbers, checked as a config's fp16 section. Raises ConfigError."""
    if not set_:
        return {}
    from dslaunch.cli.explain import build_rule

    rule = build_rule(set_)
    names = [text.partition("=")[0].strip().removeprefix("fp16.") for text in set_]
    return {name: float(getattr(rule, name)) for name in names}


def _check_output(output: str, force: bool) -> None:
    from pathlib import Path

    from dslaunch.core.errors import ConfigError
    from dslaunch.observe.diagnose.png import check_matplotlib

    if not output.lower().endswith(".png"):
        raise ConfigError(f"-o {output}: only .png is drawn", hint="name it FILE.png")
    if Path(output).exists() and not force:
        raise ConfigError(f"{output} exists already; nothing was written", hint="add --force to replace it")
    check_matplotlib(output)


def diagnosis_lines(found: Diagnosis) -> list[str]:
    """The diagnosis for a reader."""
    blocks = [_head(found)]
    blocks += [_verdict(verdict, named=len(found.files) > 1) for verdict in found.verdicts]
    if not any(verdict.severity != "info" for verdict in found.verdicts):
        blocks.append(["nothing wrong found"])
    blocks += [_settings(found.course), _growths(found.course), *_plots(found)]
    blocks.append([f"note: {text}" for text in found.notes])
    return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


def _head(found: Diagnosis) -> list[str]:
    names = ", ".join(f"{name} ({lines:,} lines)" for name, lines in found.files)
    parts = []
    if found.last_step is not None:
        parts.append(f"steps {found.first_step} to {found.last_step}")
    parts.append(f"{found.num_losses:,} losses")
    parts.append(f"{found.num_skipped:,} steps skipped")
    if found.course.last_scale is not None:
        parts.append(f"loss scale {found.course.last_scale:g} {_LAST_SCALE[found.course.last_scale_is]}")
    return [names, ", ".join(parts)]


def _verdict(verdict: Verdict, *, named: bool) -> list[str]:
    lines = [f"{verdict.severity}: {verdict.title}", f"  {verdict.detail}"]
    for place in verdict.evidence:
        where = f"{place.file}:{place.line}" if named else f"line {place.line}"
        step = f", step {place.step}" if place.step is not None else ""
        text = place.text if len(place.text) <= _MAX_TEXT else place.text[: _MAX_TEXT - 1] + "…"
        lines.append(f"  {where}{step}: {text}")
    return [*lines, f"  next: {verdict.next}"]


def _settings(course: Course) -> list[str]:
    if not course.points:
        return []
    shown = [
        f"{name} {setting.value:g} ({setting.source}: {setting.why})"
        for name, setting in course.settings.items()
        if name in ("loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
    ]
    if "loss_scale_window" not in course.settings and course.growths:
        shown.append("loss_scale_window unknown: with --set fp16.loss_scale_window=N growths get their steps")
    return ["settings", *(f"  {text}" for text in shown)] if shown else []


def _growths(course: Course) -> list[str]:
    """Those that no line tells of."""
    if not course.growths:
        return []
    lines = ["growths of the scale that the log does not name (inferred)"]
    for growth in course.growths[:_MAX_GROWTHS]:
        times = "once" if growth.times == 1 else f"{growth.times} times"
        end = "the end" if growth.before_step is None else f"step {growth.before_step}"
        word = "first at" if growth.exact else "first at about"
        where = f"{word} step {growth.step}" if growth.step is not None else "on a step that is not known"
        lines.append(
            f"  doubled {times} between step {growth.after_step} and {end}, {growth.scale:g} to "
            f"{growth.next_scale:g}; {where}"
        )
    more = len(course.growths) - _MAX_GROWTHS
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _plots(found: Diagnosis) -> list[list[str]]:
    from dslaunch.cli.diagnose_plot import curve_plot, scale_plot

    return [
        scale_plot(found.course, found.course.overflow_steps, found.last_step),
        curve_plot("loss", found.loss),
        curve_plot("gradient norm", found.norm),
    ]
