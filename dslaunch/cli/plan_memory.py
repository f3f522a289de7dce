"""The memory part of ``dslaunch plan``: for a run file, or for a script of one's own from flags alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.cli.talk import note
from dslaunch.core.errors import ConfigError, ConfigErrors

if TYPE_CHECKING:
    from dslaunch.config.facts import Facts
    from dslaunch.config.hosts import ResolvedHosts
    from dslaunch.config.load import LoadedSpec
    from dslaunch.config.memory.alternatives import Alternative
    from dslaunch.config.memory.larger_changes import LargerChange
    from dslaunch.config.memory.of_run import Training
    from dslaunch.config.memory.planner import MemoryPlan
    from dslaunch.config.memory.setup import Setup
    from dslaunch.config.memory.tensors import ModelFacts
    from dslaunch.core.plan import AdapterPlan, Precision, RunPlan

SCHEMA_VERSION = 1
_SHOWN_ALTERNATIVES = 6


@dataclass(frozen=True)
class Memory:
    """A setup, its plan, and what else could be done; ``matched``: what the patterns of fp32_modules mean."""

    setup: Setup
    plan: MemoryPlan
    alternatives: list[Alternative]
    larger: list[LargerChange]
    matched: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def memory_of_run(plan: RunPlan, loaded: LoadedSpec[Any]) -> Memory | None:
    """The memory of a run; None, with a note, where its model is not on this machine."""
    from dslaunch.config.facts import probe_facts
    from dslaunch.config.hosts import resolve_hosts
    from dslaunch.config.memory.capacity import host_gib
    from dslaunch.config.memory.of_run import setup_of_run
    from dslaunch.config.memory.wide import matched_modules

    path = local_model(plan.model.kind, plan.model.path, plan.model.revision)
    if path is None:
        note(f"memory is not planned: {plan.model.path} is not on this machine")
        return None
    facts = _load(path)
    if plan.adapter is not None:
        _check_names(facts, plan.adapter, loaded)
    try:
        setup = setup_of_run(plan, facts)
    except ConfigError as error:
        raise ConfigError(f"{loaded.where('fp32_modules')}{error.message}", hint=error.hint) from None
    setup = replace(setup, zero=replace(setup.zero, written=_written_zero_keys(loaded)))
    world = probe_facts(loaded, cwd=Path.cwd(), environ=os.environ)
    hosts = resolve_hosts(loaded.spec.cluster, world)
    _check_param_buffer(setup, loaded)
    memory = _plan(setup, _capacity(hosts), host_gib(loaded.spec.cluster, hosts, world))
    return replace(memory, matched=matched_modules(facts, plan.fp32_modules))


def matches(plan: RunPlan, memory: Memory, loaded: LoadedSpec[Any]) -> Mapping[str, tuple[str, ...]]:
    """What the adapter's targets and the optimizer's patterns mean. Raises ConfigError where one is wrong."""
    from dslaunch.config.memory.matches import matches_of_run

    setup = memory.setup
    if found := conflicts(plan, setup.model):
        raise ConfigErrors(
            [ConfigError(f"{loaded.where(key)}{error.message}", hint=error.hint) for key, error in found]
        )
    try:
        return matches_of_run(setup.model, setup.trainable, plan.adapter, plan.optimizer)
    except ConfigError as error:
        where = loaded.where(error.message.partition(":")[0].partition(" ")[0])
        raise ConfigError(f"{where}{error.message}", hint=error.hint) from None


def _check_names(facts: ModelFacts, adapter: AdapterPlan, loaded: LoadedSpec[Any]) -> None:
    from dslaunch.config.memory.adapter import name_problems

    if problems := name_problems(facts, adapter.target_modules, adapter.modules_to_save):
        raise ConfigErrors(
            [ConfigError(f"{loaded.where(key)}{error.message}", hint=error.hint) for key, error in problems]
        )


def conflicts(plan: RunPlan, facts: ModelFacts) -> list[tuple[str, ConfigError]]:
    """What ``plan`` asks of modules of its model that they cannot do, by key."""
    from dslaunch.config.memory.conflicts import find_conflicts

    return find_conflicts(
        facts,
        plan.adapter,
        plan.model.quantization_config,
        fp32_modules=() if plan.precision == "fp32" else plan.fp32_modules,
        num_new_tokens=len(plan.model.new_tokens),
    )


def check_names(plan: RunPlan) -> None:
    """Of a model that is on this machine: names and patterns of ``plan`` that match nothing in it, and what
    it asks of modules that they cannot do. Raises ConfigErrors.
    """
    path = local_model(plan.model.kind, plan.model.path, plan.model.revision)
    try:
        facts = None if path is None else _load(path)
    except ConfigError:
        return  # the ranks say what is wrong with the model
    problems = []
    for key, error in [] if facts is None else _wrong_names(plan, facts):
        # a recorded plan may be of an older version
        origin = plan.origins.get(key) or plan.origins.get(key.partition("[")[0])
        written = origin is not None and (":" in origin.source or origin.source.startswith("--"))
        where = f"{origin.source}: " if origin is not None and written else ""
        problems.append(ConfigError(f"{where}{error.message}", hint=error.hint))
    if problems:
        raise ConfigErrors(problems)


def _wrong_names(plan: RunPlan, facts: ModelFacts) -> list[tuple[str, ConfigError]]:
    """(key, error) of the first kind of them that there is; the others build on it."""
    from dslaunch.config.memory.adapter import name_problems
    from dslaunch.config.memory.matches import matches_of_run
    from dslaunch.config.memory.of_run import setup_of_run
    from dslaunch.config.memory.wide import matched_modules

    adapter = plan.adapter
    if adapter is not None and (
        found := name_problems(facts, adapter.target_modules, adapter.modules_to_save)
    ):
        return found
    try:
        matched_modules(facts, plan.fp32_modules)
        found = conflicts(plan, facts)
        trainable = setup_of_run(plan, facts).trainable
    except ConfigError as error:
        return [("fp32_modules", error)] if error.message.startswith("fp32_modules") else []
    try:
        matches_of_run(facts, trainable, adapter, plan.optimizer)
    except ConfigError as error:
        found.append((error.message.partition(":")[0].partition(" ")[0], error))
    return found


def model_facts(loaded: LoadedSpec[Any], facts: Facts) -> ModelFacts:
    """The parameters of the model that a spec names. Raises ConfigError where they are not here."""
    from dslaunch.config.zero import auto_keys

    auto = "".join(f"{key} auto: " for key in auto_keys(loaded.spec)[:1])
    model = loaded.spec.model
    if model is None:
        raise ConfigError(f"{auto}no model is given to plan for", hint="name it with --model")
    fact = facts.paths["model.path"]
    known = fact.kind != "missing"
    path = local_model("local" if known else "hub", fact.absolute if known else model.path, model.revision)
    if path is None:
        raise ConfigError(
            f"{loaded.where('model.path')}{auto}the size of {model.path} is not known here:"
            " it is not on this machine",
            hint="download it first, or set the value yourself",
        )
    return _load(path)


def local_model(kind: str, path: str, revision: str | None) -> Path | None:
    """Where the model of a plan lies on this machine; None for a hub id that is not in the cache."""
    from dslaunch.config.memory.hub import cached_model

    return cached_model(path, revision, os.environ) if kind == "hub" else Path(path)


def plan_flags(set_: tuple[str, ...], flags: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(what --json prints, lines) for --model and flags without a run file.

    Raises ConfigError(s) where a flag is missing or wrong.
    """
    from dslaunch.cli import options
    from dslaunch.cli.plan import dtype_lines
    from dslaunch.cli.plan_verdict import verdict_lines
    from dslaunch.config.engine_plan import check_for_own_script, resolve_engine
    from dslaunch.config.facts import model_dtype, probe_facts
    from dslaunch.config.load import load_flags
    from dslaunch.config.memory.capacity import host_gib
    from dslaunch.config.memory.of_run import setup_of_config
    from dslaunch.config.precision import dtypes
    from dslaunch.config.render import render_ds_config
    from dslaunch.config.report import Report
    from dslaunch.config.zero import auto_keys
    from dslaunch.config.zero_auto import settle_zero

    if flags.get("model") is None:
        raise ConfigError(
            "neither a run file nor --model is given",
            hint="dslaunch plan RUN.yaml, or --model DIR|config.json",
        )
    model_path = _model_path(flags["model"])
    facts = _load(model_path)
    engine_flags, training = options.split_training(flags)
    del engine_flags["model"]
    loaded = load_flags(set_, options.flag_overrides(_with_a_batch(engine_flags, set_)))
    world = probe_facts(loaded, cwd=Path.cwd(), environ=os.environ)
    world = replace(world, model_dtype=model_dtype(model_path))
    if auto_keys(loaded.spec):
        loaded = settle_zero(loaded, world, facts, training_of(training))
    report = Report(loaded, notes=list(loaded.notes))
    resolved = resolve_engine(report, world)
    if resolved:
        check_for_own_script(resolved[0], report)
    config = render_ds_config(resolved[0], report, world, resolved[1].devices) if resolved else {}
    report.raise_if_any()
    assert resolved is not None
    engine, hosts = resolved
    options.show_notes(tuple(report.notes))
    setup = setup_of_config(
        config,
        facts,
        training_of(training),
        precision=engine.precision,
        batch=engine.batch,
        ranks_per_host=max(len(host.slots) for host in hosts.topology.hosts),
        device_type=hosts.device_type,
    )
    setup = replace(setup, zero=replace(setup.zero, written=_written_zero_keys(loaded)))
    _check_param_buffer(setup, loaded)
    host = host_gib(loaded.spec.cluster, hosts, world)
    if training.get("attention") == "flash":
        _note_flash(model_path, engine.precision, hosts)
    memory = _plan(setup, _capacity(hosts), host)
    chosen = report.reasons.get("precision")
    batch = engine.batch
    head = {
        "schema_version": SCHEMA_VERSION,
        "world_size": batch.world_size,
        "precision": {"value": engine.precision, "reason": chosen.reason if chosen else "as written"},
        "zero_stage": engine.zero_stage,
        "batch": {
            "train_batch_size": batch.train_batch_size,
            "train_micro_batch_size_per_gpu": batch.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        },
    }
    types = dtype_lines(dtypes(engine.precision, config, setup.method, facts.on_disk))
    head_lines = verdict_lines(engine.precision, config["zero_optimization"], batch, memory)
    return {**head, **memory_report(memory)}, [*head_lines, "", *types, "", *memory_lines(memory)]


