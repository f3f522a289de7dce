"""What is wrong with the hosts of a run, from what probes found on them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from dslaunch.core.finding import Severity
from dslaunch.core.inventory import driver_of
from dslaunch.core.packages import COMPARED, DEEPSPEED, HOW_TO_INSTALL, TRAINER

if TYPE_CHECKING:
    from dslaunch.core.devices import Device, Inventory
    from dslaunch.launch.preflight import Difference
    from dslaunch.launch.probing import HostFacts, Probed

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
    ``master_chosen``: the user gave the address at which they meet.
    """

    device_type: str
    devices: frozenset[Device]
    cwd: str
    is_trainer: bool
    master_chosen: bool = False


def find_problems(
    probed: Sequence[Probed],
    inventories: Mapping[str, Inventory],
    wanted: Wanted,
    held_here: Set[str] = frozenset(),
) -> list[HostFinding]:
    """All that is wrong, host by host; ``inventories`` are of the hosts that answered.

    ``held_here``: locks that a process of this machine has open, which need be none of the hosts.
    """
    from dslaunch.launch.preflight import CLOCK_HINT, clock_problem, held_locks
    from dslaunch.launch.startup import hint_for

    found: list[HostFinding] = []
    held = held_locks([one.facts for one in probed if one.facts]) | held_here
    skews = [one.skew_s for one in probed if one.facts]
    for one in probed:
        name = one.host.name
        if one.facts is None:
            why = one.problem or "no answer"
            found.append(HostFinding("unreachable", "error", name, why, hint_for(why.encode())))
            continue
        say = _Sayer(found, name)
        _check_python(say, one.facts, wanted)
        _check_devices(say, one, inventories[name], wanted)
        _check_compilers(say, one.facts, wanted)
        _check_folders(say, one.facts, wanted)
        _check_surroundings(say, one, held, wanted)
        if len(probed) > 1:
            _check_network(say, one, probed)
            if (problem := clock_problem(one.skew_s - median(skews))) is not None:
                say.warn("clock", problem, CLOCK_HINT)
    found += [*_one_machine(probed, wanted), *_ways(probed, wanted), *_differing_versions(probed)]
    return found


def find_differences(
    probed: Sequence[Probed], inventories: Mapping[str, Inventory]
) -> tuple[Difference, ...]:
    """Only what differs between the hosts that answered."""
    from dslaunch.launch.preflight import differing

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
    return differing(rows)


def devices_text(inventory: Inventory) -> str:
    """``8 x h100 (sm_90), 138.9 GiB``; ``none``."""
    kinds = Counter((str(a.device), a.device.memory_gib) for a in inventory.accelerators)
    each = (
        f"{n} x {name}" + (f", {memory:g} GiB" if memory is not None else "")
        for (name, memory), n in kinds.items()
    )
    return "; ".join(each) or "none"


