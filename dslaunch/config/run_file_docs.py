"""docs/run-file.md and its JSON schema, made from the spec: ``python -m dslaunch.config.run_file_docs``."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dslaunch.config.problems import model_in
from dslaunch.config.spec import RunSpec
from dslaunch.core.atomic import write_text

REPO_ROOT = Path(__file__).resolve().parents[2]
MARKDOWN = Path("docs/run-file.md")
JSON_SCHEMA = Path("docs/run-file.schema.json")

# The order in which a reader wants the keys; a test checks that none is left out.
ORDER = [
    "name",
    "task",
    "seed",
    "model",
    "data",
    "adapter",
    "engine",
    "precision",
    "fp32_modules",
    "fp16",
    "torch_autocast",
    "zero_optimization",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "neftune_noise_alpha",
    "cluster",
    "launch",
    "watch",
    "allow_emulated_fp16",
    "allow_untested_deepspeed",
    "output",
    "deepspeed_template",
    "deepspeed",
]

_HEAD = """\
<!-- Made by `python -m dslaunch.config.run_file_docs` (make docs). Change the spec, not this file. -->

# The run file

A run file is YAML. `dslaunch plan RUN.yaml` shows what each key resolves to, why, and where it was
written; `dslaunch gen-config RUN.yaml` shows the DeepSpeed JSON. Problems are reported with line and
key, in two rounds: all keys, types and ranges that are wrong at once; then, once these are right,
all paths that are not there and numbers that do not go together.

- An unknown key is an error that names the nearest one. Keys at the top that begin with `x-` are yours.
- `--set key=value` on any command that takes a run file sets a key (`--set optimizer.lr=1e-4`,
  `--set data.train[0].path=a.jsonl`). Flags beat `--set` and the file, and `--set key=null` unsets one.
- Paths in the file are relative to the file; paths on the command line, to where it was typed.
- Numbers may be written as `1e-5` or `5e8`; a number in quotes is text, and an error where a number
  is meant. `no`, `yes`, `on` and `off` are truth values to YAML: quote them where text is meant.
- The file is UTF-8 without a byte order mark. Other tools' names of a key or value (`learning_rate`,
  `float16`) are errors that say what it is called here.
- A path that exists is used; a name like `org/name` that does not is a hub id. A name without `/`
  that is nearly the name of something there is an error: write a hub id with its owner.
- For completion in an editor, put this line at the top:
  `# yaml-language-server: $schema=<path to>/run-file.schema.json`

The smallest run file:

```yaml
model: HuggingFaceTB/SmolLM2-135M-Instruct
data:
  train: train.jsonl
train_batch_size: 8
```
"""

_KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "any"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def render_markdown() -> str:
    """docs/run-file.md: every key with its type, default and meaning."""
    fields = {name: RunSpec.model_fields[name] for name in ORDER}
    plain = {name: f for name, f in fields.items() if model_in(f.annotation) is None}
    parts = [_HEAD, "## Keys at the top\n", _table(plain, "")]
    for name, field in fields.items():
        if (model := model_in(field.annotation)) is not None:
            parts += _section(name, field, model)
    return "\n".join(parts)


def render_json_schema() -> str:
    """docs/run-file.schema.json: the same for editors and other tools."""
    schema = RunSpec.model_json_schema()
    definitions = schema["$defs"]
    source = {"$ref": "#/$defs/DataSourceSpec"}
    either = {"anyOf": [{"type": "string", "minLength": 1}, source]}
    for name in ("train", "eval"):
        entry = definitions["DataSpec"]["properties"][name]
        entry.pop("items", None)
        entry.pop("type", None)
        entry.pop("minItems", None)
        entry["anyOf"] = [*either["anyOf"], {"type": "array", "items": either}]
    schema["properties"]["model"] = {
        "description": RunSpec.model_fields["model"].description,
        "anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/ModelSpec"}],
    }
    _allow_one_name(schema, definitions)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    schema["title"] = "dslaunch run file"
    schema["patternProperties"] = {"^x-": {}}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def write_documents(root: Path = REPO_ROOT) -> list[Path]:
    """Write both documents below ``root`` and return their paths."""
    texts = {MARKDOWN: render_markdown(), JSON_SCHEMA: render_json_schema()}
    for path, text in texts.items():
        write_text(root / path, text)
    return list(texts)


def _allow_one_name(schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Lists of names may be written as one name."""
    for owner, name in _name_lists():
        entry = definitions[owner]["properties"][name]
        array = entry.pop("anyOf", [entry])[0]
        array, *others = array.get("oneOf", [array])
        kept = {key: entry.pop(key) for key in ("items", "type", "minItems") if key in entry} or array
        entry["anyOf"] = [dict(kept["items"]), dict(kept), *others]
        if name == "gpu":
            entry["anyOf"].append({"type": "null"})


