"""The hosts that a batch scheduler gave to this job, read from its environment alone.

No scheduler's command is run: a container or a compute node may have none. Slurm,
PBS, LSF and SGE name the hosts; Flux does not, and then ``names`` is empty. How many
tasks or slots a host has says nothing of its GPUs, so they are counted from what the
scheduler says of GPUs, or are not known (sources: slurm 26.11 sbatch(1); OpenPBS
cgroup hook; LSF 10.1 "Environment variables"; Grid Engine sge_pe(5)).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dslaunch.core.errors import HostfileError
from dslaunch.core.nodelist import expand_counts, expand_nodelist
from dslaunch.core.topology import HOST_NAME, Host

Environ = Mapping[str, str]
ReadFile = Callable[[str], str]

# What restricts a process to the devices that the scheduler gave it; the innermost first.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_COUNT = re.compile(r"[0-9]{1,6}")
# What starts a program several times, and how it tells each which of how many it is.
_STARTERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("mpirun_rsh", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("mpiexec", "PALS_RANKID", None),
)
_LSF_LISTS = ("LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS")  # the best first


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of each host, in the hosts' order. Slots that count from 0 are places in the
    list that the scheduler makes visible on that host; ``here`` has the ids of this one.

    ``counts`` is None where they are not known; ``source`` says what tells them, or why none does.
    """

    counts: tuple[int, ...] | None
    source: str
    kind: str | None = None  # a name such as a100, where the scheduler tells


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What the environment says of a job. ``source`` is the variable that the names are from."""

    scheduler: str
    source: str
    names: tuple[str, ...]
    devices: Devices
    here: str | None = None  # which of the names this machine is
    ids_here: tuple[str, ...] = ()  # of its devices
    left_out: str | None = None  # a host that was dropped, and why
    on_cpu: bool = False  # DS_ACCELERATOR=cpu: accelerators are not to be used

    @property
    def is_this_machine(self) -> bool:
        """Whether this machine is all that the job has."""
        return len(self.names) == 1 and self.here is not None

    def hosts(self, *, num_gpus_per_node: int | None = None, cpu: bool = False) -> tuple[Host, ...]:
        """The hosts with their slots: the devices, or as many as asked for where none are known.

        ``cpu``: ranks run on the CPU, one on each host unless a number is given.
        Raises HostfileError where the number of slots is not known.
        """
        counts = self.devices.counts
        if cpu:
            counts = (num_gpus_per_node or 1,) * len(self.names)
        elif counts is None:
            if num_gpus_per_node is None:
                raise HostfileError(
                    f"{self.source}: how many GPUs each of the {len(self.names)} hosts has is not known:"
                    f" {self.devices.source}",
                    hint="set --num-gpus-per-node (cluster.num_gpus_per_node), or --gpu cpu for CPU ranks",
                )
            counts = (num_gpus_per_node,) * len(self.names)
        elif empty := [name for name, count in zip(self.names, counts, strict=True) if not count]:
            raise HostfileError(
                f"{empty[0]} has no GPU in this job: {self.devices.source}",
                hint="ask the scheduler for GPUs, or use --gpu cpu for ranks on the CPU",
            )
        return tuple(
            Host(name=name, slots=self._slots(name, count, cpu))
            for name, count in zip(self.names, counts, strict=True)
        )

    def reason(self, hosts: Sequence[Host], *, cpu: bool = False) -> str:
        """Where hosts and slots are from: "SLURM_JOB_NODELIST: 4 nodes x 8 GPUs (SLURM_GPUS_PER_NODE)"."""
        sizes = sorted({len(host.slots) for host in hosts})
        each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        nodes = f"{len(hosts)} of {len(self.names)}" if len(hosts) < len(self.names) else str(len(hosts))
        if cpu:
            told = f"{each} CPU rank{'s' * (each != '1')}"
        elif self.devices.counts is None:
            told = f"{each} GPU{'s' * (each != '1')}"
        else:
            most = max(self.devices.counts)
            told = f"{each} of {most} GPUs" if sizes[-1] < most else f"{each} GPU{'s' * (each != '1')}"
            told += f" ({self.devices.source})"
        dropped = f"; {self.left_out}" if self.left_out else ""
        return f"{self.source}: {nodes} node{'s' * (len(self.names) > 1)} x {told}{dropped}"

    def _slots(self, name: str, count: int, cpu: bool) -> tuple[str, ...]:
        if name == self.here and len(self.ids_here) == count and not cpu:
            return self.ids_here
        return tuple(map(str, range(count)))


def probe_allocation(environ: Environ) -> Allocation | None:
    """The batch job that this process runs in, where it has hosts besides this machine.

    Raises HostfileError as :func:`read_allocation`.
    """
    check_started_once(environ)
    found = read_allocation(environ, this_host=os.uname().nodename)
    return None if found is None or found.is_this_machine else found


def check_started_once(environ: Environ) -> None:
    """Raises HostfileError where srun, mpirun or the like started several of us, one for each rank, say."""
    for program, rank, size in _STARTERS:
        if not _COUNT.fullmatch(environ.get(rank, "")):
            continue
        # Under --pty the other tasks wait for a terminal that they never get: only this one is used.
        if program == "srun" and environ.get("SLURM_PTY_PORT"):
            continue
        tasks = _number(environ, size) if size else int(environ[rank]) + 1
        if tasks is not None and tasks > 1:
            times = f"{tasks} times" if size else "several times"
            raise HostfileError(
                f"{program} started dslaunch {times}, and each copy would start all ranks",
                hint=f"start it once, without {program} or with one task of it: it starts ranks itself;"
                " where each copy is a run of its own, set launch.via to local",
            )


def read_allocation(
    environ: Environ, *, this_host: str, read_file: ReadFile | None = None
) -> Allocation | None:
    """The allocation that this process runs in; None outside of one.

    ``this_host``: this machine's name; its visible devices tell of it only where it is one of
    the hosts. Raises HostfileError where the scheduler's variables make no sense.
    """
    read = read_file or _read_text
    for starts, reader in _READERS:
        if any(environ.get(name, "").strip() for name in starts):
            return reader(environ, this_host, read)
    return None


def _read_flux(environ: Environ, this_host: str, read: ReadFile) -> Allocation:
    """Flux keeps its host list in the broker: nothing in the environment names a host."""
    source = next(name for name in ("FLUX_ENCLOSING_ID", "FLUX_JOB_ID", "FLUX_URI") if environ.get(name))
    return Allocation(
        scheduler="Flux", source=source, names=(), devices=Devices(counts=None, source="Flux does not tell")
    )


def _read_slurm(environ: Environ, this_host: str, read: ReadFile) -> Allocation:
    _check_slurm_job(environ)
    source = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST"
    names = tuple(dict.fromkeys(expand_nodelist(environ.get(source, ""), source)))
    this_host = environ.get("SLURMD_NODENAME") or this_host  # Slurm's names need not be the hosts' own
    return _allocation("Slurm", source, names, environ, this_host, _slurm_devices(environ, len(names)))


def _check_slurm_job(environ: Environ) -> None:
    if _number(environ, "SLURM_HET_SIZE") or _number(environ, "SLURM_PACK_SIZE"):
        raise HostfileError(
            "this is a heterogeneous Slurm job, whose parts have host lists of their own",
            hint="write the hosts of the part that is to run into a hostfile: --hostfile FILE",
        )


def _slurm_devices(environ: Environ, num_nodes: int) -> Devices | None:
    """GPUs as asked for on each node, else those of this node where every node has as many."""
    if asked := environ.get("SLURM_GPUS_PER_NODE"):
        count, kind = _parse_gres(asked, "SLURM_GPUS_PER_NODE")
        return Devices(counts=(count,) * num_nodes, source="SLURM_GPUS_PER_NODE", kind=kind)
    here = _number(environ, "SLURM_GPUS_ON_NODE")
    if here is None and environ.get("SLURM_JOB_GPUS"):
        here = len(_ids(environ["SLURM_JOB_GPUS"]))
    if asked := environ.get("SLURM_GPUS_PER_TASK"):
        return _gpus_of_tasks(environ, asked, num_nodes, here)
    if here is None:
        return None
    source = "SLURM_GPUS_ON_NODE" if environ.get("SLURM_GPUS_ON_NODE") else "SLURM_JOB_GPUS"
    total, kind = (
        _parse_gres(environ["SLURM_GPUS"], "SLURM_GPUS") if environ.get("SLURM_GPUS") else (None, None)
    )
    if total is not None and total != here * num_nodes:
        why = f"{source} is {here} here, but SLURM_GPUS is {total} over {num_nodes} nodes, so they differ"
        return Devices(counts=None, source=why, kind=kind)
    return Devices(counts=(here,) * num_nodes, source=source, kind=kind)


def _gpus_of_tasks(environ: Environ, asked: str, num_nodes: int, here: int | None) -> Devices:
    """With --gpus-per-task alone a node's GPUs do follow from its tasks (in a step: of the step's)."""
    each, kind = _parse_gres(asked, "SLURM_GPUS_PER_TASK")
    source = "SLURM_GPUS_PER_TASK x SLURM_TASKS_PER_NODE"
    tasks = environ.get("SLURM_TASKS_PER_NODE")
    counts = expand_counts(tasks, "SLURM_TASKS_PER_NODE") if tasks else ()
    gpus = tuple(each * count for count in counts)
    if len(gpus) != num_nodes or here not in (None, *gpus):
        return Devices(counts=None, source=f"{source} does not fit the job", kind=kind)
    return Devices(counts=gpus, source=source, kind=kind)


def _parse_gres(text: str, what: str) -> tuple[int, str | None]:
    """``4``, ``a100:4`` or ``gpu:a100:2,gpu:v100:2`` -> (sum, the kind where it is one)."""
    total, kinds = 0, set()
    for part in text.split(","):
        match = re.fullmatch(r"(?:gpu:)?(?:(?P<kind>[^:,\s]+):)?(?P<count>[0-9]{1,5})", part.strip())
        if match is None:
            raise HostfileError(
                f"{what}: {text[:60]!r} is not a number of GPUs", hint="give --num-gpus-per-node"
            )
        total += int(match["count"])
        kinds.add(match["kind"])
    return total, kinds.pop() if len(kinds) == 1 else None


def _read_pbs(environ: Environ, this_host: str, read: ReadFile) -> Allocation:
    """PBS_NODEFILE has a line for each MPI process, so a host may stand there many times."""
    path = environ["PBS_NODEFILE"]
    hint = "PBS writes it on the job's first node alone: start dslaunch there, or give --hostfile"
    lines = [(number, fields[0]) for number, fields in _lines(path, "PBS_NODEFILE", read, hint)]
    names = _distinct(path, lines)
    return _allocation("PBS", "PBS_NODEFILE", names, environ, this_host)


def _read_lsf(environ: Environ, this_host: str, read: ReadFile) -> Allocation:
    """LSB_DJOB_HOSTFILE (a line for each slot), else LSB_MCPU_HOSTS ("a 4 b 4"), else LSB_HOSTS."""
    source = next(name for name in _LSF_LISTS if environ.get(name, "").strip())
    words = environ[source].split()
    where = source
    if source == "LSB_DJOB_HOSTFILE":
        where = environ[source]
        listed = [(number, fields[0], 1) for number, fields in _lines(where, source, read, "give --hostfile")]
    elif source == "LSB_MCPU_HOSTS":
        if len(words) % 2 or not all(_COUNT.fullmatch(count) for count in words[1::2]):
            raise HostfileError(f'{source}: {environ[source][:60]!r} is not of the form "a 4 b 4"')
        listed = [(at + 1, words[at], int(words[at + 1])) for at in range(0, len(words), 2)]
    else:
        listed = [(at, word, 1) for at, word in enumerate(words, start=1)]
    names = _distinct(where, [(at, name) for at, name, _ in listed])
    slots: Counter[str] = Counter()
    for _, name, count in listed:
        slots[name] += count
    left_out = None
    # CSM (Summit, Lassen) puts the launch node first. It has one slot, no GPU, and runs no rank.
    if len(names) > 1 and slots[names[0]] == 1 and all(slots[name] > 1 for name in names[1:]):
        left_out = f"{names[0]} left out: with its single slot it is the launch node"
        names = names[1:]
    return _allocation("LSF", source, names, environ, this_host, left_out=left_out)


def _read_sge(environ: Environ, this_host: str, read: ReadFile) -> Allocation:
    """PE_HOSTFILE has ``host slots queue processors``; a host recurs where several queues give slots."""
    path = environ["PE_HOSTFILE"]
    lines = []
    for number, fields in _lines(path, "PE_HOSTFILE", read, "give --hostfile"):
        if len(fields) < 2 or not _COUNT.fullmatch(fields[1]):
            raise HostfileError(f"{path}:{number}: {' '.join(fields)!r} is not `host slots queue processors`")
        lines.append((number, fields[0]))
    devices = None
    if ids := environ.get("SGE_HGR_gpu"):
        devices = _as_here(len(ids.split()), len(_distinct(path, lines)), "SGE_HGR_gpu")
    return _allocation("SGE", "PE_HOSTFILE", _distinct(path, lines), environ, this_host, devices)


def _allocation(
    scheduler: str,
    source: str,
    names: tuple[str, ...],
    environ: Environ,
    this_host: str,
    devices: Devices | None = None,
    left_out: str | None = None,
) -> Allocation:
    here = next((name for name in names if _same_machine(name, this_host)), None)
    variable = next((name for name in _VISIBLE if name in environ), None) if here else None
    ids = _ids(environ[variable]) if variable else ()
    if devices is None and variable:
        devices = _as_here(len(ids), len(names), variable)
    nothing = (
        "nothing in the environment tells" if here else "nothing tells, and this machine is none of them"
    )
    return Allocation(
        scheduler=scheduler,
        source=source,
        names=names,
        devices=devices or Devices(counts=None, source=nothing),
        here=here,
        ids_here=ids,
        left_out=left_out,
        on_cpu=environ.get("DS_ACCELERATOR") == "cpu",
    )


def _as_here(count: int, num_nodes: int, variable: str) -> Devices:
    more = f" of this node has {count}, taken for all" if num_nodes > 1 else ""
    return Devices(counts=(count,) * num_nodes, source=variable + more)


def _ids(visible: str) -> tuple[str, ...]:
    """The devices of a visible-devices list: indices, ranges of them, or UUIDs; "-1" and "" are none."""
    found: list[str] = []
    for item in visible.split(","):
        item = item.strip()
        if match := re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", item):
            found += map(str, range(int(match[1]), int(match[2]) + 1))
        elif item and item not in ("-1", "NoDevFiles"):
            found.append(item)
        else:
            break  # what stands behind an invalid entry is ignored, as CUDA does
    return tuple(found)


def _lines(path: str, variable: str, read: ReadFile, hint: str) -> list[tuple[int, list[str]]]:
    """(number, fields) of each line that is not empty."""
    try:
        text = read(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise HostfileError(f"{variable}: cannot read {path}: {why}", hint=hint) from None
    lines = [(number, line.split()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise HostfileError(f"{variable}: no host in {path}", hint=hint)
    return lines


def _distinct(where: str, lines: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """Each name once, in order. Raises HostfileError for what is no name."""
    for number, name in lines:
        if not HOST_NAME.fullmatch(name):
            raise HostfileError(f"{where}:{number}: {name!r} is not a host name")
    return tuple(dict.fromkeys(name for _, name in lines))


def _number(environ: Environ, name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if _COUNT.fullmatch(text) else None


def _same_machine(name: str, this_host: str) -> bool:
    return name.lower() == this_host.lower() or name.lower().split(".")[0] == this_host.lower().split(".")[0]


def _read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


Reader = Callable[[Environ, str, ReadFile], Allocation]

# Flux first: it may run inside of a Slurm job, whose variables then tell of the wrong hosts.
_READERS: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("FLUX_ENCLOSING_ID", "FLUX_JOB_ID", "FLUX_URI"), _read_flux),
    (("SLURM_JOB_NODELIST", "SLURM_NODELIST"), _read_slurm),
    (("PBS_NODEFILE",), _read_pbs),
    (_LSF_LISTS, _read_lsf),
    (("PE_HOSTFILE",), _read_sge),
)
