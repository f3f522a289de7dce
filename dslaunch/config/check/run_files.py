"""Run files: what gen-config, plan and launch would refuse, whether this machine is the one to run it or not.

The file is resolved as they resolve it, for a machine of which nothing is known but what the file
and the flags say: that is wrong anywhere. Where they leave hosts or devices open, it is resolved
for this machine as well, and what is wrong only here is advice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dslaunch.config.check.any_machine import AnyMachine, assume_machine
from dslaunch.config.check.patterns import has_patterns, pattern_problems
from dslaunch.config.check.places import finding_of, finding_of_note
from dslaunch.config.check.target import Target
from dslaunch.config.facts import Facts, probe_facts
from dslaunch.config.hosts import ResolvedHosts
from dslaunch.config.load import LoadedSpec, load_run_file
from dslaunch.config.nested import listed
from dslaunch.config.report import Problem, Report, Risk
from dslaunch.config.resolve import resolve_into
from dslaunch.config.spec import RunSpec
from dslaunch.config.zero import auto_keys
from dslaunch.config.zero_auto import settle_zero
from dslaunch.core.batch_size import ACCUMULATION, MICRO, TRAIN, WORLD
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.finding import Finding
from dslaunch.core.module_patterns import ALL_LINEAR

if TYPE_CHECKING:
    from dslaunch.config.memory.tensors import ModelFacts

    LoadModel = Callable[[LoadedSpec[RunSpec], Facts], ModelFacts]

_SIZES = (TRAIN, MICRO, ACCUMULATION)


def check_run_file(
    path: str, text: str, target: Target, load_model: LoadModel | None = None
) -> tuple[Finding, ...]:
    """All findings about the run file ``text``, in file order. ``path`` is its name, or ``<stdin>``.

    ``load_model`` gives the parameters of the model, for a memory plan, or raises ConfigError where
    they are not on this machine; without it no ``auto`` of zero_optimization and no names of modules are
    looked at.
    """
    here = Path.cwd()
    base = here if path == "<stdin>" else Path(path).resolve().parent
    try:
        loaded = load_run_file(Path(path), text=text, base_dir=base)
    except ConfigErrors as errors:
        return tuple(finding_of(error, "run-file", path) for error in errors.problems)
    except ConfigError as error:
        return (finding_of(error, "run-file", path),)
    facts = probe_facts(loaded, cwd=here, environ=os.environ)
    raw = _check_overrides(loaded, target)
    planned = _check_plan(path, loaded, facts, target, raw, load_model)
    wrong = {finding.key for finding in planned if finding.severity == "error"}
    # What the raw keys' own rules say of a key is more exact; gen-config refuses their warnings, too.
    raw = [replace(finding, severity="error") if finding.key in wrong else finding for finding in raw]
    exact = {finding.key for finding in raw}
    found = [finding_of_note(note) for note in loaded.notes]
    found += [*raw, *(finding for finding in planned if finding.key not in exact)]
    return tuple(sorted(found, key=lambda finding: finding.line or 0))


def _check_plan(
    path: str,
    loaded: LoadedSpec[RunSpec],
    facts: Facts,
    target: Target,
    known: list[Finding],
    load_model: LoadModel | None,
) -> list[Finding]:
    """What resolving finds, without the keys of which something is ``known`` already."""
    machine = assume_machine(loaded, facts, target)
    certain, risks = _find_certain(machine)
    found = []
    for problem in [*machine.problems, *certain]:
        finding = _finding(path, problem, loaded)
        if _is_missing(problem.key, facts):
            finding = replace(finding, code="path", severity="warning")
        elif not machine.world_known and problem.key in _SIZES and WORLD in finding.message:
            no = "world size" if loaded.spec.cluster.num_gpus_per_node is None else "number of nodes"
            finding = replace(finding, message=f"{finding.message}, so it fits no {no}")
        found.append(finding)
    for risk in risks:
        text = risk.text.removeprefix(loaded.where(risk.key))
        code = "risk" if risk.severity == "warning" else "advice"
        found.append(Finding(code, risk.severity, risk.key, text, loaded.line(risk.key) or None))
    if load_model is not None:
        found += _check_modules(path, loaded, facts, load_model, {finding.key for finding in found})
    if auto_keys(loaded.spec):
        if not certain and not machine.problems:
            found += _check_memory(path, loaded, facts, machine, target, load_model)
    elif target.world_size is None and not (machine.world_known and machine.devices_known):
        found += _check_here(path, loaded, facts, {finding.key for finding in (*known, *found)})
    if load_model is not None and has_patterns(loaded.spec):
        found += _check_patterns(path, loaded, facts, load_model)
    return found


def _check_patterns(
    path: str, loaded: LoadedSpec[RunSpec], facts: Facts, load_model: LoadModel
) -> list[Finding]:
    """A pattern of the optimizer that matches no parameter of the model, where that is on this machine."""
    try:
        model = load_model(loaded, facts)
    except ConfigError:
        return []
    return [_finding(path, problem, loaded) for problem in pattern_problems(loaded, model)]


def _check_modules(
    path: str, loaded: LoadedSpec[RunSpec], facts: Facts, load_model: LoadModel, said: set[str]
) -> list[Finding]:
    """The names of modules that match nothing in the model, where it is on this machine."""
    spec, adapter = loaded.spec, loaded.spec.adapter
    patterns = () if "fp32_modules" in said else spec.fp32_modules
    targets = () if adapter is None else (*adapter.target_modules, *adapter.modules_to_save)
    if not patterns and targets in ((), (ALL_LINEAR,)):
        return []
    from dslaunch.config.memory.adapter import name_problems
    from dslaunch.config.memory.wide import matched_modules

    try:
        model = load_model(loaded, facts)
    except ConfigError:
        return []
    report = Report(loaded)
    with report.catching("fp32_modules"):
        matched_modules(model, patterns)
    if adapter is not None:
        for key, error in name_problems(model, adapter.target_modules, adapter.modules_to_save):
            report.fail(key, error.message, error.hint)
    return [_finding(path, problem, loaded) for problem in report.problems]


def _find_certain(machine: AnyMachine) -> tuple[list[Problem], list[Risk]]:
    """What is wrong, and what is risky, in all variants; no more of them are resolved than that takes."""
    first, *others = machine.variants
    report = _resolve(first[0], machine.facts, first[1])
    problems, risks = report.problems, report.risks
    for variant in others:
        if not problems and not risks:
            break
        report = _resolve(variant[0], machine.facts, variant[1])
        keys = {problem.key for problem in report.problems}
        problems = [problem for problem in problems if problem.key in keys]
        risks = [risk for risk in risks if risk in report.risks]
    return problems, risks


def _check_memory(
    path: str,
    loaded: LoadedSpec[RunSpec],
    facts: Facts,
    machine: AnyMachine,
    target: Target,
    load_model: LoadModel | None,
) -> list[Finding]:
    """What the memory plan makes of an ``auto``, where the file itself says hosts and devices."""
    key = auto_keys(loaded.spec)[0]
    line = loaded.line(key) or None
    asked = target.world_size is not None or target.devices is not None
    if asked or load_model is None or not (machine.world_known and machine.devices_known):
        note = f"{key} auto is decided by the memory plan: `dslaunch plan` makes and shows it"
        return [Finding("not-checked", "info", key, note, line)]
    try:
        model = load_model(loaded, facts)
    except ConfigError as error:
        message = error.message.removeprefix(loaded.where("model.path")).removeprefix(loaded.where(key))
        return [Finding("not-checked", "info", key, message, line, None, error.hint)]
    try:
        settled = settle_zero(loaded, facts, model)
    except ConfigError as error:
        message = error.message.removeprefix(loaded.where(key))
        return [Finding("run-file", "error", key, message, line, None, error.hint)]
    report = _resolve(settled, facts, None)
    chosen = [Finding("note", "info", key, note, line) for note in settled.notes[len(loaded.notes) :]]
    found = [_finding(path, problem, settled) for problem in report.problems]
    return chosen + [finding for finding in found if not _is_missing(finding.key, facts)]


def _check_here(path: str, loaded: LoadedSpec[RunSpec], facts: Facts, said: set[str]) -> list[Finding]:
    """What is wrong on this machine, for the hosts and devices that the file leaves open."""
    found = [_finding(path, problem, loaded) for problem in _resolve(loaded, facts, None).problems]
    return [
        replace(finding, code="this-machine", severity="info", message=f"on this machine: {finding.message}")
        for finding in found
        if finding.key not in said
    ]


def _resolve(loaded: LoadedSpec[RunSpec], facts: Facts, hosts: ResolvedHosts | None) -> Report:
    report = Report(loaded)
    place = Path("/")  # where it would run does not matter: nothing runs
    resolve_into(report, facts, run_dir=place, cwd=place, python="python", default_name="run", hosts=hosts)
    return report


def _is_missing(key: str, facts: Facts) -> bool:
    """Whether a key's path is not here, which says nothing of the machine that the run is meant for."""
    fact = facts.paths.get(key)
    return fact is not None and fact.kind == "missing" and (fact.fault is None or fact.nearest is not None)


def _finding(path: str, problem: Problem, loaded: LoadedSpec[RunSpec]) -> Finding:
    place = loaded.where(problem.key)
    message = problem.error.message
    if place.startswith(f"{path}:"):
        message = message.removeprefix(place)
    return Finding("run-file", "error", problem.key, message, problem.line or None, None, problem.error.hint)


def _check_overrides(loaded: LoadedSpec[RunSpec], target: Target) -> list[Finding]:
    """The raw keys under ``deepspeed:``: names, types and ranges as in any config.

    Never lenient: `gen-config` and `launch` refuse what has an error here.
    """
    if not loaded.spec.deepspeed:
        return []
    from dslaunch.config.check.context import Checker
    from dslaunch.config.check.keys import check_keys
    from dslaunch.config.hjson_reader import Document

    checker = Checker(Document("", listed(loaded.spec.deepspeed)), replace(target, lenient=False))
    check_keys(checker)
    found = []
    for finding in checker.findings:
        key = f"deepspeed.{finding.key}"
        line, message = loaded.line(key) or None, f"deepspeed.{finding.message}"
        found.append(replace(finding, key=key, line=line, message=message, fix=None, edits=()))
    return found
