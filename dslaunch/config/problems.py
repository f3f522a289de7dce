"""pydantic's errors -> sentences with file, line and key path; text that is a number -> the number."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from dslaunch.config.spec_parts import FP32_LEAST, FP32_MOST
from dslaunch.config.synonyms import known_key, known_value, why_not
from dslaunch.config.yaml_tree import KeyPath, Mark, Tree, key_text
from dslaunch.core.errors import ConfigError

_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?")


def to_number(text: str, *, whole: bool | None) -> int | float | None:
    """The number that plain text like ``1e-5`` or ``5e8`` means, or None.

    ``whole``: True wants an int, False a float, None whichever the text is. A
    text with an exponent and a whole value (``5e8``) is an int.
    """
    if not _NUMBER.fullmatch(text):
        return None
    clean = text.replace("_", "")
    if re.match(r"[-+]?0\d", clean):  # 010: octal to YAML, ten to people
        return None
    try:
        number = float(clean)
    except ValueError:
        return None
    exact = abs(number) < 2**53 and number == int(number) if abs(number) != float("inf") else False
    if whole is False:
        return number
    if exact and ("e" in clean.lower() or re.fullmatch(r"[-+]?\d+", clean)):
        return int(number)
    return None if whole else number


@dataclass(frozen=True)
class RepairedNumber:
    """An unquoted text of the run file that was read as a number."""

    key: str
    mark: Mark
    number: int | float


def note_repairs(repaired: Sequence[RepairedNumber], name: str) -> list[str]:
    """One note for all of them, in the order of the file ``name``; none where there are none."""
    if not repaired:
        return []
    first, *others = sorted(repaired, key=lambda each: each.mark.line)
    if not others:
        return [f"{first.mark.source}: {first.key}: read {first.mark.text} as the number {first.number}"]
    each = [f"{one.key} {one.mark.text} (line {one.mark.line})" for one in (first, *others)]
    return [f"{name}: read as numbers, though they are text to YAML: {', '.join(each)}"]


def repair_numbers(tree: Tree, errors: Sequence[Any]) -> tuple[bool, list[RepairedNumber]]:
    """Replace unquoted text that YAML did not read as the number it is.

    Returns whether anything was replaced, and what of it stands in the file (on the
    command line nobody expects YAML's rules, so there is nothing to say).
    """
    repaired, noted = False, []
    for error in errors:
        if error["type"] not in ("int_type", "float_type"):
            continue
        path = _written_path(tree, error["loc"])
        mark = tree.marks.get(path)
        written = type(error["input"]) in (str, int, float)  # not bool, None or a section
        if mark is None or mark.quoted or mark.raw or not written:
            continue
        number = to_number(mark.text, whole=error["type"] == "int_type")
        if number is None:
            continue
        set_value(tree, path, number)
        repaired = True
        if mark.line and isinstance(error["input"], str):
            noted.append(RepairedNumber(key_text(path), mark, number))
    return repaired, noted


def set_value(tree: Tree, path: KeyPath, value: Any) -> None:
    """Replace the value at an existing path (tuples are copied on the way)."""

    def replaced(container: Any, rest: KeyPath) -> Any:
        if not rest:
            return value
        if isinstance(container, tuple):
            index = rest[0]
            return tuple(replaced(v, rest[1:]) if i == index else v for i, v in enumerate(container))
        return {k: replaced(v, rest[1:]) if k == rest[0] else v for k, v in container.items()}

    tree.value = replaced(tree.value, path)


def explain_errors(kind: type[BaseModel], tree: Tree, errors: Sequence[Any]) -> list[tuple[int, ConfigError]]:
    """One ConfigError for each key that is wrong, with its line for sorting."""
    by_path: dict[KeyPath, list[Any]] = {}
    for error in errors:
        if error["type"] == "too_short" and error["input"]:
            continue  # entries that are wrong themselves are not counted: reported on their own
        path = _written_path(tree, error["loc"], missing=error["type"] == "missing")
        by_path.setdefault(path, []).append(error)
    meant = {_meant_key(kind, path) for path, group in by_path.items() if _is_unknown(group)}
    problems = []
    for path, group in by_path.items():
        if group[0]["type"] == "missing" and _stands_for(meant, key_text(path)):
            continue  # the misspelt key is reported
        mark = nearest_mark(tree, path)
        message, hint = _sentence(kind, path, group, tree.marks.get(path))
        source = mark.source if mark else tree.name
        prefix = f"{source}: " if source else ""
        problems.append((mark.line if mark else 0, ConfigError(f"{prefix}{message}", hint=hint)))
    return problems


def _is_unknown(group: Sequence[Any]) -> bool:
    return bool(group[0]["type"] == "extra_forbidden")


def _stands_for(meant: set[str | None], missing: str) -> bool:
    return any(key == missing or key.startswith(f"{missing}.") for key in meant if key)


def nearest_mark(tree: Tree, path: KeyPath) -> Mark | None:
    """The mark of a key path, or of the closest section above it that was written."""
    while path:
        if path in tree.marks:
            return tree.marks[path]
        path = path[:-1]
    return None


def _written_path(tree: Tree, loc: Sequence[str | int], *, missing: bool = False) -> KeyPath:
    """pydantic's ``loc`` without what the user did not write: union branches, list wrappers."""
    path: list[str | int] = []
    value: Any = tree.value
    for part in loc[:-1] if missing else loc:
        if _has(value, part):
            value = value[part]
            path.append(part)
        elif part not in (0, "path", "by host"):  # a string or mapping for a list of one, a union's branch
            break
    return (*path, loc[-1]) if missing else tuple(path)


def _has(container: Any, part: str | int) -> bool:
    if isinstance(container, tuple):
        return isinstance(part, int) and part < len(container)
    return isinstance(container, Mapping) and part in container


def _sentence(
    kind: type[BaseModel], path: KeyPath, errors: Sequence[Any], mark: Mark | None
) -> tuple[str, str | None]:
    first, key = errors[0], key_text(path)
    if first["type"] == "extra_forbidden":
        return _unknown_key(kind, path)
    if first["type"] == "missing":
        return f"{key} is missing", f"add {key}: ..."
    wanted = " or ".join(dict.fromkeys(_wanted(error) for error in errors))
    shown = _shown(first["input"], mark)
    if mark is not None and (trap := _yaml_trap(first["input"], mark, wanted, key)):
        return trap[0], _KEY_HINTS.get(key, trap[1])
    hint = _KEY_HINTS.get(key) or _section_hint(key, first, shown)
    hint = hint or _rounding_hint(kind, path, first) or _literal_hint(key, first) or _fp32_hint(first)
    return f"{key}: {shown} is not {wanted}", hint


def _yaml_trap(value: Any, mark: Mark, wanted: str, key: str) -> tuple[str, str] | None:
    last = re.sub(r"^.*\.", "", key)
    if isinstance(value, bool) and not mark.quoted and mark.text:
        truth = "true" if value else "false"
        if "text" in wanted or mark.text.lower() not in ("true", "false"):
            hint = f'write {last}: "{mark.text}"' if "text" in wanted else f"write {wanted}"
            return f"{key}: YAML reads {mark.text} as {truth}, where {wanted} is meant", hint
    if isinstance(value, str) and mark.quoted and (meant := _unquoted(value, wanted)):
        message = f'{key}: "{value}" is text because it is quoted; {wanted} is meant'
        rewritten = f"{last}: {meant}" if mark.line else f"{mark.source} {key}={meant}"
        return message, f"remove the quotes: {rewritten}"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and wanted.startswith("text"):
        message = f"{key}: {mark.text or value} is a number, where {wanted} is meant"
        return message, f'write {last}: "{mark.text}"'
    return None


def _unquoted(value: str, wanted: str) -> str | None:
    """What a quoted text would be without its quotes, where that is of the type wanted."""
    if "number" in wanted and to_number(value, whole=None) is not None:
        return value
    if "true or false" in wanted and value.lower() in ("true", "yes", "on"):
        return "true"
    if "true or false" in wanted and value.lower() in ("false", "no", "off"):
        return "false"
    return None


def _wanted(error: Any) -> str:
    context = error.get("ctx", {})
    kind = error["type"]
    bounds = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
    if kind in bounds:
        limit = next(iter(context.values()))
        return f"{bounds[kind]} {limit:g}" if isinstance(limit, float) else f"{bounds[kind]} {limit}"
    if kind == "multiple_of":
        step = int(context["multiple_of"])
        return f"a multiple of {step}, as {int(error['input']) // step * step + step} is"
    if kind == "literal_error":
        return "one of " + re.sub(r"'", "", str(context["expected"])).replace(" or ", ", ")
    if kind == "string_pattern_mismatch":
        return "letters, digits, `.`, `_` and `-` alone, beginning with a letter or digit"
    if kind == "tuple_type":
        return "a list" if error["loc"][-1] == "betas" else "text or a list"
    if kind in ("model_type", "model_attributes_type"):  # a model or source may be written as its path alone
        by_path = error["loc"][0] == "model" or (len(error["loc"]) > 1 and error["loc"][0] == "data")
        return f"text or {_MAPPING}" if by_path else _MAPPING
    return _WANTED.get(kind, str(error["msg"]).lower())


_MAPPING = "a mapping of keys to values"
# In place of the general hint, where the key's own values are known.
_KEY_HINTS = {
    "adapter": "write adapter: {type: lora}; its other keys have defaults",
    "cluster.gpu": "name a device, such as a100 or cpu, or leave cluster.gpu out",
    "output.report_to": "write tensorboard, wandb or mlflow, or leave report_to out",
    "fp16": "choose 16 bit with precision: fp16; this section holds its loss scale",
    "fp16.loss_scale": "write dynamic; a fixed scale of 1 or less leaves gradients below 6e-8 at 0",
    "task": "a run trains sft; plan --model and gen-config know --task for a script of your own",
    "zero_optimization.stage": "stage 3 shards all there is; offload_optimizer and offload_param save more",
    "deepspeed": "write the keys of the DeepSpeed JSON themselves here, as a mapping",
}
_MAIN_KEYS = {"zero_optimization": "stage", "data": "train", "optimizer": "type", "scheduler": "type"}
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "too_short": "a list with enough entries",
    "too_long": "a list with so few entries",
    "string_too_short": "text with something in it",
}


