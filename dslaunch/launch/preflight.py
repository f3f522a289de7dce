"""What is doubtful of hosts that can start ranks, for `launch` before they start and for doctor. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dslaunch.core.devices import Device, named_device
from dslaunch.core.hostfile import filter_text
from dslaunch.core.topology import Host

GIB = 2**30
_SHM_PER_RANK = GIB
_FREE_SHM_PER_RANK = GIB // 4
_LEAST_CACHE = GIB
_LEAST_INODES = 1000
_LEAST_FILES = 1024
_MOST_SKEW_S = 5.0
_NAMED = 6
_NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Space:
    """A file system. None: it does not say."""

    total_bytes: int | None
    free_bytes: int | None
    free_inodes: int | None


@dataclass(frozen=True, kw_only=True)
class TorchLock:
    """A lock file in a cache of ops. ``held``: whether a process there has it open; None: not known."""

    path: str
    held: bool | None


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What ``look_around`` of agent.py found on a host; of limits -1 is none."""

    machine: str
    shm: Space
    cache_path: str
    cache: Space
    cache_problem: str | None
    nofile: int
    memlock: int
    infiniband: bool
    locks: tuple[TorchLock, ...]
    identity: str = ""


@dataclass(frozen=True)
class Doubt:
    """One thing that may keep a run from going well on a host. ``code`` is stable; ``hint``: what to do."""

    code: str
    message: str
    hint: str


@dataclass(frozen=True)
class Difference:
    """Something of which the hosts have different values: the value of most first, each with its hosts."""

    what: str
    values: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class ReadyHost:
    """What an agent said when it was ready. ``skew_s``: how far its clock is ahead of ours.

    ``versions``: of Python and packages, where they are beside the program that ranks run; ``gpus``: the
    models of NVIDIA's, where ranks use them. ``unseen``: why the run directory is not seen there.
    """

    name: str
    num_ranks: int
    surroundings: Surroundings
    skew_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    unseen: str | None = None