def _note_flash(model: Path, precision: Precision, hosts: ResolvedHosts) -> None:
    """Planned as asked for; but what keeps it from running is known before the GPUs are there."""
    from dslaunch.config.attention import flash_hindrance
    from dslaunch.config.facts import model_attention

    if why := flash_hindrance(model_attention(str(model)), precision, hosts):
        note(f"--attention flash: {why}")


def memory_report(memory: Memory | None) -> dict[str, Any]:
    """The ``memory`` and ``alternatives`` of ``--json``."""
    from dslaunch.config.memory.surprises import surprises

    if memory is None:
        return {"memory": None, "alternatives": []}
    notes = [surprise.to_json() for surprise in surprises(memory.setup, memory.plan)]
    larger = [{"changes": list(more.changes), "price": more.price} for more in memory.larger]
    return {
        "memory": {**memory.plan.to_json(), "notes": notes, "larger_changes": larger},
        "alternatives": [alternative.to_json() for alternative in memory.alternatives],
    }


def memory_lines(memory: Memory | None) -> list[str]:
    """The same as a table."""
    from dslaunch.cli.memory_table import table

    return [] if memory is None else table(memory, _SHOWN_ALTERNATIVES)


def _plan(setup: Setup, capacity_gib: float | None, host_gib: float | None) -> Memory:
    from dslaunch.config.memory.alternatives import nearest_that_fits, rank_alternatives
    from dslaunch.config.memory.larger_changes import larger_changes
    from dslaunch.config.memory.planner import plan_memory

    if setup.model.note:
        note(setup.model.note)
    plan = plan_memory(setup, capacity_gib, host_gib=host_gib)
    alternatives = rank_alternatives(setup, capacity_gib, host_gib=host_gib)
    hopeless = plan.fits is False and nearest_that_fits(alternatives) is None
    larger = larger_changes(setup, capacity_gib, host_gib) if hopeless else []
    return Memory(setup, plan, alternatives, larger)


