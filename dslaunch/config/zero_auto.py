"""What the memory plan chooses for ``auto``: a stage, offload, and gradient checkpointing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dslaunch.config.attention import choose_attention
from dslaunch.config.engine_plan import EnginePlan, resolve_engine
from dslaunch.config.facts import Facts
from dslaunch.config.fp32_modules import check_fp32_modules
from dslaunch.config.hosts import ResolvedHosts
from dslaunch.config.load import LoadedSpec
from dslaunch.config.quantization import fits_stage
from dslaunch.config.render import render_ds_config
from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.config.spec_engine import EngineSpec, OffloadSpec, ZeroSpec
from dslaunch.config.zero import CHECKPOINTING, OFFLOADS, auto_keys, auto_zero_keys, offload_device
from dslaunch.core.batch_size import MICRO
from dslaunch.core.errors import ConfigError

if TYPE_CHECKING:
    from dslaunch.config.memory.of_run import Training
    from dslaunch.config.memory.planner import MemoryPlan
    from dslaunch.config.memory.setup import Setup
    from dslaunch.config.memory.tensors import ModelFacts

S = TypeVar("S", bound=EngineSpec)
GIB = 2**30


@dataclass(frozen=True)
class _Tried(Generic[S]):
    """A candidate with its memory plan. ``micro``: a smaller micro-batch than the default one.

    ``recompute``: the choice for gradient checkpointing; None where there is none.
    """

    trial: LoadedSpec[S]
    zero: ZeroSpec
    micro: int | None
    recompute: bool | None
    setup: Setup
    plan: MemoryPlan

    def __str__(self) -> str:
        devices = [(name, offload_device(self.zero, name)) for name in OFFLOADS]
        offloads = " and ".join(f"{name} {device}" for name, device in devices if device is not None)
        smaller = f", micro-batch {self.micro}" if self.micro is not None else ""
        again = ", gradient checkpointing" if self.recompute else ""
        where = "engine torch" if self.setup.engine == "torch" else f"stage {self.zero.stage}"
        return f"{where}{' with ' if offloads else ''}{offloads}{smaller}{again}"


def settle_zero(
    loaded: LoadedSpec[S], facts: Facts, model: ModelFacts, training: Training | None = None
) -> LoadedSpec[S]:
    """``loaded`` with every ``auto`` replaced by what the memory plan chooses.

    Candidates are tried from the fastest to the most frugal: without offload before with it, then
    without gradient checkpointing before with it, then a micro-batch that was our own choice before
    half of it, then a lower stage before a higher one. What could only not be resumed on its hosts
    is taken, with a note, where nothing else fits. ``training``: what a script of one's own does,
    where ``loaded`` is no run file.

    Raises ConfigError where the device's memory is not known, where the adapter matches no
    layer, and where nothing fits, with the nearest change that does. A spec with other problems
    comes back with the last candidate in it: resolving it shows them, all at once.
    """
    zero = loaded.spec.zero_optimization
    key = auto_keys(loaded.spec)[0]
    tried: list[_Tried[S]] = []
    trial = loaded
    choices = (False, True) if CHECKPOINTING in auto_keys(loaded.spec) else (None,)
    for candidate, again, micro in _candidates(zero, choices, _micro_batches(loaded, facts)):
        trial = _with_choice(loaded, candidate, micro, again)
        engine = _resolved(trial, facts)
        if engine is None or (zero.stage == "auto" and _is_computed_wrong(engine[0])):
            continue
        setup = _setup(trial.spec, *engine, model, training, facts)
        on_cpu = engine[1].device_type == "cpu"
        capacity, host = engine[1].memory_gib, _host_gib(trial.spec, engine[1], facts)
        if (host if on_cpu else capacity) is None:
            raise _unknown_size(loaded, key, on_cpu=on_cpu)
        tried.append(_Tried(trial, candidate, micro, again, setup, _plan(setup, capacity, host)))
        if tried[-1].plan.fits:
            return _settled(loaded, tried, training)
    for count, one in enumerate(tried, 1):
        if one.plan.trains:
            return _settled(loaded, tried[:count], training)
    if not tried:
        return trial
    raise _nothing_fits(loaded, key, tried)


def _settled(loaded: LoadedSpec[S], tried: list[_Tried[S]], training: Training | None) -> LoadedSpec[S]:
    """The last one that was tried, with what is to be said of it."""
    chosen = tried[-1]
    reason = _reason(tried)
    settled = {"zero_stage": reason} if auto_zero_keys(loaded.spec) else {}
    for name in OFFLOADS:
        if offload_device(loaded.spec.zero_optimization, name) == "auto":
            used = offload_device(chosen.zero, name) is not None
            settled[f"zero_optimization.{name}{'.device' * used}"] = reason
    what = "zero_optimization"
    if chosen.recompute is not None:
        without = [one for one in tried if not one.recompute and chosen.recompute][-1:]
        settled[CHECKPOINTING] = _reason([*without, chosen])
        if "zero_stage" not in settled:
            what = f"{CHECKPOINTING} {'true' if chosen.recompute else 'false'}"
    notes = [*loaded.notes, f"{what}: {reason}{_assumed(loaded.spec, training)}"]
    if chosen.micro is not None:
        why = f"by the memory plan: {2 * chosen.micro} would take {_excess(_twice(tried).plan)}"
        settled[f"batch.{MICRO}"] = why
        notes.append(f"{MICRO} {chosen.micro}, {why}")
    if not chosen.plan.fits:
        takes = _excess(chosen.plan)
        notes.append(f"{what}: the run cannot be resumed on such hosts: that takes {takes}")
    return dataclasses.replace(chosen.trial, settled=settled, notes=tuple(notes))


def _twice(tried: list[_Tried[S]]) -> _Tried[S]:
    """What was tried last with the next larger micro-batch and the same offload."""
    chosen = tried[-1]
    return next(one for one in reversed(tried) if one.setup.micro_batch == 2 * chosen.setup.micro_batch)


def _micro_batches(loaded: LoadedSpec[Any], facts: Facts) -> tuple[int | None, ...]:
    """None, which leaves the batch alone, and the smaller ones where train_batch_size alone is given."""
    spec = loaded.spec
    sizes = (spec.train_batch_size, spec.train_micro_batch_size_per_gpu, spec.gradient_accumulation_steps)
    if sizes[0] is None or sizes[1:] != (None, None):
        return (None,)
    first, *_ = next(_candidates(spec.zero_optimization, (None,), (None,)))
    resolved = resolve_engine(Report(_with_choice(loaded, first, None, None)), facts)
    default = resolved[0].batch.train_micro_batch_size_per_gpu if resolved else 1
    return (None, *(default >> shift for shift in range(1, default.bit_length())))


def _candidates(
    zero: ZeroSpec, recompute: tuple[bool | None, ...], micro_batches: tuple[int | None, ...]
) -> Iterator[tuple[ZeroSpec, bool | None, int | None]]:
    """From the fastest to the one that needs least on the device."""
    stages = (0, 1, 2, 3) if zero.stage == "auto" else (zero.stage,)
    for param in _choices(zero, "offload_param"):
        for optimizer in _choices(zero, "offload_optimizer"):
            for again, micro, stage in itertools.product(recompute, micro_batches, stages):
                if param is None or stage == 3 or zero.stage != "auto":
                    update = {"stage": stage, "offload_param": param, "offload_optimizer": optimizer}
                    yield zero.model_copy(update=update), again, micro


def _choices(zero: ZeroSpec, name: str) -> tuple[OffloadSpec | None, ...]:
    part: OffloadSpec | None = getattr(zero, name)
    if part is None or part.device != "auto":
        return (part,)
    if name == "offload_param" and zero.stage not in ("auto", 3):
        return (None,)  # it acts at stage 3 only, so this is what there is to choose
    return (None, part.model_copy(update={"device": "cpu"}))


def _resolved(
    trial: LoadedSpec[Any], facts: Facts
) -> tuple[EnginePlan, ResolvedHosts, dict[str, Any]] | None:
    """Engine, hosts and DeepSpeed config of a candidate; None where it cannot be."""
    report = Report(trial)
    if not _fits_adapter(trial.spec):
        return None
    resolved = resolve_engine(report, facts)
    if resolved is not None and isinstance(trial.spec, RunSpec):
        check_fp32_modules(trial.spec, resolved[0].precision, report)
    config = render_ds_config(resolved[0], report, facts, resolved[1].devices) if resolved else {}
    if resolved is None or report.problems:
        return None
    return *resolved, config


def _is_computed_wrong(engine: EnginePlan) -> bool:
    """16-bit stage 0 of DeepSpeed is (docs/upstream.md): nothing to choose, whoever runs it."""
    return engine.zero_stage == 0 and engine.weights != "fp32"


def _fits_adapter(spec: EngineSpec) -> bool:
    """Quantised weights do not go with every stage."""
    stage = spec.zero_optimization.stage
    if not isinstance(spec, RunSpec) or stage == "auto":
        return True
    return fits_stage(spec.model.quantization_config, spec.adapter.type if spec.adapter else None, stage)


def _setup(
    spec: EngineSpec,
    engine: EnginePlan,
    hosts: ResolvedHosts,
    config: dict[str, Any],
    model: ModelFacts,
    training: Training | None,
    facts: Facts,
) -> Setup:
    from dslaunch.config.memory.of_run import Training, setup_of_config, setup_of_spec

    if isinstance(spec, RunSpec):
        attention = choose_attention(spec, engine.precision, hosts, facts).value
        return setup_of_spec(spec, engine, hosts, config, model, attention)
    return setup_of_config(
        config,
        model,
        training or Training(),
        precision=engine.precision,
        batch=engine.batch,
        ranks_per_host=max(len(host.slots) for host in hosts.topology.hosts),
        device_type=hosts.device_type,
    )


def _plan(setup: Setup, capacity: float | None, host: float | None) -> MemoryPlan:
    """By what is counted alone; :func:`_reason` says what is not."""
    from dslaunch.config.memory.planner import plan_memory

    plan = plan_memory(setup, capacity, host_gib=host)
    return dataclasses.replace(plan, uncounted=(), overcounted=())


def _host_gib(spec: EngineSpec, hosts: ResolvedHosts, facts: Facts) -> float | None:
    from dslaunch.config.memory.capacity import host_gib

    return host_gib(spec.cluster, hosts, facts)


def _with_choice(
    loaded: LoadedSpec[S], zero: ZeroSpec, micro: int | None, recompute: bool | None
) -> LoadedSpec[S]:
    update: dict[str, Any] = {"zero_optimization": zero}
    if recompute is not None and loaded.spec.model is not None:
        update["model"] = loaded.spec.model.model_copy(update={"gradient_checkpointing": recompute})
    if micro is not None:
        update[MICRO] = micro
    return dataclasses.replace(loaded, spec=loaded.spec.model_copy(update=update))


def _reason(tried: list[_Tried[S]]) -> str:
    from dslaunch.config.memory.zeropp import uncounted_keys

    setup, said = tried[-1].setup, f"{tried[-1]} fits: {_need(tried[-1].plan)}"
    if uncounted := uncounted_keys(setup):
        said += f" without what {', '.join(uncounted)} changes, which is not counted"
    if setup.zero.overcounted:
        said += f" (what {', '.join(setup.zero.overcounted)} saves is not counted)"
    return said if len(tried) == 1 else f"{said}; {tried[-2]} would take {_excess(tried[-2].plan)}"


def _assumed(spec: EngineSpec, training: Training | None) -> str:
    """What was taken for granted of somebody's own script."""
    if isinstance(spec, RunSpec) or training is None:
        return ""
    return f" (--method {training.method}, --max-length {training.max_length})"