def _shown(value: Any, mark: Mark | None) -> str:
    if value is None:
        return "an empty value" if mark is None or not mark.text else mark.text
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list" if value else "an empty list"
    if mark is not None and mark.text:
        return f'"{mark.text}"' if mark.quoted else mark.text
    return f'"{value}"' if isinstance(value, str) else str(value)


def _section_hint(key: str, error: Any, shown: str) -> str | None:
    """Where one value stands for a whole section: the key of the section that it is most likely for."""
    wanted = ("model_type", "model_attributes_type")
    name = _MAIN_KEYS.get(key)
    if error["type"] not in wanted or name is None or isinstance(error["input"], bool):
        return None
    if not isinstance(error["input"], (str, int)):
        return f"write {key}: {{{name}: ...}}"
    return f"write {key}: {{{name}: {shown}}}"


def _rounding_hint(kind: type[BaseModel], path: KeyPath, error: Any) -> str | None:
    value = error["input"]
    if error["type"] not in ("int_type", "int_from_float") or not isinstance(value, float):
        return None
    near = round(value) if abs(value) < 2**53 else None
    return f"write {path[-1]}: {near}" if near is not None and _accepts(kind, path, near) else None


def _fp32_hint(error: Any) -> str | None:
    beyond = error.get("ctx", {}).get("le") == FP32_MOST or error.get("ctx", {}).get("ge") == FP32_LEAST
    return "fp32, in which optimizers compute, could not hold what they make of it" if beyond else None