def _check_param_buffer(setup: Setup, loaded: LoadedSpec[Any]) -> None:
    """Raises ConfigError where a tensor cannot be swapped, which DeepSpeed says when the GPUs are there."""
    from dslaunch.config.memory.nvme import least_param_buffer

    key, size = "deepspeed.zero_optimization.offload_param.buffer_size", setup.zero.param_buffer_size
    if (needed := least_param_buffer(setup)) > size:
        raise ConfigError(
            f"{loaded.where(key)}{key} {size:,}: a rank's share of the largest tensor has {needed:,}"
            " elements, and DeepSpeed stops at start",
            hint=f"--set {key}={needed}",
        )


def _written_zero_keys(loaded: LoadedSpec[Any]) -> frozenset[str]:
    """The keys of zero_optimization that the user wrote."""
    block = loaded.spec.zero_optimization.model_fields_set
    return frozenset(key for key in block if loaded.given(f"zero_optimization.{key}"))


def _load(path: Path) -> ModelFacts:
    from dslaunch.config.memory.model import load_model_facts

    return load_model_facts(path)


def _model_path(text: str) -> Path:
    """An existing path, or the snapshot of a hub id in the local cache."""
    from dslaunch.config.memory.hub import cached_model

    path = Path(text).expanduser()
    if path.exists():
        return path
    if text.count("/") == 1 and (found := cached_model(text, None, os.environ)):
        return found
    here = "give a model directory, a config.json or a .gguf file of this machine"
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and not path.suffix:
        here = f"as a hub id it is not in this machine's cache: download its config.json, or {here}"
    raise ConfigError(f"--model: there is no {text}", hint=here)