def surroundings_fields(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`Surroundings`, out of the JSON of ``look_around``."""
    cache = dict(found["cache"])
    return {
        "machine": found["machine"],
        "identity": found["identity"],
        "shm": Space(**found["shm"]),
        "cache_path": cache.pop("path"),
        "cache_problem": cache.pop("problem"),
        "cache": Space(**cache),
        "nofile": found["nofile"],
        "memlock": found["memlock"],
        "infiniband": found["infiniband"],
        "locks": tuple(TorchLock(**lock) for lock in found["locks"]),
    }


def ready_host(name: str, num_ranks: int, said: Mapping[str, Any], now: float) -> ReadyHost:
    """Parse the agent's ``ready`` event, heard at ``now`` (seconds since 1970)."""
    return ReadyHost(
        name=name,
        num_ranks=num_ranks,
        surroundings=Surroundings(**surroundings_fields(said["surroundings"])),
        skew_s=said["time"] - now,
        versions=said["versions"],
        gpus=tuple(sorted(set(said["gpus"]))),
        unseen=said["unseen"],
    )


# --- of all hosts of a launch, in words ---------------------------------------------------------------


def find_doubts(
    hosts: Sequence[ReadyHost],
    *,
    clears_locks: bool,
    held_here: Set[str] = frozenset(),
    planned: Sequence[str] = (),
) -> list[str]:
    """A note for each, lines of a table behind the first line where they differ.

    ``clears_locks``: the ranks are our trainer's, which removes locks that killed builds left;
    ``held_here``: those that a process of this machine has open, which need be none of the hosts;
    ``planned``: names of the GPUs that the plan is for, where it names any.
    """
    kinds = [named_device(name) for name in planned]
    doubts = [*_differences_in_words(hosts), *_one_machine_in_words(hosts)]
    alike: dict[tuple[str, str], list[str]] = {}
    held = held_locks([host.surroundings for host in hosts]) | held_here
    middle = median(host.skew_s for host in hosts)
    for host in hosts:
        for doubt in (
            *kind_doubts(map(named_device, host.gpus), kinds),
            *_doubts_of(host, middle, held, clears_locks=clears_locks),
        ):
            alike.setdefault((doubt.message, doubt.hint), []).append(host.name)
    return doubts + [f"{_names(names)}: {what}; {hint}" for (what, hint), names in alike.items()]


def _doubts_of(host: ReadyHost, middle: float, held: Set[str], *, clears_locks: bool) -> Iterator[Doubt]:
    if host.unseen is not None:
        where = "the logs of its ranks stay there"
        yield Doubt("run-dir", host.unseen, f"{where}: put --run-dir on a file system that all hosts share")
    yield from cache_doubts(host.surroundings)
    yield from limit_doubts(host.surroundings, host.num_ranks)
    if not clears_locks:
        yield from lock_doubts(host.surroundings, held)
    if (problem := clock_problem(host.skew_s - middle)) is not None:
        yield Doubt("clock", problem, CLOCK_HINT)


def _differences_in_words(hosts: Sequence[ReadyHost]) -> list[str]:
    """One text with a table of what differs, and which hosts to leave out; empty where nothing does."""
    versions: dict[str, dict[str, str | None]] = {
        what: {host.name: host.versions.get(what) for host in hosts if _knows(host, what)}
        for what in dict.fromkeys(name for host in hosts for name in host.versions)
    }
    if any((version or "").count(".") == 1 for version in versions.get("python", {}).values()):
        # One may tell no more than 3.11 of its Python: then that alone can be compared.
        versions["python"] = {
            host: ".".join((version or "").split(".")[:2]) for host, version in versions["python"].items()
        }
    rows: dict[str, dict[str, str | None]] = {
        "machine": {host.name: host.surroundings.machine for host in hosts},
        **versions,
        "GPU": {host.name: ", ".join(host.gpus) for host in hosts if host.gpus},
    }
    differences = differing(rows)
    if not differences:
        return []
    others = {name for found in differences for _, names in found.values[1:] for name in names}
    without = [host.name for host in hosts if host.name in others]
    out = f"; --exclude {filter_text(without)} leaves that out" if len(without) < len(hosts) else ""
    lines = difference_table(differences)
    return ["\n".join([f"hosts differ: ranks may hang, or compute something else{out}", *lines])]


def _one_machine_in_words(hosts: Sequence[ReadyHost]) -> Iterator[str]:
    names_of: dict[str, list[str]] = {}
    for host in hosts:
        names_of.setdefault(host.surroundings.identity, []).append(host.name)
    for identity, names in names_of.items():
        if identity and len(names) > 1:
            yield (
                f"{_names(names)}: these are one machine, {identity.split()[0]}, and its ranks share it;"
                f" keep one of them, with all slots: --exclude {filter_text(names[1:])}"
            )


def _knows(host: ReadyHost, what: str) -> bool:
    """Whether the host was seen to have ``what``, or, among other packages, not to have it."""
    return what in host.versions or (what != "python" and bool(host.versions.keys() - {"python"}))


def given_twice(hosts: Sequence[tuple[Host, str]]) -> dict[str, tuple[str, str]]:
    """Of hosts, each with its machine's identity: those with a slot that an earlier one has on that machine.

    Name -> the name of the earlier one, and the slot.
    """
    seen: dict[tuple[str, str], str] = {}
    found: dict[str, tuple[str, str]] = {}
    for host, identity in hosts:
        for slot in host.slots if identity else ():
            first = seen.setdefault((identity, slot), host.name)
            if first != host.name:
                found.setdefault(host.name, (first, slot))
    return found


def one_machine_doubt(first: str, slot: str) -> Doubt:
    """Of a host that :func:`given_twice` found."""
    return Doubt(
        "one-machine",
        f"it is the same machine as {first}, and both have slot {slot}",
        "keep one of the two names, with all slots",
    )


def way_doubts(
    names: Sequence[str], where: tuple[str, int], unreached: Mapping[str, str], *, chosen: bool
) -> dict[str, Doubt]:
    """Host -> what is wrong with the way to the first of ``names``, the hosts that were to meet at ``where``.

    ``unreached``: why some did not get there; where none of several did, it is the first host's matter.
    ``chosen``: the user gave the address.
    """
    first, *others = names
    at = f"at {where[0]} port {where[1]}"
    hint = "leave --master-addr (cluster.master_addr) out, or give one of the first host's addresses"
    if not chosen:
        hint = "open the firewall between the hosts, or give the address on another network: --master-addr"
    if 1 < len(others) == len(unreached):
        why = ", ".join(dict.fromkeys(unreached.values()))
        return {first: Doubt("connection", f"no other host reaches it {at}: {why}", hint)}
    return {
        name: Doubt("connection", f"cannot reach {first} {at}: {problem}", hint)
        for name, problem in unreached.items()
    }


# --- of one host; what doctor says too ----------------------------------------------------------------


def cache_doubts(found: Surroundings) -> Iterator[Doubt]:
    """Disk, quota and inodes of the cache."""
    if found.cache_problem is not None:
        problem = f"cannot write the cache {found.cache_path}: {found.cache_problem}"
        yield Doubt("cache", problem, "set DSLAUNCH_CACHE to a directory that can be written")
        return
    free, inodes = found.cache.free_bytes, found.cache.free_inodes
    short = "free some, or set DSLAUNCH_CACHE to another file system"
    if free is not None and free < _LEAST_CACHE:
        yield Doubt("cache", f"{gib(free)} are free for the cache {found.cache_path}", short)
    if inodes is not None and inodes < _LEAST_INODES:
        problem = f"only {inodes} files more fit on the file system of {found.cache_path}"
        yield Doubt("cache", problem, short)


def kind_doubts(found: Iterable[Device], planned: Collection[Device]) -> Iterator[Doubt]:
    """GPUs of another kind than the plan is for; none where it, or they, are not known."""
    archs = {device.arch for device in planned}
    others = sorted({str(device) for device in found if device.arch and device.arch not in archs})
    if others and archs and "" not in archs:
        wanted = ", ".join(sorted(map(str, planned)))
        problem = f"the plan is for {wanted}, but it has {', '.join(others)}"
        yield Doubt("device-kind", problem, "name what the hosts have with --gpu, or give --inventory")


def limit_doubts(found: Surroundings, num_ranks: int) -> Iterator[Doubt]:
    """/dev/shm for so many ranks, open files and locked memory."""
    yield from _shm_doubts(found.shm, num_ranks)
    if -1 < found.nofile < _LEAST_FILES:
        yield Doubt("nofile", f"a process may open {found.nofile} files", "ulimit -n 65536")
    if found.infiniband and found.memlock != -1:
        yield Doubt(
            "memlock",
            f"it has InfiniBand, and a process may lock {gib(found.memlock)} of memory",
            "set memlock to unlimited (limits.conf; for ssh in sshd's own limits)",
        )


def _shm_doubts(shm: Space, num_ranks: int) -> Iterator[Doubt]:
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    why = "NCCL and data loaders die of a bus error where it is full"
    total, free = shm.total_bytes, shm.free_bytes
    if total is not None and total < num_ranks * _SHM_PER_RANK:
        enough = f"{max(8, 2 * num_ranks)}g"
        yield Doubt(
            "shm",
            f"/dev/shm is {gib(total)} for {ranks}: {why}",
            f"docker or podman run --shm-size={enough} (or --ipc=host);"
            f" on a host, and so in apptainer, which has the host's: mount -o remount,size={enough} /dev/shm",
        )
    elif total is not None and free is not None and free < num_ranks * _FREE_SHM_PER_RANK:
        yield Doubt(
            "shm",
            f"of /dev/shm {gib(free)} of {gib(total)} are free for {ranks}: {why}",
            "killed programs leave files there: see ls -l /dev/shm, and remove what is yours",
        )


def lock_doubts(found: Surroundings, held: Set[str]) -> Iterator[Doubt]:
    """Locks in the cache of ops that no process of any host has open; ``held``: see :func:`held_locks`."""
    for lock in found.locks:
        if lock.path not in held:
            yield Doubt(
                "stale-lock",
                f"no process has {lock.path} open:"
                " a killed build left it, and DeepSpeed waits for it for ever",
                f"rm {lock.path}, unless a build runs on another machine",
            )


def held_locks(hosts: Sequence[Surroundings]) -> set[str]:
    """Paths of locks that a process of one of the hosts has open, or may have."""
    return {lock.path for host in hosts for lock in host.locks if lock.held is not False}


CLOCK_HINT = "start an NTP client there"


def clock_problem(skew_s: float) -> str | None:
    """That a clock is wrong, which is so far ahead of the others'; None where it is not."""
    if abs(skew_s) <= _MOST_SKEW_S:
        return None
    return f"its clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the others'"


# --- what differs -------------------------------------------------------------------------------------


def differing(rows: Mapping[str, Mapping[str, str | None]]) -> tuple[Difference, ...]:
    """What -> host -> value, of which those are returned that not all hosts have alike."""
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


def difference_table(differences: Sequence[Difference]) -> list[str]:
    """Its lines, with a heading."""
    rows = [("differs", "value", "hosts")]
    for difference in differences:
        for place, (value, hosts) in enumerate(difference.values):
            rows.append((difference.what if place == 0 else "", value, _names(hosts)))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{what:<{widths[0]}}  {value:<{widths[1]}}  {hosts}" for what, value, hosts in rows]


def gib(size: int) -> str:
    """Bytes in words."""
    if size < 2**20:
        return f"{size // 2**10} KiB"
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - _NAMED
    return ", ".join(hosts[:_NAMED]) + (f" and {more} more" if more > 0 else "")