def _accepts(kind: type[BaseModel], path: KeyPath, value: int) -> bool:
    """Whether ``value`` is in the range of the key at ``path``."""
    *section, name = _names(path)
    model = section_at(kind, section)
    if model is None or (field := model.model_fields.get(name)) is None:
        return False
    ranged: Any = typing.Annotated[field.annotation, field]
    try:
        TypeAdapter[Any](ranged).validate_python(value)
    except ValidationError:
        return False
    return True


def _literal_hint(key: str, error: Any) -> str | None:
    if error["type"] != "literal_error" or not isinstance(error["input"], (str, int)):
        return None
    value = str(error["input"])
    choices = re.findall(r"'([^']+)'", str(error["ctx"]["expected"]))
    near = known_value(key, value) or _nearest(value, choices)
    return f"did you mean {near}?" if near else None


def _unknown_key(kind: type[BaseModel], path: KeyPath) -> tuple[str, str | None]:
    key, last = key_text(path), str(path[-1])
    if (reason := why_not(key)) is not None:
        return f"unknown key {key}", reason
    meant, names = _meant_key(kind, path), _names(path)
    if meant is not None and meant.split(".")[:-1] == list(names[:-1]) and known_key(".".join(names)) is None:
        near = meant.rpartition(".")[2]
        return f"unknown key {key}; did you mean {near}?", f"write {near} in place of {last}"
    if meant is not None:
        return f"unknown key {key}; it is called {meant} here", _move_hint(meant)
    if "." in last:
        return f"unknown key {key}", f"nest it: {last.replace('.', ': ')} in separate lines"
    section, siblings = key_text(path[:-1]) or "the top level", fields_at(kind, names[:-1])
    return f"unknown key {key}", f"{section} takes: {', '.join(siblings)}" if siblings else None


