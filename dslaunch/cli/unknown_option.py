"""An option that a verb does not have: what sets the same, or which verb has it, in place of a near name."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import click

_ALIKE = 0.75  # difflib's ratio: below it two names have letters in common and no more
_WRAPPERS = ("path", "device")  # keys for which the section's own name may stand


def explain(error: click.NoSuchOption, args: Sequence[str]) -> click.UsageError:
    """``error`` with what helps: ``--set KEY=VALUE``, a name much like it, or verbs that have it."""
    name = error.option_name
    command = error.ctx.command if error.ctx else None
    near = [other for other in error.possibilities or () if _alike(name, other)]
    takes_set = command is not None and any(param.name == "set_" for param in command.params)
    if takes_set and (key := _run_file_key(name)) is not None:
        advice = f"for a run file: --set {key}={_value(key, name, args)}"
    elif near:
        advice = f"did you mean {' or '.join(near)}?"
    elif verbs := list(_verbs_with(name)):
        advice = f"it is an option of {', '.join(verbs)}"
    else:
        advice = ""
    return click.UsageError(f"No such option {name!r}{'; ' * bool(advice)}{advice}", ctx=error.ctx)


def _run_file_key(option: str) -> str | None:
    """The key that an option names: the flag's own of another verb, a path, or the last part of just one."""
    from dslaunch.cli.options import FLAG_KEYS
    from dslaunch.config.synonyms import known_key

    name = option.lstrip("-").replace("-", "_")
    if name in FLAG_KEYS:
        path = FLAG_KEYS[name]
        return ".".join(path[:-1] if len(path) > 1 and path[-1] in _WRAPPERS else path)
    keys = list(_keys())
    if name in keys:
        return name
    last = [key for key in keys if key.rpartition(".")[2] == name]
    return last[0] if len(last) == 1 else known_key(name)


def _keys() -> dict[str, Any]:
    """The keys of the run file with their types, at the top and in its sections, without those of lists."""
    from dslaunch.config.spec import RunSpec

    found: dict[str, Any] = {}
    for name, field in RunSpec.model_fields.items():
        kinds = (field.annotation, *typing.get_args(field.annotation))
        below: dict[str, Any] = next(
            (kind.model_fields for kind in kinds if hasattr(kind, "model_fields")), {}
        )
        found |= {f"{name}.{key}": part.annotation for key, part in below.items()}
        found |= {} if below else {name: field.annotation}
    return found


def _value(key: str, option: str, args: Sequence[str]) -> str:
    """What was typed for the option; VALUE where that cannot be told."""
    from dslaunch.core.command import quote

    for text, after in zip(args, (*args[1:], ""), strict=True):
        if text.startswith(f"{option}="):
            return quote(text.partition("=")[2])
        if text == option and _is_switch(_keys().get(key)):
            return "true"
        if text == option and after and not after.startswith("-"):
            return quote(after)
    return "VALUE"


def _is_switch(kind: Any) -> bool:
    """Whether a key is true, false or, besides, a word such as auto."""
    return kind is bool or bool in typing.get_args(kind)


def _verbs_with(option: str) -> Iterator[str]:
    import importlib

    from dslaunch.cli.main import VERBS

    for verb, (module, _) in VERBS.items():
        command: click.Command = importlib.import_module(module).command
        if any(option in param.opts for param in command.params):
            yield verb


def _alike(one: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, one, other).ratio() >= _ALIKE
