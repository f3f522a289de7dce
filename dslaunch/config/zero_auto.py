"""zero_optimization's ``auto``: the lowest stage, and the least offload, that fits by the memory plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from dslaunch.config.engine_plan import EnginePlan, resolve_engine
from dslaunch.config.facts import Facts
from dslaunch.config.hosts import ResolvedHosts
from dslaunch.config.load import LoadedSpec
from dslaunch.config.render import render_ds_config
from dslaunch.config.report import Report
from dslaunch.config.spec import RunSpec
from dslaunch.config.spec_engine import EngineSpec, OffloadSpec, ZeroSpec
from dslaunch.config.zero import OFFLOADS, auto_keys, offload_device
from dslaunch.core.errors import ConfigError

if TYPE_CHECKING:
    from dslaunch.config.memory.of_run import Training
    from dslaunch.config.memory.planner import MemoryPlan
    from dslaunch.config.memory.setup import Setup
    from dslaunch.config.memory.tensors import ModelFacts

S = TypeVar("S", bound=EngineSpec)
GIB = 2**30


def settle_zero(
    loaded: LoadedSpec[S], facts: Facts, model: ModelFacts, training: Training | None = None
) -> LoadedSpec[S]:
    """``loaded`` with every ``auto`` of zero_optimization replaced by what the memory plan chooses.

    Candidates are tried from the fastest to the most frugal: without offload before
    with it, and a lower stage before a higher one. ``training``: what a script of one's
    own does, where ``loaded`` is no run file.

    Raises ConfigError where the device's memory is not known, where the adapter matches no
    layer, and where nothing fits, with the nearest change that does. A spec with other problems
    comes back with the last candidate in it: resolving it shows them, all at once.
    """
    zero = loaded.spec.zero_optimization
    key = auto_keys(zero)[0]
    tried: list[tuple[ZeroSpec, Setup, MemoryPlan]] = []
    trial = loaded
    for candidate in _candidates(zero):
        trial = _with_zero(loaded, candidate)
        engine = _resolved(trial, facts)
        if engine is None:
            continue
        setup = _setup(trial.spec, *engine, model, training)
        on_cpu = engine[1].device_type == "cpu"
        capacity, host = engine[1].memory_gib, _host_gib(trial.spec, engine[1], facts)
        if (host if on_cpu else capacity) is None:
            raise _unknown_size(loaded, key, on_cpu=on_cpu)
        plan = _plan(setup, capacity, host)
        tried.append((candidate, setup, plan))
        if plan.fits:
            reason = _reason(tried)
            notes = (*loaded.notes, f"zero_optimization: {reason}{_assumed(loaded.spec, training)}")
            return dataclasses.replace(trial, settled={"zero_stage": reason}, notes=notes)
    if not tried:
        return trial
    raise _nothing_fits(loaded, key, tried)


def _candidates(zero: ZeroSpec) -> Iterator[ZeroSpec]:
    """From the fastest to the one that needs least on the device."""
    stages = (0, 1, 2, 3) if zero.stage == "auto" else (zero.stage,)
    for param in _choices(zero, "offload_param"):
        for optimizer in _choices(zero, "offload_optimizer"):
            for stage in stages:
                if param is None or stage == 3 or zero.stage != "auto":
                    update = {"stage": stage, "offload_param": param, "offload_optimizer": optimizer}
                    yield zero.model_copy(update=update)


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
    resolved = resolve_engine(report, facts)
    config = render_ds_config(resolved[0], report, facts, resolved[1].devices) if resolved else {}
    if resolved is None or report.problems:
        return None
    engine, hosts = resolved
    if engine.zero_stage == 0 and engine.precision != "fp32":
        return None  # DeepSpeed computes wrong there (docs/upstream.md)
    return engine, hosts, config


def _setup(
    spec: EngineSpec,
    engine: EnginePlan,
    hosts: ResolvedHosts,
    config: dict[str, Any],
    model: ModelFacts,
    training: Training | None,
) -> Setup:
    from dslaunch.config.memory.of_run import Training, setup_of_config, setup_of_spec

    if isinstance(spec, RunSpec):
        return setup_of_spec(spec, engine, hosts, config, model)
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
    from dslaunch.config.memory.planner import plan_memory

    return plan_memory(setup, capacity, host_gib=host)


def _host_gib(spec: EngineSpec, hosts: ResolvedHosts, facts: Facts) -> float | None:
    from dslaunch.config.memory.capacity import host_gib

    return host_gib(spec.cluster, hosts, facts)


def _with_zero(loaded: LoadedSpec[S], zero: ZeroSpec) -> LoadedSpec[S]:
    return dataclasses.replace(loaded, spec=loaded.spec.model_copy(update={"zero_optimization": zero}))


def _reason(tried: list[tuple[ZeroSpec, Setup, MemoryPlan]]) -> str:
    chosen, _, plan = tried[-1]
    said = f"{_words(chosen)} fits: {_need(plan)}"
    if len(tried) == 1:
        return said
    before, _, larger = tried[-2]
    return f"{said}; {_words(before)} would take {_excess(larger)}"


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


def _nothing_fits(
    loaded: LoadedSpec[Any], key: str, tried: list[tuple[ZeroSpec, Setup, MemoryPlan]]
) -> ConfigError:
    from dslaunch.config.memory.alternatives import nearest_that_fits, rank_alternatives

    # What only a host is too small for; on CPUs that is all there is.
    on_device = [item for item in tried if item[2].device_fits is not False]
    zero, setup, plan = min(
        on_device or tried, key=lambda item: item[2].host_peak_bytes if on_device else item[2].total_bytes
    )
    device = None if plan.capacity_bytes is None else plan.capacity_bytes / GIB
    host = None if plan.host_capacity_bytes is None else plan.host_capacity_bytes / GIB
    nearest = nearest_that_fits(rank_alternatives(setup, device, host_gib=host))
    hint = "use more or larger devices, a smaller model, or an adapter"
    if nearest is not None:
        hint = f"this fits, from {_words(zero)}: {' '.join(nearest.changes)} ({_need(nearest.plan)})"
    return ConfigError(
        f"{loaded.where(key)}{key} auto: nothing fits; the least, {_words(zero)}, takes {_excess(plan)}",
        hint=hint,
    )


def _words(zero: ZeroSpec) -> str:
    offloads = [f"{name} {device}" for name in OFFLOADS if (device := offload_device(zero, name)) is not None]
    return f"stage {zero.stage}{' with ' if offloads else ''}{' and '.join(offloads)}"


def _need(plan: MemoryPlan) -> str:
    """What is needed of what there is: of a device, or on CPUs of a host."""
    if plan.capacity_bytes is None:
        assert plan.host_capacity_bytes is not None
        return f"{plan.host_peak_bytes / GIB:.1f} GiB of {plan.host_capacity_bytes / GIB:.1f} GiB RAM a host"
    return f"{plan.total_bytes / GIB:.1f} GiB of {plan.capacity_bytes / GIB:.1f} GiB a device"


def _excess(plan: MemoryPlan) -> str:
    """What is too much: on the device, or only on the host."""
    if plan.device_fits is False or plan.host_capacity_bytes is None:
        return f"{_need(plan)}, most of it {plan.binds}"
    needed, offered = plan.host_peak_bytes / GIB, plan.host_capacity_bytes / GIB
    said = f"{needed:.1f} GiB of {offered:.1f} GiB RAM a host when {plan.host_phase}"
    return f"{said}, most of it {plan.host_binds}"
