"""What is wrong with the hosts of a run, from what probes found on them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from dslaunch.core.finding import Severity
from dslaunch.core.inventory import driver_of
from dslaunch.core.packages import HOW_TO_INSTALL

if TYPE_CHECKING:
    from dslaunch.core.devices import Device, Inventory
    from dslaunch.launch.probing import HostFacts, Probed

# What no rank of DeepSpeed can do without, and what our own trainer needs besides.
DEEPSPEED = ("torch", "deepspeed")
TRAINER = ("transformers", "peft", "datasets", "accelerate", "safetensors")
PACKAGES = (*DEEPSPEED, *TRAINER, "bitsandbytes", "flash-attn")
_LEAST_CACHE = 2**30
_LEAST_INODES = 1000
_LEAST_FILES = 1024
_CUDA_MINORS_MIX = ("10", "11", "12")  # majors of which DeepSpeed takes any two minors together
_OLDEST_PYTHON = (3, 10)
_NONE = "none"
_DRIVER = "NVIDIA driver"


@dataclass(frozen=True)
class HostFinding:
    """One thing about one host. ``code`` is stable; ``hint`` is one thing to do.

    error: a run would fail or hang on it; warning: it may; info: good to know.
    """

    code: str
    severity: Severity
    host: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to run there. ``is_trainer``: our own, from a run file; else any script.

    ``devices``: those that the plan is for; empty where it names none. ``cwd``: where ranks start.
    """

    device_type: str
    devices: frozenset[Device]
    cwd: str
    is_trainer: bool


@dataclass(frozen=True)
class Difference:
    """Something of which the hosts have different values: the value of most first, each with its hosts."""

    what: str
    values: tuple[tuple[str, tuple[str, ...]], ...]


def find_problems(
    probed: Sequence[Probed], inventories: Mapping[str, Inventory], wanted: Wanted
) -> list[HostFinding]:
    """All that is wrong, host by host; ``inventories`` are of the hosts that answered."""
    from dslaunch.launch.preflight import clock_problem

    found: list[HostFinding] = []
    held = {lock.path for one in probed if one.facts for lock in one.facts.locks if lock.held is not False}
    skews = [one.skew_s for one in probed if one.facts]
    for one in probed:
        name = one.host.name
        if one.facts is None:
            found.append(HostFinding("unreachable", "error", name, one.problem or "no answer"))
            continue
        say = _Sayer(found, name)
        _check_python(say, one.facts, wanted)
        _check_devices(say, one, inventories[name], wanted)
        _check_compilers(say, one.facts, wanted)
        _check_folders(say, one.facts, wanted)
        _check_limits(say, one, len(one.host.slots))
        _check_locks(say, one.facts, held, wanted)
        if len(probed) > 1:
            _check_network(say, one, probed)
            if (problem := clock_problem(one.skew_s - median(skews))) is not None:
                say.warn("clock", problem, "start an NTP client there")
    found += _differing_versions(probed)
    return found


def find_differences(
    probed: Sequence[Probed], inventories: Mapping[str, Inventory]
) -> tuple[Difference, ...]:
    """Only what differs between the hosts that answered."""
    answered = {one.host.name: one.facts for one in probed if one.facts is not None}
    rows: dict[str, dict[str, str | None]] = {
        **_versions(answered),
        _DRIVER: _drivers(answered),
        "nvcc": {host: facts.tools["nvcc"] for host, facts in answered.items()},
        "glibc": {host: facts.glibc for host, facts in answered.items()},
        "cpu": {host: facts.cpu for host, facts in answered.items()},
        "cores": {host: str(facts.cores) for host, facts in answered.items()},
        "devices": {host: devices_text(inventories[host]) for host in answered},
    }
    return _differing(rows)


