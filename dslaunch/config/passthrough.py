"""deepspeed: section -> what of it cannot go into the DeepSpeed JSON as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from dslaunch.config.ds_keys import OLD_ZERO_KEYS, TOP_LEVEL_KEYS, TOP_LEVEL_TYPES, ZERO_TYPES, Types
from dslaunch.config.report import Report
from dslaunch.config.spec_engine import Fp16Spec, OptimizerParamsSpec, OptimizerSpec
from dslaunch.config.zero import ACTING_STAGES
from dslaunch.core.plan import Precision

Path = tuple[str, ...]

# Planned values that an override may replace: the plan only fills in what is usual.
_FREE = {("zero_allow_untested_optimizer",), ("communication_data_type",)}
_OWN_SECTION = {"scheduler": "scheduler:", "bfloat16": "precision: bf16", "torch_autocast": "precision:"}
# Sections that the run file decides as a whole: path in DeepSpeed's JSON -> the spec with its own keys.
_DECIDED: dict[Path, tuple[str, type[BaseModel] | None]] = {
    ("fp16",): ("fp16", Fp16Spec),
    ("bf16",): ("precision", None),
    ("optimizer", "params"): ("optimizer.params", OptimizerParamsSpec),
    ("optimizer",): ("optimizer", OptimizerSpec),
}
_IN_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
}


def check_overrides(
    overrides: Mapping[str, Any], precision: Precision, planned: Mapping[Path, Any], report: Report
) -> None:
    """Record as problems: unknown keys, wrong types, and what the run file itself decides.

    ``planned``: every key of the JSON that the run file decides, with its value.
    An override that says the same is let be.
    """
    check = _Check(precision, planned)
    for name in overrides:
        if name not in TOP_LEVEL_KEYS:
            check.unknown((name,), TOP_LEVEL_KEYS)
    for path, value in leaves(overrides):
        check.value(path, value)
    check.types(overrides, (), TOP_LEVEL_TYPES)
    for path, (message, hint) in check.found.items():
        report.fail(_key(path), f"{_key(path)}{message}", hint)


def leaves(value: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Key path and value of everything that is not a mapping (an empty mapping counts as a value)."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from leaves(item, (*prefix, key))
        else:
            yield (*prefix, key), item


def _key(path: Path) -> str:
    return ".".join(("deepspeed", *path))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


class _Check:
    """Collects the first problem of each key, as the rest of a message and a hint."""

    def __init__(self, precision: Precision, planned: Mapping[Path, Any]) -> None:
        self.precision = precision
        self.planned = planned
        self.stage: int = planned[("zero_optimization", "stage")]
        self.found: dict[Path, tuple[str, str]] = {}

    def fail(self, path: Path, message: str, hint: str) -> None:
        self.found.setdefault(path, (message, hint))

    def value(self, path: Path, value: Any) -> None:
        """What contradicts the run file, or is without effect."""
        if value == "auto":
            self.fail(path, ": auto is a word of the Hugging Face Trainer", "write the value itself")
        elif path[0] in _OWN_SECTION:
            self.fail(path[:1], ": the run file has its own key for it", f"use {_OWN_SECTION[path[0]]}")
        elif path[0] == "zero_optimization" and self.is_ignored(path):
            self.fail(path, f" has no effect at zero_optimization.stage {self.stage}", f"remove {path[1]}")
        elif path[0] == "data_types":
            self.data_type(path, value)
        elif path not in _FREE and not (path in self.planned and _same(self.planned[path], value)):
            if (owner := self.owner(path)) is not None:
                planned = repr(self.planned.get(path, "the run file"))
                message = f": {value!r} contradicts {planned} of the run file"
                self.fail(path, message, f"set {owner} in the run file itself")
            elif section := next((part for part in _DECIDED if path[: len(part)] == part), None):
                self.decided(path, section)

    def is_ignored(self, path: Path) -> bool:
        """Whether DeepSpeed reads the key at other stages only."""
        if len(path) < 2 or path[1] not in ZERO_TYPES:
            return False
        always = (3,) if path[1].startswith("stage3_") else (self.stage,)
        return self.stage not in ACTING_STAGES.get(path[1], always)

    def owner(self, path: Path) -> str | None:
        """The run-file key to use in place of an override of a planned value; None where it is not one."""
        if path not in self.planned and not any(p[: len(path)] == path for p in self.planned):
            return None
        if path[0] in ("fp16", "bf16"):
            return "precision" if path[-1] in ("enabled", path[0]) else ".".join(path)
        renamed: dict[Path, str] = {
            ("optimizer", "params", "lr"): "optimizer.lr",
            ("optimizer", "params", "adam_w_mode"): "optimizer.type",
        }
        return renamed.get(path, ".".join(path))

    def decided(self, path: Path, section: Path) -> None:
        """A further key of a section that is wholly the run file's."""
        owner, spec = _DECIDED[section]
        near = _nearest(path[len(section)], spec.model_fields) if spec and len(path) > len(section) else None
        own = f"write {owner}.{near} in the run file itself"
        hint = own if near else f"remove it; the run file has {owner}"
        self.fail(path, f": {'.'.join(section)} is decided by the run file itself", hint)

    def data_type(self, path: Path, value: Any) -> None:
        """A type besides the model's: fp32 to sum gradients in is the only one."""
        own: tuple[str, ...] = (self.precision,)
        # DeepSpeed raises NotImplementedError for two types at stage 0.
        sums = (*own, "fp32") if self.stage > 0 else own
        allowed = {"grad_accum_dtype": sums, "param_dtype": own}.get(path[-1])
        if allowed is not None and value not in allowed:
            at = f"precision {self.precision}" + (" at stage 0" if self.stage == 0 else "")
            names = " or ".join(dict.fromkeys(allowed))
            self.fail(path, f": {value!r} does not go with {at}", f"write {names}, or remove it")

    def types(self, section: Mapping[str, Any], above: Path, types: Types) -> None:
        """Unknown keys of the sections whose keys are all known, and values of another type."""
        for name, value in section.items():
            path, wanted = (*above, name), types.get(name)
            if wanted is None and above:
                self.unknown(path, types)
            elif wanted is None:  # a section that is not in the table; nearly all have this switch
                if isinstance(value, Mapping) and type(value.get("enabled", True)) is not bool:
                    self.wrong_type((*path, "enabled"), value["enabled"], bool)
            elif isinstance(wanted, Mapping) and isinstance(value, Mapping):
                self.types(value, path, wanted)
            elif isinstance(wanted, Mapping) or not _is_a(value, wanted):
                self.wrong_type(path, value, dict if isinstance(wanted, Mapping) else wanted)

    def wrong_type(self, path: Path, value: Any, wanted: type) -> None:
        words = _IN_WORDS[wanted]
        if isinstance(value, str):
            self.fail(path, f': "{value}" is text, where {words} is meant', f"write {words}, without quotes")
        else:
            shown = str(value).lower() if value is None or isinstance(value, bool) else value
            self.fail(path, f": {shown} is not {words}", f"write {words}")

    def unknown(self, path: Path, known: Iterable[str]) -> None:
        if path[0] == "zero_optimization" and path[-1] in OLD_ZERO_KEYS:
            self.fail(path, " is an old name", f"write {OLD_ZERO_KEYS[path[-1]]}")
        elif (near := _nearest(path[-1], known)) is not None:
            self.fail(path, f" is no key of DeepSpeed; did you mean {near}?", f"write {near}")
        else:
            self.fail(path, " is no key of DeepSpeed", "DeepSpeed would ignore it silently; remove it")


def _is_a(value: Any, wanted: type) -> bool:
    if wanted is dict:
        return isinstance(value, Mapping)
    return type(value) is wanted or (wanted is float and type(value) is int)


def _nearest(name: str, choices: Iterable[str]) -> str | None:
    import difflib

    near = difflib.get_close_matches(name, list(choices), n=1)
    return near[0] if near else None