def _unknown_size(loaded: LoadedSpec[Any], key: str, *, on_cpu: bool) -> ConfigError:
    if on_cpu:
        return ConfigError(
            f"{loaded.where(key)}{key} auto: how much memory the hosts have is not known here",
            hint="say it: cluster.host_memory_gib (--host-memory-gib), or set the value",
        )
    return ConfigError(
        f"{loaded.where(key)}{key} auto: how much memory the devices have is not known here",
        hint="name them with their size, --gpu a100-80g (cluster.gpu), or set the value",
    )


def _nothing_fits(loaded: LoadedSpec[S], key: str, tried: list[_Tried[S]]) -> ConfigError:
    # What only a host is too small for; on CPUs that is all there is.
    on_device = [one for one in tried if one.plan.device_fits is not False]
    least = min(
        on_device or tried, key=lambda one: _running(one.plan)[1] if on_device else one.plan.total_bytes
    )
    return ConfigError(
        f"{loaded.where(key)}{key} auto: nothing fits; the least, {least}, takes {_excess(least.plan)}",
        hint=_what_would_fit(least),
    )


def _what_would_fit(least: _Tried[S]) -> str:
    from dslaunch.config.memory.alternatives import nearest_that_fits, rank_alternatives
    from dslaunch.config.memory.larger_changes import larger_changes

    setup, plan = least.setup, least.plan
    device = None if plan.capacity_bytes is None else plan.capacity_bytes / GIB
    host = None if plan.host_capacity_bytes is None else plan.host_capacity_bytes / GIB
    nearest = nearest_that_fits(rank_alternatives(setup, device, host_gib=host))
    if nearest is not None:
        return f"this fits, from {least}: {' '.join(nearest.changes)} ({_need(nearest.plan)})"
    found = [f"{' '.join(more.changes)} ({more.price})" for more in larger_changes(setup, device, host)]
    if plan.device_fits is not False:
        fewer = ", or fewer ranks on each" if setup.ranks_per_host > 1 else ""
        found.append(f"hosts with {math.ceil(_running(plan)[1] / GIB)} GiB of RAM or more{fewer}")
    if not found:
        return "use more or larger devices, a smaller model, or an adapter"
    return f"from {least}, these would fit: {'; '.join(found)}"