def _name_lists() -> Iterator[tuple[str, str]]:
    yield from (("AdapterSpec", "target_modules"), ("AdapterSpec", "modules_to_save"))
    yield from (
        ("OptimizerSpec", "no_decay"),
        ("ParamGroupSpec", "match"),
        ("LaunchSpec", "secret_env"),
        ("ContainerSpec", "args"),
        ("OutputSpec", "report_to"),
        ("ClusterSpec", "gpu"),
    )


def _section(key: str, field: FieldInfo, model: type[BaseModel]) -> list[str]:
    parts = [f"\n## {key}\n", f"{_doc(model)}\n"]
    inner = {name: model_in(f.annotation) for name, f in model.model_fields.items()}
    parts.append(_table(model.model_fields, f"{key}."))
    shown: set[type[BaseModel]] = set()
    for name, sub in inner.items():
        if sub is None or sub in shown:
            continue
        shown.add(sub)
        names = ", ".join(f"`{key}.{n}`" for n, other in inner.items() if other is sub)
        parts += [f"\nIn {names} ({_lower(_doc(sub))}):\n", _table(sub.model_fields, f"{key}.{name}.")]
    return parts


def _table(fields: dict[str, FieldInfo], prefix: str) -> str:
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for name, field in fields.items():
        cells = (f"`{prefix}{name}`", _type_text(field), _default(field), field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or field.default_factory is not None or value == ():
        return ""
    if isinstance(value, tuple):
        value = list(value) if len(value) > 1 else value[0]
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"


def _type_text(field: FieldInfo) -> str:
    return _annotation_text(field.annotation, list(field.metadata))


def _annotation_text(annotation: Any, metadata: list[Any]) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _annotation_text(args[0], [*metadata, *_flat(args[1:])])
    if origin in (typing.Union, types.UnionType):
        kinds = [a for a in args if a is not type(None)]
        return " or ".join(_annotation_text(kind, metadata) for kind in kinds)
    if origin is typing.Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        return _tuple_text(args)
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    limits = " and ".join(
        f"{sign} {getattr(item, name):.15g}"
        for item in metadata
        for name, sign in _BOUNDS.items()
        if _has(item, name)
    )
    return " ".join(filter(None, (_KINDS[annotation], limits)))


def _tuple_text(args: tuple[Any, ...]) -> str:
    if args[-1] is not Ellipsis:
        return f"list of {len(args)} numbers"
    inner = _annotation_text(args[0], [])
    if inner == "section":
        return "path, section, or a list of them"
    if inner.startswith("number"):
        return f"list of {inner.replace('number', 'numbers', 1)}"
    return "name or list of names" if inner == "text" else f"{inner}, or a list of them"


def _flat(items: tuple[Any, ...]) -> list[Any]:
    return [inner for item in items for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _has(item: Any, name: str) -> bool:
    return isinstance(getattr(item, name, None), (int, float))


def _doc(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split()).replace("``", "`")


def _lower(text: str) -> str:
    return (text[:1].lower() + text[1:]).rstrip(".")


if __name__ == "__main__":
    for written in write_documents():
        print(f"wrote {written}")