def training_of(flags: Mapping[str, Any]) -> Training:
    """What the flags of options.training_options say. Raises ConfigError where one has no effect."""
    from dslaunch.config.memory.of_run import Training

    given = {name: value for name, value in flags.items() if value}
    if given.get("method", "full") == "full" and "lora_r" in given:
        raise ConfigError("--lora-r has no effect with --method full", hint="add --method lora")
    task = given.get("task", "sft")
    if "precompute_ref_log_probs" in given and task not in ("dpo", "kto"):
        raise ConfigError(
            f"--precompute-ref-log-probs has no effect with --task {task}",
            hint="leave it out: only dpo and kto can do with log-probs from before",
        )
    return Training(**given)


def _with_a_batch(flags: dict[str, Any], set_: tuple[str, ...]) -> dict[str, Any]:
    """One sample in a forward pass, one pass in a step, where nothing is said of the batch."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = [name for name in names if flags.get(name) is not None or any(s.startswith(name) for s in set_)]
    if not given:
        flags["train_micro_batch_size_per_gpu"] = 1
    if "train_batch_size" not in given and "gradient_accumulation_steps" not in given:
        flags["gradient_accumulation_steps"] = 1
    elif given == ["gradient_accumulation_steps"]:
        flags["train_micro_batch_size_per_gpu"] = 1
    return flags


def _capacity(hosts: ResolvedHosts) -> float | None:
    """GiB of the smallest device of the run; None, with a note, where it is not known."""
    if hosts.device_type == "cpu":
        return None
    for text in hosts.memory_notes():
        note(text)
    if hosts.memory_gib is None:
        note("how much memory the devices have is not known: name them with their size, --gpu a100-80g")
    return hosts.memory_gib