def _move_hint(meant: str) -> str:
    section, _, name = meant.rpartition(".")
    return f"write {name} in the section {section}" if section else f"write it as {name}, at the top level"


def _meant_key(kind: type[BaseModel], path: KeyPath) -> str | None:
    """The key that an unknown one most likely means, from the top; None where nothing is near.

    A name that another tool has comes first, then a key of that very name in another
    section (where only one has it), then the nearest name of the same section.
    """
    names = _names(path)
    synonym = known_key(".".join(names))
    keys = _all_keys(kind)
    if synonym in keys:
        return synonym
    same_name = [key for key in keys if key.rpartition(".")[2] == names[-1]]
    if len(same_name) == 1:
        return same_name[0]
    near = _nearest(names[-1], fields_at(kind, names[:-1]))
    return ".".join((*names[:-1], near)) if near else next(iter(same_name), None)


def _names(path: KeyPath) -> tuple[str, ...]:
    return tuple(part for part in path if isinstance(part, str))


def _nearest(name: str, choices: Sequence[str]) -> str | None:
    import difflib

    folded = {choice.lower().replace("-", "_"): choice for choice in choices}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.7)
    return folded[near[0]] if near else None


def fields_at(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the section at ``path``, entries of lists left out; none where it is no section."""
    model = section_at(kind, path)
    return list(model.model_fields) if model else []


def section_at(kind: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The section at ``path``, entries of lists left out; None where it is no section."""
    model: type[BaseModel] | None = kind
    for part in path:
        field = model.model_fields.get(part) if model else None
        model = model_in(field.annotation) if field else None
    return model


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The section inside a field's type: ``X``, ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (tuple, typing.Union, types.UnionType, typing.Annotated):
        for inner in typing.get_args(annotation):
            if (found := model_in(inner)) is not None:
                return found
    return None


def _all_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        if (inner := model_in(field.annotation)) is not None:
            keys += _all_keys(inner, f"{prefix}{name}.")
    return keys
