"""dslaunch explain: what a DeepSpeed key does, and how the loss scale moves."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import click

from dslaunch.cli import options
from dslaunch.cli.talk import talk

if TYPE_CHECKING:
    from dslaunch.core.loss_scale import LossScaleRule, LossScaleStep

SCHEMA_VERSION = 1
LOSS_SCALE = "loss-scale"
_STEPS = 60


@click.command("explain", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("key", metavar="KEY", required=False)
@click.option("--list", "as_list", is_flag=True, help="List every key, or those of the section KEY.")
@click.option(
    "--overflow-at", metavar="STEPS", help="For loss-scale: steps that overflow, such as 1,2,3,40 or 1-17."
)
@click.option(
    "--steps",
    type=click.IntRange(1, 1_000_000),
    help="For loss-scale: steps to show (default 60, or up to the last overflow).",
)
@click.option(
    "--set",
    "set_",
    multiple=True,
    metavar="fp16.KEY=VALUE",
    help="For loss-scale: a setting, such as fp16.hysteresis=1.",
)
@options.json_option
def command(
    key: str | None,
    as_list: bool,
    overflow_at: str | None,
    steps: int | None,
    set_: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what KEY of a DeepSpeed config does: type, default, stages, versions, effect.

    KEY loss-scale shows the course of the fp16 loss scale for given overflows.
    """
    if key != LOSS_SCALE and (overflow_at is not None or steps is not None or set_):
        raise click.UsageError("--overflow-at, --steps and --set go with `dslaunch explain loss-scale`")
    if key == LOSS_SCALE:
        if as_list:
            raise click.UsageError("--list goes with a section, and loss-scale is none")
        _explain_loss_scale(overflow_at or "", steps, set_, as_json)
    elif key is not None and not key.strip():
        raise click.UsageError("KEY is empty: name a key, or use --list")
    elif as_list:
        _list(key, as_json)
    elif key is None:
        raise click.UsageError("name a KEY, or use --list")
    else:
        _explain(key, as_json)


def _explain(text: str, as_json: bool) -> None:
    from dslaunch.config.schema import find_key
    from dslaunch.config.schema.arguments import find_argument
    from dslaunch.config.schema.describe import (
        argument_json,
        describe,
        describe_argument,
        key_json,
        keys_named,
        named_keys,
    )
    from dslaunch.config.schema.other_names import OTHER_NAMES

    if find_key(text) is None and (own := OTHER_NAMES.get(text.strip())) is not None:
        talk(f"{text.strip()} of other tools is {own} in a DeepSpeed config")
        text = own
    if not named_keys(text) and (argument := find_argument(text)) is not None:
        if as_json:
            _echo_json({"keys": [argument_json(argument)]})
        else:
            click.echo("\n".join(describe_argument(argument)))
        return
    keys = keys_named(text)
    if as_json:
        _echo_json({"keys": [key_json(key) for key in keys]})
    else:
        click.echo("\n\n".join("\n".join(describe(key)) for key in keys))


def _list(section: str | None, as_json: bool) -> None:
    from dslaunch.config.schema import key_table
    from dslaunch.config.schema.describe import key_json, keys_named, listed

    if section is not None:
        section = keys_named(section)[0].path
    if as_json:
        wanted = [
            k for k in key_table().values() if section is None or f"{k.path}.".startswith(f"{section}.")
        ]
        _echo_json({"keys": [key_json(key) for key in wanted]})
    else:
        click.echo("\n".join(listed(section)))


def _explain_loss_scale(overflow_at: str, steps: int | None, set_: tuple[str, ...], as_json: bool) -> None:
    import dataclasses

    from dslaunch.cli.loss_scale_plot import event_lines, plot_lines, rule_lines
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.loss_scale import simulate_loss_scale

    rule, overflows = build_rule(set_), parse_steps(overflow_at)
    last = max(overflows, default=0)
    if steps is None:
        steps = max(_STEPS, last)
    elif steps < last:
        raise ConfigError(f"--overflow-at: step {last} is not among the {steps} of --steps")
    course = simulate_loss_scale(rule, steps=steps, overflow_at=overflows)
    if as_json:
        _echo_json({"rule": dataclasses.asdict(rule), "steps": [_step_json(step) for step in course]})
        return
    events = event_lines(course)
    blocks = [rule_lines(rule), events or ["nothing happens in these steps"], plot_lines(course)]
    click.echo("\n\n".join("\n".join(block) for block in blocks))


def _step_json(step: LossScaleStep) -> dict[str, Any]:
    """A scale that doubled past the largest float is null: JSON has no word for infinity."""
    import dataclasses

    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in dataclasses.asdict(step).items()
    }


def parse_steps(text: str) -> frozenset[int]:
    """``1,2,5-8`` -> the steps, counted from 1. Raises ConfigError for anything else."""
    from dslaunch.core.errors import ConfigError

    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else 0
        if not 0 < first <= last <= 1_000_000:
            raise ConfigError(
                f"--overflow-at {text!r}: {part!r} is no step or range of steps",
                hint="write for example 1,2,3,40 or 1-17",
            )
        found.update(range(first, last + 1))
    return frozenset(found)


def build_rule(settings: tuple[str, ...]) -> LossScaleRule:
    """The rule with ``fp16.KEY=VALUE`` applied, checked as a config's fp16 section. Raises ConfigError."""
    import dataclasses

    from dslaunch.config.check import Target, check_config
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.loss_scale import LossScaleRule

    known = {field.name for field in dataclasses.fields(LossScaleRule)} - {"raises_at_floor"}
    values: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("fp16.")
        if not equals or name not in known:
            raise ConfigError(
                f"--set {text!r} is no setting of the loss scale", hint=f"keys: {', '.join(sorted(known))}"
            )
        values[name] = 0 if value.strip() == "dynamic" else _read(value)
    config = {"train_batch_size": 1, "gradient_clipping": 1, "zero_optimization": {"stage": 1}}
    text = json.dumps({**config, "fp16": {"enabled": True, **values}})
    for finding in check_config(text, Target()).findings:
        if finding.severity == "error":
            raise ConfigError(f"--set {finding.message}", hint=finding.hint)
    return LossScaleRule(**values)


def _read(value: str) -> Any:
    try:
        number = json.loads(value, parse_constant=str)
    except ValueError:
        return value
    if not isinstance(number, float):
        return number
    if not math.isfinite(number):
        return value  # reported as no number
    return int(number) if number.is_integer() else number


def _echo_json(value: dict[str, Any]) -> None:
    click.echo(
        json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2, ensure_ascii=False, allow_nan=False)
    )