def devices_text(inventory: Inventory) -> str:
    """``8 x h100 (sm_90), 138.9 GiB``; ``none``."""
    kinds = Counter((str(a.device), a.device.memory_gib) for a in inventory.accelerators)
    each = (
        f"{n} x {name}" + (f", {memory:g} GiB" if memory is not None else "")
        for (name, memory), n in kinds.items()
    )
    return "; ".join(each) or "none"


def hosts_to_exclude(probed: Sequence[Probed], findings: Sequence[HostFinding]) -> tuple[str, ...]:
    """The hosts with an error; empty where none would be left without them."""
    bad = {finding.host for finding in findings if finding.severity == "error"}
    chosen = tuple(one.host.name for one in probed if one.host.name in bad)
    return chosen if len(chosen) < len(probed) else ()


class _Sayer:
    """Writes down findings of one host."""

    def __init__(self, found: list[HostFinding], host: str) -> None:
        self._found, self._host = found, host

    def say(self, severity: Severity, code: str, message: str, hint: str | None = None) -> None:
        self._found.append(HostFinding(code, severity, self._host, message, hint))

    def fail(self, code: str, message: str, hint: str | None = None) -> None:
        self.say("error", code, message, hint)

    def warn(self, code: str, message: str, hint: str | None = None) -> None:
        self.say("warning", code, message, hint)