def hosts_to_exclude(probed: Sequence[Probed], findings: Sequence[HostFinding]) -> tuple[str, ...]:
    """The hosts with an error that not all have; empty where none would be left without them.

    What all have is the matter of no host: a lock on a file system that they share, say.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    hosts_of: dict[tuple[str, str], set[str]] = {}
    for finding in errors:
        hosts_of.setdefault((finding.code, finding.message), set()).add(finding.host)
    everywhere = {what for what, hosts in hosts_of.items() if len(hosts) == len(probed) > 1}
    bad = {finding.host for finding in errors if (finding.code, finding.message) not in everywhere}
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
    from dslaunch.core.devices import accelerator_of
    from dslaunch.launch.local import missing_slots
    from dslaunch.launch.preflight import kind_doubts

    assert one.facts is not None
    if wanted.device_type != "cuda":
        return
    by_id = {accelerator.id: accelerator.device for accelerator in inventory.accelerators}
    if not by_id and one.facts.device_files:  # WSL, and containers that hide the list
        say.say("info", "devices", "there are device files of GPUs, but no list of them to read")
        return
    if not by_id and accelerator_of(device.name for device in wanted.devices) != "cuda":
        return  # of other vendors' devices there is no list
    if missing := missing_slots(one.host, list(by_id)):
        shown = f"{len(by_id)} ({', '.join(by_id)})" if by_id else "none"
        say.fail(
            "devices",
            f"the plan is for GPU {missing[0]}, but it shows {shown}",
            "correct its slots, or use --gpu cpu for ranks on the CPU",
        )
        return
    for doubt in kind_doubts(by_id.values(), wanted.devices):
        say.fail(doubt.code, doubt.message, doubt.hint)


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
    if not facts.has_cwd:
        say.fail("cwd", f"no working directory {wanted.cwd}", "start where all hosts have it")
    if facts.witness is not None:
        severity: Severity = "error" if wanted.is_trainer else "warning"
        say.say(severity, "run-dir", facts.witness, "put --run-dir on a file system that all hosts share")


def _check_surroundings(say: _Sayer, one: Probed, held: Set[str], wanted: Wanted) -> None:
    """What a launch doubts too."""
    from dslaunch.launch.preflight import cache_doubts, limit_doubts, lock_doubts

    facts = one.facts
    assert facts is not None
    for doubt in (*cache_doubts(facts), *limit_doubts(facts, len(one.host.slots))):
        fails = doubt.code == "cache" and facts.cache_problem is not None
        say.say("error" if fails else "warning", doubt.code, doubt.message, doubt.hint)
    for doubt in lock_doubts(facts, held):  # our trainer removes it
        say.say("warning" if wanted.is_trainer else "error", doubt.code, doubt.message, doubt.hint)


def _check_network(say: _Sayer, one: Probed, probed: Sequence[Probed]) -> None:
    facts, first = one.facts, probed[0]
    assert facts is not None
    if one.meet_problem is not None:
        say.fail("address", *one.meet_problem)
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


def _ways(probed: Sequence[Probed], wanted: Wanted) -> Iterator[HostFinding]:
    """Hosts that do not reach the first one, or the first where none does."""
    from dslaunch.launch.preflight import way_doubts

    unreached = {one.host.name: one.unreached for one in probed if one.unreached is not None}
    if probed[0].meets_at is None or not unreached:
        return
    names = [one.host.name for one in probed if one.facts]
    for name, doubt in way_doubts(names, probed[0].meets_at, unreached, chosen=wanted.master_chosen).items():
        yield HostFinding(doubt.code, "error", name, doubt.message, doubt.hint)


def _one_machine(probed: Sequence[Probed], wanted: Wanted) -> Iterator[HostFinding]:
    """Hosts that are another one under a second name, with the same slots."""
    from dslaunch.launch.preflight import given_twice, one_machine_doubt

    severity: Severity = "warning" if wanted.device_type == "cpu" else "error"
    twice = given_twice([(one.host, one.facts.identity) for one in probed if one.facts])
    for name, (first, slot) in twice.items():
        doubt = one_machine_doubt(first, slot)
        yield HostFinding(doubt.code, severity, name, doubt.message, doubt.hint)


def _differing_versions(probed: Sequence[Probed]) -> Iterator[HostFinding]:
    """Findings for the hosts that have other versions than most, or than the first where it is a tie."""
    from dslaunch.launch.preflight import differing

    answered = {one.host.name: one.facts for one in probed if one.facts is not None}
    for difference in differing({**_versions(answered), _DRIVER: _drivers(answered)}):
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
            for package in COMPARED
        },
    }


def _drivers(answered: Mapping[str, HostFacts]) -> dict[str, str | None]:
    """NVIDIA's, of the hosts that have one."""
    told = {
        host: driver_of(facts.files.get("/proc/driver/nvidia/version", ""), facts.smi or "")
        for host, facts in answered.items()
    }
    return {host: driver for host, driver in told.items() if driver is not None}
