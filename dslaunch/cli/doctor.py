"""dslaunch doctor: what this machine, or the hosts of a run, lack."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from dslaunch.cli import options
from dslaunch.cli.talk import talk

if TYPE_CHECKING:
    from dslaunch.cli.doctor_checks import HostFinding
    from dslaunch.cli.doctor_report import Report
    from dslaunch.config.hosts import ResolvedHosts
    from dslaunch.core.devices import Inventory
    from dslaunch.core.plan import LaunchPlan
    from dslaunch.launch.probing import Probed, ProbeRequest


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_file", required=False, metavar="[RUN.yaml]")
@options.set_option
@options.cluster_options
# Word for word what some expect of doctor; everywhere else the flag is --hostfile, and so it is in the help.
@click.option("--hosts", "hosts_file", hidden=True)
@options.master_options
@options.run_dir_option
@click.option(
    "--via", metavar="WAY", help="auto (default), ssh, slurm, openmpi, mpich, or local: this machine alone."
)
@options.container_option
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=30.0, show_default=True,
    metavar="SECONDS", help="How long each host may take to answer.",
)  # fmt: skip
@click.option(
    "--build-ops", is_flag=True, help="Then build DeepSpeed's compiled ops on every host, once for each kind."
)
@click.option(
    "--numerics", is_flag=True,
    help="Measure instead, in two ranks on this CPU, what the installed DeepSpeed computes right.",
)  # fmt: skip
@options.json_option
def command(
    run_file: str | None,
    set_: tuple[str, ...],
    timeout_s: float,
    build_ops: bool,
    numerics: bool,
    as_json: bool,
    hosts_file: str | None,
    **flags: Any,
) -> int:
    """Say what this machine lacks for a run, or with a run file or --hostfile what its hosts lack.

    Hosts are asked as a launch would reach them, all at once: devices, Python and packages, compilers,
    memory, disk, limits, clocks, the way to the first host, whether they see the run directory. Nothing is
    changed there. Exit code 1 where a run would fail. The `inventory` in the output of --json is one for
    --inventory.
    """
    if hosts_file is not None:
        if flags["hostfile"] is not None:
            raise click.UsageError("--hosts is another word for --hostfile; give one of them")
        flags["hostfile"] = hosts_file
    if numerics:
        from dslaunch.cli import doctor_numerics

        if run_file is not None or set_ or build_ops or any(flags.values()):
            raise click.UsageError("--numerics measures the DeepSpeed of this Python alone: no run, no hosts")
        return doctor_numerics.numerics(as_json=as_json)
    case = _resolve(run_file, set_, flags)
    report = _examine(case, timeout_s)
    if as_json:
        click.echo(json.dumps(report.to_json()))  # one line: of several nodes they make one file
    else:
        from dslaunch.cli.doctor_report import report_lines

        click.echo("\n".join(report_lines(report)).rstrip("\n"))
    from dslaunch.cli.doctor_report import summary
    from dslaunch.core.errors import EXIT_NO, EXIT_OK

    talk(summary(report))
    if build_ops:
        return _build_ops(case, report)
    return EXIT_OK if report.is_ready else EXIT_NO


def _build_ops(case: _Case, report: Report) -> int:
    from dslaunch.cli.doctor_ops import build_ops, ops_to_build
    from dslaunch.core.errors import EXIT_NO

    # A lock that a killed build left is removed by the next build.
    if any(finding.severity == "error" and finding.code != "stale-lock" for finding in report.findings):
        talk("no op was built: see the errors")
        return EXIT_NO
    return build_ops(case.launch, ops_to_build(case.launch.device_type, case.ds_config))


@dataclass(frozen=True, kw_only=True)
class _Case:
    """What is looked at: the hosts, and what would run there.

    ``ds_config``: of the run file; None without one, and then ``launch`` is that of any Python script.
    """

    hosts: ResolvedHosts
    launch: LaunchPlan
    ds_config: Mapping[str, Any] | None


def _resolve(run_file: str | None, set_: tuple[str, ...], flags: dict[str, Any]) -> _Case:
    from dslaunch.config.facts import probe_facts
    from dslaunch.config.hosts import choose_via, resolve_hosts
    from dslaunch.config.load import load_flags
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.plan import LaunchPlan, Via
    from dslaunch.core.run_dir import runs_root
    from dslaunch.launch.local import check_hosts

    if set_ and run_file is None:
        raise click.UsageError("--set changes a run file, and there is none here")
    plan, run_dir = None, flags.pop("run_dir")
    ways = ("auto", *get_args(Via))
    if flags["via"] not in (None, *ways):
        raise ConfigError(f"--via {flags['via']!r} is not one of {', '.join(ways)}")
    if run_file is not None:
        plan, loaded = options.load_and_resolve_with_spec(run_file, set_=set_, run_dir=run_dir, **flags)
    else:
        other = ("master_addr", "master_port", "via", "container")
        cluster = {name: value for name, value in flags.items() if name not in other}
        loaded = load_flags((), options.flag_overrides(cluster))
    facts = probe_facts(loaded, cwd=Path.cwd(), environ=os.environ)
    if flags["via"] == "local":
        facts = dataclasses.replace(facts, allocation=None, allocation_problem=None)
    for problem in (facts.hostfile_problem, facts.allocation_problem, facts.inventory_problem):
        if problem is not None:
            raise problem
    hosts = resolve_hosts(loaded.spec.cluster, facts)
    via = plan.launch.via if plan else flags["via"]
    via = choose_via(hosts, facts)[0] if via in (None, "auto") else via
    if via == "local":
        check_hosts(hosts.topology)
    if via == "pdsh":
        raise ConfigError(
            "doctor cannot ask hosts by pdsh, which hands no question on",
            hint="--via ssh, for a run file too",
        )
    if plan is not None:
        return _Case(hosts=hosts, launch=plan.launch, ds_config=plan.ds_config)
    folder = Path(run_dir) if run_dir else runs_root(os.environ, Path.cwd())
    named = flags["container"]
    container = None if named is None else options.container_plan(named)
    launch = LaunchPlan(
        argv=("python3" if container else sys.executable,),
        topology=hosts.topology,
        run_dir=str(folder.absolute()),
        cwd=os.getcwd(),
        via=via,
        container=container,
        device_type=hosts.device_type,
        devices=hosts.gpu_names,
        master_addr=flags["master_addr"],
        master_port=flags["master_port"],
    )
    return _Case(hosts=hosts, launch=launch, ds_config=None)


def _examine(case: _Case, timeout_s: float) -> Report:
    from dslaunch.cli.doctor_checks import Wanted, find_differences, find_problems, hosts_to_exclude
    from dslaunch.cli.doctor_report import Report
    from dslaunch.launch.jit_cache import held_here
    from dslaunch.launch.probing import is_here, probe_hosts
    from dslaunch.launch.ready import check_way

    hosts = case.hosts.topology.hosts
    here = [is_here(case.launch.via, host) for host in hosts]
    if case.launch.via != "ssh" or not all(here):
        check_way(case.launch, os.environ)
    findings: list[HostFinding] = []
    began = time.monotonic()
    with _witness(
        Path(case.launch.run_dir), findings, needed=case.launch.container is not None or not all(here)
    ) as witness:
        probed = probe_hosts(hosts, _request(case, witness), timeout_s=timeout_s)
    seconds = time.monotonic() - began
    inventories, memory = _read_devices(probed)
    wanted = Wanted(
        device_type=case.hosts.device_type,
        devices=frozenset(case.hosts.devices or ()),
        cwd=case.launch.cwd,
        is_trainer=case.ds_config is not None,
        master_chosen=case.launch.master_addr is not None,
    )
    locks = {lock.path for one in probed if one.facts for lock in one.facts.locks}
    findings += find_problems(probed, inventories, wanted, held_here(locks))
    return Report(
        probed=probed,
        inventories=inventories,
        memory=memory,
        precision=_precision(case, probed, inventories),
        python=case.launch.argv[0],
        differences=find_differences(probed, inventories),
        findings=tuple(findings),
        exclude=hosts_to_exclude(probed, findings),
        seconds=seconds,
    )


@contextmanager
def _witness(
    folder: Path, findings: list[HostFinding], *, needed: bool
) -> Iterator[Mapping[str, str] | None]:
    """A file by which the others see the run directory, or what is there of the way to it."""
    from dslaunch.cli.doctor_checks import HostFinding
    from dslaunch.launch.startup import lay_witness

    there = _nearest(folder)
    with lay_witness(there, wanted=needed and os.access(there, os.W_OK)) as witness:
        if needed and witness is None:
            message = f"cannot write {there}, where the run directory would be"
            findings.append(
                HostFinding("run-dir", "error", "this machine", message, "give another --run-dir")
            )
        yield witness


def _nearest(folder: Path) -> Path:
    """The folder, or of those above it the first that is there."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _request(case: _Case, witness: Mapping[str, str] | None) -> ProbeRequest:
    from dslaunch.core.inventory import NVIDIA_SMI
    from dslaunch.core.packages import COMPARED
    from dslaunch.launch.container import enter_words
    from dslaunch.launch.jit_cache import cache_of, torch_extensions_dir
    from dslaunch.launch.orders import accelerator
    from dslaunch.launch.probing import ProbeRequest
    from dslaunch.launch.text import utf8_environ

    launch = case.launch
    environ = {**utf8_environ(), **launch.env}
    if launch.device_type == "cuda":  # as ranks are told, whatever it is here
        environ["DS_ACCELERATOR"] = accelerator(launch)
    ops = environ.get("TORCH_EXTENSIONS_DIR")
    if launch.container is not None:  # where the image, or its user's home, has them
        ops = launch.env.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    elif not ops:
        ops = str(torch_extensions_dir(launch.argv[0], environ, launch.cwd))
    return ProbeRequest(
        via=launch.via,
        within=enter_words(dataclasses.replace(launch, run_dir=str(_nearest(Path(launch.run_dir))))),
        gpus=launch.device_type == "cuda",
        python=launch.argv[0],
        packages=COMPARED,
        environ=environ,
        env=launch.env,
        cwd=launch.cwd,
        witness=witness,
        cache=cache_of(launch, environ),
        ops=ops,
        smi=NVIDIA_SMI,
        master_addr=launch.master_addr,
        master_port=launch.master_port,
    )