def _check_python(say: _Sayer, facts: HostFacts, wanted: Wanted) -> None:
    python = facts.interpreter
    if python.problem is not None:
        say.fail("python", python.problem, "the ranks' Python must be at the same path on every host")
        return
    if tuple(map(int, python.version.split(".")[:2])) < _OLDEST_PYTHON:
        say.fail("python", f"Python {python.version} is too old", "use Python 3.10 or newer")
    for names, needed in ((DEEPSPEED, True), (TRAINER, wanted.is_trainer)):
        missing = [name for name in names if python.packages.get(name) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            whom = "" if names is DEEPSPEED else ", which dslaunch's own trainer needs"
            say.say(
                "error" if needed else "warning",
                "packages",
                f"{', '.join(missing)} {verb} not installed{whom}",
                f"{HOW_TO_INSTALL}; or run dslaunch with the Python that has them",
            )


def _check_devices(say: _Sayer, one: Probed, inventory: Inventory, wanted: Wanted) -> None:
    from dslaunch.launch.local import missing_slots

    assert one.facts is not None
    if wanted.device_type != "cuda":
        return
    by_id = {accelerator.id: accelerator.device for accelerator in inventory.accelerators}
    if not by_id and one.facts.device_files:  # WSL, and containers that hide the list
        say.say("info", "devices", "there are device files of GPUs, but no list of them to read")
        return
    if missing := missing_slots(one.host, list(by_id)):
        shown = f"{len(by_id)} ({', '.join(by_id)})" if by_id else "none"
        say.fail(
            "devices",
            f"the plan is for GPU {missing[0]}, but it shows {shown}",
            "correct its slots, or use --gpu cpu for ranks on the CPU",
        )
        return
    planned = {device.arch for device in wanted.devices}
    others = sorted({str(device) for device in by_id.values() if device.arch not in planned})
    if others and planned and "" not in planned:
        say.fail(
            "device-kind",
            f"the plan is for {', '.join(sorted(map(str, wanted.devices)))}, but it has {', '.join(others)}",
            "name what the hosts have with --gpu, or give --inventory",
        )


def _check_compilers(say: _Sayer, facts: HostFacts, wanted: Wanted) -> None:
    """DeepSpeed compiles an op when it is first used: on CPUs always one, on GPUs its optimizers'."""
    needed = {
        "c++": (facts.tools["c++"] is not None, "install g++ (Debian: apt-get install g++), or set CXX"),
        "ninja": (facts.tools["ninja"] is not None, "pip install ninja"),
        "Python.h": (
            facts.interpreter.has_headers or facts.interpreter.problem is not None,
            "install Python's headers (Debian: apt-get install python3-dev)",
        ),
    }
    missing = {name: hint for name, (there, hint) in needed.items() if not there}
    if missing:
        say.say(
            "error" if wanted.device_type == "cpu" else "warning",
            "compiler",
            f"no {', '.join(missing)}: DeepSpeed's ops cannot be compiled",
            next(iter(missing.values())),
        )
    cuda, nvcc = facts.interpreter.torch_cuda, facts.tools["nvcc"]
    if wanted.device_type != "cuda" or cuda is None:
        return
    instead = "or do without its compiled optimizers (optimizer.params.torch_adam: true)"
    if nvcc is None:
        say.warn(
            "nvcc",
            "no nvcc: DeepSpeed's CUDA ops cannot be compiled",
            f"install CUDA toolkit {cuda}, {instead}",
        )
    elif not _fit_together(cuda, nvcc):
        say.warn(
            "nvcc",
            f"nvcc is of CUDA {nvcc} and torch of {cuda}: DeepSpeed refuses to compile its ops",
            f"set CUDA_HOME to a toolkit {cuda}, {instead}",
        )


def _fit_together(cuda: str, nvcc: str) -> bool:
    """Source: DeepSpeed 0.19.8 ops/op_builder/builder.py ``assert_no_cuda_mismatch``."""
    majors = {version.split(".")[0] for version in (cuda, nvcc)}
    return not nvcc or cuda.split(".")[:2] == nvcc.split(".")[:2] or majors in ({m} for m in _CUDA_MINORS_MIX)


def _check_folders(say: _Sayer, facts: HostFacts, wanted: Wanted) -> None:
    from dslaunch.launch.preflight import gib

    if not facts.has_cwd:
        say.fail("cwd", f"no working directory {wanted.cwd}", "start where all hosts have it")
    if facts.witness is not None:
        severity: Severity = "error" if wanted.is_trainer else "warning"
        say.say(severity, "run-dir", facts.witness, "put --run-dir on a file system that all hosts share")
    if facts.cache_problem is not None:
        say.fail(
            "cache",
            f"cannot write the cache {facts.cache_path}: {facts.cache_problem}",
            "set DSLAUNCH_CACHE to a directory that can be written",
        )
        return
    free, inodes = facts.cache.free_bytes, facts.cache.free_inodes
    short = "free some, or set DSLAUNCH_CACHE to another file system"
    if free is not None and free < _LEAST_CACHE:
        say.warn("cache", f"{gib(free)} are free for the cache {facts.cache_path}", short)
    if inodes is not None and inodes < _LEAST_INODES:
        say.warn("cache", f"only {inodes} files more fit on the file system of {facts.cache_path}", short)


def _check_limits(say: _Sayer, one: Probed, num_ranks: int) -> None:
    from dslaunch.launch.preflight import gib, shm_hint, shm_problem

    facts = one.facts
    assert facts is not None
    if (problem := shm_problem(facts.shm.total_bytes, num_ranks)) is not None:
        say.warn("shm", problem, shm_hint(num_ranks))
    if -1 < facts.nofile < _LEAST_FILES:
        say.warn("nofile", f"a process may open {facts.nofile} files", "ulimit -n 65536")
    if facts.infiniband and facts.memlock != -1:
        say.warn(
            "memlock",
            f"it has InfiniBand, and a process may lock {gib(facts.memlock)} of memory",
            "set memlock to unlimited (limits.conf; for ssh in sshd's own limits)",
        )


def _check_locks(say: _Sayer, facts: HostFacts, held: set[str], wanted: Wanted) -> None:
    for lock in facts.locks:
        if lock.path in held:
            continue
        say.say(
            "warning" if wanted.is_trainer else "error",  # our trainer removes it
            "stale-lock",
            f"no process has {lock.path} open: a killed build left it, and DeepSpeed waits for it for ever",
            f"rm {lock.path}, unless a build runs on another machine",
        )


def _check_network(say: _Sayer, one: Probed, probed: Sequence[Probed]) -> None:
    facts, first = one.facts, probed[0]
    assert facts is not None
    if one.meet_problem is not None:
        say.fail("address", *one.meet_problem)
    if one.unreached is not None and first.meets_at is not None:
        addr, port = first.meets_at
        say.fail(
            "connection",
            f"cannot reach {first.host.name} at {addr} port {port}: {one.unreached}",
            "open the firewall between the hosts, or give the address on another network: --master-addr",
        )
    if one is not first and (addresses := facts.addresses.get(first.host.name)):
        _check_name_of_first(say, addresses, first)
    if facts.own_addresses and all(map(_is_loopback, facts.own_addresses)):
        say.say(
            "info",
            "own-name",
            f"its own name leads to {facts.own_addresses[0]}: dslaunch goes by the route to the others",
        )


def _check_name_of_first(say: _Sayer, addresses: Sequence[str], first: Probed) -> None:
    name = first.host.name
    if any(map(_is_loopback, addresses)):
        say.warn(
            "name", f"{name} leads to {', '.join(addresses)} there, which is itself", "correct its /etc/hosts"
        )
    elif len(addresses) > 1 and first.meets_at is not None:
        say.say("info", "name", f"{name} leads to {', '.join(addresses)}; {first.meets_at[0]} is used")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _differing_versions(probed: Sequence[Probed]) -> Iterator[HostFinding]:
    """Findings for the hosts that have other versions than most, or than the first where it is a tie."""
    answered = {one.host.name: one.facts for one in probed if one.facts is not None}
    for difference in _differing({**_versions(answered), _DRIVER: _drivers(answered)}):
        (usual, _), *others = difference.values
        for value, host in ((value, host) for value, hosts in others for host in hosts):
            if _NONE in (value, usual) and difference.what in (*DEEPSPEED, *TRAINER):
                continue  # said already: it is not installed
            yield HostFinding(
                "versions",
                _weight(difference.what, value, usual),
                host,
                f"{difference.what} {value}, but {usual} on other hosts",
                "install the same on all hosts",
            )


def _weight(what: str, value: str, usual: str) -> Severity:
    if what == "python":
        return "warning" if value.split(".")[:2] == usual.split(".")[:2] else "error"
    return "error" if what in ("machine", *DEEPSPEED) else "warning"


def _versions(answered: Mapping[str, HostFacts]) -> dict[str, dict[str, str | None]]:
    """What -> host -> its version, of all that ranks of one run should have alike."""
    works = {host: facts for host, facts in answered.items() if facts.interpreter.problem is None}
    return {
        "machine": {host: facts.machine for host, facts in answered.items()},
        "python": {host: facts.interpreter.version for host, facts in works.items()},
        **{
            package: {host: facts.interpreter.packages.get(package) for host, facts in works.items()}
            for package in PACKAGES
        },
    }


def _drivers(answered: Mapping[str, HostFacts]) -> dict[str, str | None]:
    """NVIDIA's, of the hosts that have one."""
    told = {
        host: driver_of(facts.files.get("/proc/driver/nvidia/version", ""), facts.smi or "")
        for host, facts in answered.items()
    }
    return {host: driver for host, driver in told.items() if driver is not None}


def _differing(rows: Mapping[str, Mapping[str, str | None]]) -> tuple[Difference, ...]:
    found = []
    for what, value_of in rows.items():
        hosts_of: dict[str, list[str]] = {}
        for host, value in value_of.items():
            hosts_of.setdefault(value or _NONE, []).append(host)
        if len(hosts_of) > 1:
            # Sorting is stable: the first host's value stays in front of one that as many have.
            values = sorted(hosts_of.items(), key=lambda item: -len(item[1]))
            found.append(Difference(what, tuple((value, tuple(hosts)) for value, hosts in values)))
    return tuple(found)
