"""What stands in the DeepSpeed JSON besides the plan: raw keys of the run file, or of a user's template.

Two questions, both answered for the config as DeepSpeed will get it: does it contradict the
run file, and what does ``dslaunch check`` say of it? The latter's errors and warnings are
problems here: a run file is no place for a key that DeepSpeed refuses, ignores or misreads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dslaunch.config.check import Target, check_value
from dslaunch.config.nested import Path, holds, leaves
from dslaunch.config.rendered import place_of
from dslaunch.config.report import Report
from dslaunch.config.spec_engine import Fp16Spec, OptimizerParamsSpec, OptimizerSpec
from dslaunch.core.devices import Device
from dslaunch.core.errors import ConfigError
from dslaunch.core.finding import Finding, key_text
from dslaunch.core.plan import Precision
from dslaunch.core.templating import Rendered

# Planned values that may be replaced: the plan only fills in what is usual.
_FREE = {("zero_allow_untested_optimizer",), ("communication_data_type",)}
_RISKS = ("initial-scale", "min-loss-scale", "no-loss-scaling")
# What is said, or refused for scripts that are not ours, where the plan is made.
_SAID_BEFORE = ("fp16-stage-0", "device")
_OWN_SECTION = {"scheduler": "scheduler:", "bfloat16": "precision: bf16", "torch_autocast": "precision:"}
# Sections that the run file decides as a whole: path in DeepSpeed's JSON -> the spec with its own keys.
_DECIDED: dict[Path, tuple[str, type[BaseModel] | None]] = {
    ("fp16",): ("fp16", Fp16Spec),
    ("bf16",): ("precision", None),
    ("optimizer", "params"): ("optimizer.params", OptimizerParamsSpec),
    ("optimizer",): ("optimizer", OptimizerSpec),
}


@dataclass(frozen=True)
class Additions:
    """A config before the raw keys are merged in, and what it is compared with.

    ``planned``: what our own template gives, ``values``: every key that the plan decides.
    ``rendered`` and ``config``: the user's template where there is one, else None and ``planned``;
    ``wrong``: its keys that say something else than the plan, which are reported already.
    """

    planned: dict[str, Any]
    values: Mapping[Path, Any]
    precision: Precision
    rendered: Rendered | None
    config: dict[str, Any]
    wrong: list[Path]


def check_additions(
    additions: Additions,
    final: dict[str, Any],
    report: Report,
    *,
    world_size: int,
    devices: Sequence[Device] | None,
) -> None:
    """Put into ``report`` what is wrong with ``final`` at the line that brought it in.

    What ``check`` finds in the plan itself is a problem too, but a loss scale that it calls
    risky is only said: it is what was asked for.
    """
    target = Target(world_size=world_size, devices=devices)
    of_plan = _find_faults(additions.planned, target)
    for fault in of_plan:
        _report_planned(fault, report)
    if final == additions.planned:
        return
    places = _Places(additions, report)
    overrides = report.loaded.spec.deepspeed
    for extra in (overrides, additions.config if additions.rendered else {}):
        for path, message, hint in find_contradictions(extra, additions.precision, additions.values):
            places.fail(path, f"{key_text(path)}: {message}", hint)
    known = {(finding.code, finding.message) for finding in of_plan}
    for finding in _find_faults(final, target):
        if (finding.code, finding.message) not in known:
            advice = "write the value itself" if finding.code == "auto" else finding.hint
            places.fail(tuple(finding.key.split(".")) if finding.key else (), finding.message, advice)


def _find_faults(config: dict[str, Any], target: Target) -> list[Finding]:
    return [finding for finding in check_value(config, target) if finding.severity != "info"]


def _report_planned(finding: Finding, report: Report) -> None:
    if finding.code in _RISKS:
        then = f"; {finding.hint}" if finding.hint else ""
        report.note(f"{report.loaded.where(finding.key)}{finding.message}{then}")
    elif finding.code not in _SAID_BEFORE and not finding.key.startswith("fp16."):
        report.fail(finding.key, finding.message, finding.hint)


class _Places:
    """Reports a problem where its key was written; one a key, and none that another brings along."""

    def __init__(self, additions: Additions, report: Report) -> None:
        self.additions = additions
        self.report = report
        self.overrides: Mapping[str, Any] = report.loaded.spec.deepspeed
        self.wrong = list(additions.wrong)

    def fail(self, path: Path, message: str, hint: str | None) -> None:
        written = bool(path) and holds(self.overrides, path)
        if any(path[: len(other)] == other or other[: len(path)] == path for other in self.wrong):
            return
        if self.wrong and not written and self.additions.rendered is None:
            return  # only follows from what is wrong already
        self.wrong.append(path)
        if written:
            self.report.fail(key_text(("deepspeed", *path)), f"deepspeed.{message}", hint)
        elif self.additions.rendered is None:
            self.report.fail("deepspeed", f"deepspeed: with it, {message}", hint)
        else:
            place = place_of(self.additions.rendered, path)
            self.report.add("deepspeed_template", ConfigError(f"{place}: {message}", hint=hint))


def find_contradictions(
    extra: Mapping[str, Any], precision: Precision, planned: Mapping[Path, Any]
) -> list[tuple[Path, str, str]]:
    """Where ``extra`` says something else than the run file: key path, what, and a hint.

    ``planned``: every key of the JSON that the run file decides, with its value.
    What says the same is let be.
    """
    rules = _Rules(precision, planned)
    for path, value in leaves(extra):
        rules.look_at(path, value)
    return [(path, message, hint) for path, (message, hint) in rules.found.items()]


class _Rules:
    """Collects the first problem of each key, as the rest of a message and a hint."""

    def __init__(self, precision: Precision, planned: Mapping[Path, Any]) -> None:
        self.precision = precision
        self.planned = planned
        self.stage: int = planned[("zero_optimization", "stage")]
        self.found: dict[Path, tuple[str, str]] = {}

    def fail(self, path: Path, message: str, hint: str) -> None:
        self.found.setdefault(path, (message, hint))

    def look_at(self, path: Path, value: Any) -> None:
        if value == "auto" and path in self.planned:
            self.fail(path, "auto is a word of the Hugging Face Trainer", "remove it; the run file has it")
        elif path[0] in _OWN_SECTION:
            self.fail(path[:1], "the run file has its own key for it", f"use {_OWN_SECTION[path[0]]}")
        elif path[0] == "data_types":
            self.data_type(path, value)
        elif path not in _FREE and not (path in self.planned and _same(self.planned[path], value)):
            if (owner := self.owner(path)) is not None:
                planned = repr(self.planned.get(path, "the run file"))
                message = f"{value!r} contradicts {planned} of the run file"
                self.fail(path, message, f"set {owner} in the run file itself")
            elif section := next((part for part in _DECIDED if path[: len(part)] == part), None):
                self.decided(path, section)

    def owner(self, path: Path) -> str | None:
        """The run-file key to use in place of a planned value; None where it is not one."""
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
        self.fail(path, f"{'.'.join(section)} is decided by the run file itself", hint)

    def data_type(self, path: Path, value: Any) -> None:
        """A type besides the model's: fp32 to sum gradients in is the only one."""
        own: tuple[str, ...] = (self.precision,)
        # DeepSpeed raises NotImplementedError for two types at stage 0.
        sums = (*own, "fp32") if self.stage > 0 else own
        allowed = {"grad_accum_dtype": sums, "param_dtype": own}.get(path[-1])
        if allowed is not None and value not in allowed:
            at = f"precision {self.precision}" + (" at stage 0" if self.stage == 0 else "")
            names = " or ".join(dict.fromkeys(allowed))
            self.fail(path, f"{value!r} does not go with {at}", f"write {names}, or remove it")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _nearest(name: str, choices: Iterable[str]) -> str | None:
    import difflib

    near = difflib.get_close_matches(name, list(choices), n=1)
    return near[0] if near else None