def _need(plan: MemoryPlan) -> str:
    """What is needed of what there is: of a device, or on CPUs of a host."""
    if plan.capacity_bytes is None:
        assert plan.host_capacity_bytes is not None
        needed = plan.host_peak_bytes if plan.fits else _running(plan)[1]
        return f"{needed / GIB:.1f} GiB of {plan.host_capacity_bytes / GIB:.1f} GiB RAM a host"
    return f"{plan.total_bytes / GIB:.1f} GiB of {plan.capacity_bytes / GIB:.1f} GiB a device"


def _excess(plan: MemoryPlan) -> str:
    """What is too much: on the device, or only on the host."""
    if plan.device_fits is False or plan.host_capacity_bytes is None:
        return f"{_need(plan)}, most of it {plan.binds}"
    when, size = (plan.host_phase, plan.host_peak_bytes) if plan.trains else _running(plan)
    said = f"{size / GIB:.1f} GiB of {plan.host_capacity_bytes / GIB:.1f} GiB RAM a host when {when}"
    return f"{said}, most of it {plan.host_binds_at(when)}"


def _running(plan: MemoryPlan) -> tuple[str, int]:
    """(moment, bytes) that a host needs most for a run that is not resumed."""
    from dslaunch.config.memory.items import size_at

    return plan.running_phase, size_at(plan.host, plan.running_phase)
