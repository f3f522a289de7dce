"""What stands in the DeepSpeed JSON besides the plan: raw keys of the run file, or of a user's template.

Two questions, both answered for the config as DeepSpeed will get it: does it contradict the
run file, and what does ``dslaunch check`` say of it? The latter's errors and warnings are
problems here: a run file is no place for a key that DeepSpeed refuses, ignores or misreads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dslaunch.config.check import Target, check_value
from dslaunch.config.nested import Path, holds, leaves, listed
from dslaunch.config.rendered import place_of
from dslaunch.config.report import Report
from dslaunch.config.schema import find_key
from dslaunch.config.schema.optimizers import find_optimizer
from dslaunch.config.spec import RunSpec
from dslaunch.config.spec_engine import Fp16Spec
from dslaunch.config.spec_optimizer import OptimizerParamsSpec, OptimizerSpec
from dslaunch.core.devices import Device
from dslaunch.core.errors import ConfigError
from dslaunch.core.finding import Finding, key_text
from dslaunch.core.plan import Precision
from dslaunch.core.templating import Rendered

# Planned values that may be replaced: the plan only fills in what is usual.
_FREE = {("zero_allow_untested_optimizer",), ("communication_data_type",)}
# What ``check`` advises of a loss scale is said of the run file's own, too: it is what was asked for.
_ADVICE = ("initial-scale", "min-loss-scale")
# What is said, or refused for scripts that are not ours, where the plan is made.
_SAID_BEFORE = (
    "fp16-stage-0", "device", "optimizer-changes-meaning", "untested-optimizer", "muon-clipping",
    "muon-momentum", "muon-norm", "muon-stage-3",
)  # fmt: skip
_OWN_KEYS = {"scheduler": "scheduler", "bfloat16": "precision: bf16", "torch_autocast": "torch_autocast"}
# Sections of DeepSpeed's JSON that share keys with one of the run file, where alone these may be set.
_SHARED: dict[Path, type[BaseModel]] = {
    ("fp16",): Fp16Spec,
    ("optimizer", "params"): OptimizerParamsSpec,
    ("optimizer",): OptimizerSpec,
}


@dataclass(frozen=True)
class Additions:
    """A config before the raw keys are merged in, and what it is compared with.

    ``planned``: what our own template gives, ``values``: every key that the plan decides.
    ``rendered`` and ``config``: the user's template where there is one, else None and ``planned``;
    ``wrong``: what is wrong with that template so far, by key.
    """

    planned: dict[str, Any]
    values: Mapping[Path, Any]
    precision: Precision
    rendered: Rendered | None
    config: dict[str, Any]
    wrong: dict[Path, ConfigError]


def check_additions(
    additions: Additions,
    final: dict[str, Any],
    report: Report,
    *,
    world_size: int,
    devices: Sequence[Device] | None,
) -> None:
    """Put into ``report`` what is wrong with ``final`` at the line that brought it in.

    What a user's template brought in goes to ``additions.wrong``.

    What ``check`` finds in the plan itself is a problem too.
    """
    target = Target(world_size=world_size, devices=devices)
    of_plan, before = [], [problem.key for problem in report.problems]
    for finding in check_value(additions.planned, target):
        if finding.severity == "info" and finding.code in _ADVICE:
            hint = f"; {finding.hint}" if finding.hint else ""
            report.advise(finding.key, f"{report.loaded.where(finding.key)}{finding.message}{hint}")
        elif finding.severity != "info":
            of_plan.append(finding)
            if finding.code in _SAID_BEFORE or finding.key.startswith("fp16."):
                continue
            if not any(_of_one(finding.key, key) for key in before):  # each thing is said once
                report.fail(finding.key, finding.message, finding.hint)
    if final == additions.planned:
        return
    places = _Places(additions, report)
    overrides = report.loaded.spec.deepspeed
    for extra in (overrides, additions.config if additions.rendered else {}):
        rules = _Rules(additions, report)
        for path, message, hint in rules.find(extra):
            places.fail(path, f"{key_text(path)}: {message}", hint)
    known = {(finding.code, finding.message) for finding in of_plan}
    for finding in _find_faults(final, target):
        if (finding.code, finding.message) not in known:
            advice = "write the value itself" if finding.code == "auto" else finding.hint
            places.fail(tuple(finding.key.split(".")) if finding.key else (), finding.message, advice)


# What takes fp32 away from what the worker keeps in it (docs/precision.md), and the value that does.
_LESS_THAN_FP32: dict[Path, bool] = {
    ("bf16", "bf16_master_weights_and_grads"): True,
    ("bf16", "bf16_optimizer_states"): True,
    ("fp16", "fp16_master_weights_and_grads"): True,
    ("optimizer", "params", "fp32_optimizer_states"): False,
}


def check_for_worker(config: Mapping[str, Any], report: Report) -> None:
    """Record what a script of one's own may do, and our worker promises not to."""
    written = dict(leaves(config))
    for path, taken in _LESS_THAN_FP32.items():
        if path in written and bool(written[path]) is taken:
            name = key_text(path)
            raw = holds(report.loaded.spec.deepspeed, path)
            report.fail(
                key_text(("deepspeed", *path)) if raw else "deepspeed_template",
                f"{'deepspeed.' if raw else ''}{name}: dslaunch's worker keeps master weights and optimizer"
                " states in fp32, and writes checkpoints and exports from these",
                "remove it (gen-config writes it for a script of your own); optimizer.type AdamW8bit,"
                " offload_optimizer or a higher stage save memory, too",
            )