def _read_devices(probed: Sequence[Probed]) -> tuple[dict[str, Inventory], dict[str, int | None]]:
    """Host -> its devices, and host -> the memory that a job may use there."""
    from dslaunch.core.host_memory import local_memory_bytes
    from dslaunch.core.inventory import inventory_of
    from dslaunch.launch.probing import root_of

    inventories, memory = {}, {}
    for one in probed:
        if one.facts is None:
            continue
        with root_of(one.facts) as root:
            inventories[one.host.name] = inventory_of(one.facts.visible, one.facts.smi or "", root=root)
            memory[one.host.name] = local_memory_bytes(root)
    return inventories, memory


def _precision(
    case: _Case, probed: Sequence[Probed], inventories: Mapping[str, Inventory]
) -> tuple[str, str] | None:
    from dslaunch.config.host_devices import DeviceGroup, groups_of_inventory
    from dslaunch.config.precision import resolve_precision
    from dslaunch.core.errors import ConfigError

    answered = [one.host for one in probed if one.facts is not None]
    if not answered:
        return None
    try:
        if case.hosts.device_type == "cpu":
            groups = tuple(DeviceGroup(found.cpu) for found in inventories.values())
        else:
            groups = groups_of_inventory(inventories, answered)
        chosen = resolve_precision("auto", groups)
    except ConfigError:  # more slots than devices, which is said; a device that the table does not know
        return None
    return chosen.value, chosen.reason
