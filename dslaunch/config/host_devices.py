"""Which device each host of a run has: one name for all, a name by host pattern, or an inventory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dslaunch.core.devices import Device, Inventory, lookup_device, made_sizes, said_size
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.host_pattern import host_matcher
from dslaunch.core.inventory import find_host
from dslaunch.core.topology import Host

_NAMED = 3  # of the hosts that a message is about


class KeyProblem(ConfigError):
    """What is wrong with one key of the run file. ``key`` is its path."""

    def __init__(self, key: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{key}: {message}", hint=hint)
        self.key = key


@dataclass(frozen=True)
class DeviceGroup:
    """Hosts with one kind of device. ``hosts``: which, in words; empty where it is all of them.

    ``name``: as the user wrote it, where that leaves the memory open.
    """

    device: Device
    hosts: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.device} of {self.hosts}" if self.hosts else str(self.device)


def check_gpu(gpu: Sequence[str] | Mapping[str, str] | None) -> None:
    """Raise ConfigErrors for devices that are not known and for patterns that are none."""
    named = gpu.items() if isinstance(gpu, Mapping) else [("", name) for name in gpu or ()]
    problems: list[ConfigError] = []
    for pattern, name in named:
        key = f"cluster.gpu.{pattern}" if pattern else "cluster.gpu"
        try:
            lookup_device(name)
            host_matcher(pattern)
        except ConfigError as error:
            problems.append(KeyProblem(key, error.message, hint=error.hint))
    if problems:
        raise ConfigErrors(problems)


def groups_of_names(names: Sequence[str]) -> tuple[DeviceGroup, ...]:
    """Devices that the hosts have, without saying which has which."""
    return tuple(DeviceGroup(lookup_device(name), name=name) for name in names)


def groups_of_patterns(
    gpu: Mapping[str, str], listed: Sequence[Host], chosen: Sequence[Host]
) -> tuple[DeviceGroup, ...]:
    """The devices of the ``chosen`` hosts. Of several patterns that fit a host the first counts.

    Raises ConfigErrors for a pattern that decides for none of the ``listed`` hosts, and
    for chosen hosts that none fits.
    """
    left, used = [host.name for host in listed], {host.name for host in chosen}
    problems: list[ConfigError] = []
    groups = []
    for pattern, name in gpu.items():
        fits = host_matcher(pattern)
        taken, left = [host for host in left if fits(host)], [host for host in left if not fits(host)]
        if not taken:
            before = any(fits(host.name) for host in listed)
            hosts = in_words([host.name for host in listed])
            hint = (
                "a pattern before it has taken its hosts: put it first"
                if before
                else f"the hosts are {hosts}"
            )
            message = "it decides for no host of the hostfile"
            problems.append(KeyProblem(f"cluster.gpu.{pattern}", message, hint=hint))
        if here := [host for host in taken if host in used]:
            hosts = in_words(here) if set("*?") & set(pattern) else pattern
            groups.append(DeviceGroup(lookup_device(name), hosts, name))
    if bare := [host for host in left if host in used]:
        message = f"no pattern fits {in_words(bare)}"
        hint = 'add one, or "*" in the end for all other hosts'
        problems.append(KeyProblem("cluster.gpu", message, hint=hint))
    if problems:
        raise ConfigErrors(problems)
    return tuple(groups)


def groups_of_inventory(
    inventories: Mapping[str, Inventory], chosen: Sequence[Host]
) -> tuple[DeviceGroup, ...]:
    """The devices behind the slots of the ``chosen`` hosts.

    Raises ConfigError for hosts that are not in it, and for more slots than a host has devices.
    """
    hosts_of: dict[tuple[Device, float | None], list[str]] = {}
    missing = []
    for host in chosen:
        found = find_host(inventories, host.name)
        if found is None:
            missing.append(host.name)
            continue
        for device in _behind_slots(host, found):
            names = hosts_of.setdefault((device, device.memory_gib), [])
            if host.name not in names[-1:]:
                names.append(host.name)
    if missing:
        raise KeyProblem(
            "cluster.inventory",
            f"{in_words(missing)} {'is' if len(missing) == 1 else 'are'} not in it",
            hint=f"add what `dslaunch doctor --json` prints there; it has {in_words(list(inventories))}",
        )
    return tuple(DeviceGroup(device, in_words(names)) for (device, _), names in hosts_of.items())


def groups_of_any_host(inventories: Mapping[str, Inventory]) -> tuple[DeviceGroup, ...]:
    """Every device of an inventory, where which hosts the run gets is not known yet."""
    all_of = [
        Host(name=name, slots=tuple(a.id for a in found.accelerators) or ("0",))
        for name, found in inventories.items()
    ]
    return groups_of_inventory(inventories, all_of)


def in_words(hosts: Sequence[str]) -> str:
    """The first hosts by name, and how many there are besides."""
    shown = ", ".join(hosts[:_NAMED])
    return shown if len(hosts) <= _NAMED else f"{shown} and {len(hosts) - _NAMED} more"


def open_sizes(groups: Sequence[DeviceGroup]) -> list[str]:
    """A line for each device of which the smallest size is taken, or one that it is not made in."""
    lines = []
    for name in dict.fromkeys(group.name for group in groups if group.name):
        sizes, said = made_sizes(name), said_size(name)
        others = " and ".join(f"{size} GB" for size in sizes)
        if said is None and len(sizes) > 1:
            larger = f"{lookup_device(name).name}-{sizes[-1]}g"
            lines.append(f"{name} comes with {others}: {sizes[0]} GB assumed; {larger} says otherwise")
        elif said is not None and sizes and said not in sizes and "mig" not in name.lower():
            lines.append(f"{name} comes with {others}, not {said} GB: {said} GB are taken, as written")
    return lines


def _behind_slots(host: Host, found: Inventory) -> tuple[Device, ...]:
    by_id = {accelerator.id: accelerator.device for accelerator in found.accelerators}
    if not by_id:
        return (found.cpu,)
    if len(host.slots) > len(by_id):
        raise KeyProblem(
            "cluster.inventory",
            f"host {host.name} has {len(by_id)} devices there, but {len(host.slots)} slots",
            hint=f"use slots={len(by_id)}, or leave the host out",
        )
    if all(slot in by_id for slot in host.all_slots):
        return tuple(by_id[slot] for slot in host.slots)
    return tuple(by_id.values())  # slots by UUID: which is which is not known