def _find_faults(config: dict[str, Any], target: Target) -> list[Finding]:
    return [finding for finding in check_value(config, target) if finding.severity != "info"]


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
            self.additions.wrong[path] = ConfigError(f"{place}: {message}", hint=hint)


class _Rules:
    """What says something else than the run file, or the flags in its place. What says the same is let be."""

    def __init__(self, additions: Additions, report: Report) -> None:
        self.precision = additions.precision
        self.planned = additions.values
        self.stage: int = additions.values[("zero_optimization", "stage")]
        self.written_at = report.loaded.positions
        self.with_run_file = isinstance(report.loaded.spec, RunSpec)
        self.source = "the run file" if self.with_run_file else "the flags"
        self.found: dict[Path, tuple[str, str]] = {}

    def find(self, extra: Mapping[str, Any]) -> list[tuple[Path, str, str]]:
        """Key path, the rest of a message and a hint: the first problem of each key of ``extra``."""
        for path, value in leaves(extra):
            self.look_at(path, value)
        return [(path, message, hint) for path, (message, hint) in self.found.items()]

    def fail(self, path: Path, message: str, hint: str) -> None:
        self.found.setdefault(path, (message, hint))

    def look_at(self, path: Path, value: Any) -> None:
        if value == "auto" and path in self.planned:
            self.fail(path, "auto is a word of the Hugging Face Trainer", "remove it; it is set elsewhere")
        elif path[0] == "scheduler" and not self.with_run_file:
            return  # a script of one's own leaves the schedule to DeepSpeed or not
        elif path in self.planned and path[0] in _OWN_KEYS and _same(self.planned[path], value):
            return  # a template says what the run file does
        elif path[0] in _OWN_KEYS:
            key = _OWN_KEYS[path[0]]
            self.fail(path[:1], "dslaunch has its own key for it", self.set_it(key))
        elif path[0] == "data_types":
            self.data_type(path, value)
        elif path not in _FREE and not (path in self.planned and _same(self.planned[path], value)):
            if (owner := self.owner(path)) is not None:
                place = self.written_at.get(owner)
                source = f"{owner} ({place})" if place else self.source
                planned = f"{_shown(self.planned[path])} of {source}" if path in self.planned else source
                self.fail(path, f"{_shown(value)} contradicts {planned}", self.set_it(owner))
            elif path[0] == "optimizer" and ("optimizer", "type") not in self.planned:
                message = "dslaunch's worker makes the optimizer itself, and DeepSpeed reads no such section"
                self.fail(path[:1], message, self.set_it("optimizer"))
            elif section := next((part for part in _SHARED if path[: len(part)] == part), None):
                self.shared(path, section)

    def set_it(self, key: str) -> str:
        if self.with_run_file:
            return f"set {key} in the run file itself"
        return f"use its flag, or --set {key}=..."

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

    def shared(self, path: Path, section: Path) -> None:
        """A further key of a section in which the run file has keys of its own: these, or one misspelt."""
        if len(path) == len(section):
            return
        name, key = path[len(section)], key_text(path[: len(section) + 1])
        known = find_key(key) is not None or (section[-1] == "params" and name in self.arguments())
        near = name if name in _SHARED[section].model_fields else None
        if near is None and not known:
            near = _nearest(name, _SHARED[section].model_fields)
        if near:
            owner = ".".join((*section, near))
            self.fail(path, f"{'.'.join(section)} is decided by {self.source}", self.set_it(owner))

    def arguments(self) -> frozenset[str]:
        found = find_optimizer(self.planned["optimizer", "type"])
        return found.params if found else frozenset()

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


def _of_one(one: str, other: str) -> bool:
    """Whether two keys are the same, or one stands in the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _shown(value: Any) -> str:
    """As JSON has it, and a word without quotes."""
    return value if isinstance(value, str) else json.dumps(listed(value), ensure_ascii=False)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _nearest(name: str, choices: Iterable[str]) -> str | None:
    import difflib

    near = difflib.get_close_matches(name, list(choices), n=1)
    return near[0] if near else None
