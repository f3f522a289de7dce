"""What accelerators, CPU and memory each host has, as JSON that ``dslaunch doctor`` prints.

    {"node-1": {"accelerators": [{"name": "NVIDIA A100-SXM4-80GB", "memory_gib": 78.8,
                                  "compute_capability": "8.0"}, ...],
                "cpu": {"fp16": "no", "bf16": "slow"}, "ram_gib": 503.5}}

What ``dslaunch doctor --json`` prints is one too: this stands under ``inventory`` there. The
lines of several nodes, one after the other in a file, are an inventory of them all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dslaunch.core.devices import (
    CPU_NAME,
    USABLE_SHARE,
    Accelerator,
    Device,
    Inventory,
    named_device,
    probe_inventory,
)
from dslaunch.core.errors import ConfigError

_HOST_KEYS = ("accelerators", "cpu", "ram_gib")
_ACCELERATOR_KEYS = ("name", "memory_gib", "compute_capability", "arch")
_SUPPORT = ("yes", "slow", "no")
NVIDIA_SMI = [
    "nvidia-smi", "--query-gpu=index,name,memory.total,compute_cap,driver_version",
    "--format=csv,noheader,nounits",
]  # fmt: skip
_SMI_LINE = re.compile(r"\s*(\d+), (.+), (\d+|\[.*\]), (\d+)\.(\d)(?:, (\S*))?\s*")
_HOW_TO_MAKE_ONE = "`dslaunch doctor --json` prints one"


def parse_inventory(text: str, name: str) -> dict[str, Inventory]:
    """Host name -> what it has. ``name`` is the file's, for messages.

    Raises ConfigError where the text is no JSON, or says something else than the above.
    """
    decoder, at, hosts = json.JSONDecoder(object_pairs_hook=_no_duplicates), 0, {}
    text = text.removeprefix("\ufeff").rstrip()
    while at < len(text):
        at += len(text[at:]) - len(text[at:].lstrip())
        line = text.count("\n", 0, at) + 1
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{name}:{error.lineno}:{error.colno}: not JSON: {error.msg}", hint=_HOW_TO_MAKE_ONE
            ) from None
        except _GivenTwice as error:
            raise ConfigError(f"{name}:{line}: {error}", hint="keep one of the two") from None
        except (ValueError, RecursionError):  # numbers of thousands of digits, brackets as deep
            raise ConfigError(
                f"{name}:{line}: too long or too deep for JSON", hint=_HOW_TO_MAKE_ONE
            ) from None
        if isinstance(value, dict) and {"schema_version", "inventory"} <= set(value):
            value = value["inventory"]
        for host, entry in _mapping(value, f"{name}:{line}", "host names").items():
            if host in hosts:
                raise ConfigError(f"{name}:{line}: host {host} is given twice", hint="keep one of the two")
            hosts[host] = _parse_host(entry, f"{name}:{line}: {host}")
    if not hosts:
        raise ConfigError(f"{name}: no host in it", hint=_HOW_TO_MAKE_ONE)
    return hosts


def find_host(inventories: Mapping[str, Inventory], name: str) -> Inventory | None:
    """What a host has; ``node-1`` and ``node-1.cluster.org`` are one host where no other is alike."""
    if name in inventories:
        return inventories[name]
    short = name.partition(".")[0]
    alike = [key for key in inventories if key.partition(".")[0] == short]
    return inventories[alike[0]] if len(alike) == 1 and not short.isdecimal() else None


def inventory_json(inventory: Inventory) -> dict[str, Any]:
    """What :func:`parse_inventory` reads back for one host."""
    accelerators = []
    for accelerator in inventory.accelerators:
        device = accelerator.device
        entry: dict[str, Any] = {"name": device.name}
        if device.memory_gib is not None:
            entry["memory_gib"] = device.memory_gib
        if match := re.fullmatch(r"sm_(\d+)(\d)", device.arch):
            entry["compute_capability"] = f"{match[1]}.{match[2]}"
        elif device.arch:
            entry["arch"] = device.arch
        accelerators.append(entry)
    cpu = {"fp16": inventory.cpu.fp16, "bf16": inventory.cpu.bf16}
    return {"accelerators": accelerators, "cpu": cpu, "ram_gib": inventory.ram_gib}


def inventory_of(environ: Mapping[str, str], smi: str, *, root: Path) -> Inventory:
    """What the machine has that ``root`` has the files of: accelerators with their real memory where
    nvidia-smi tells it. ``smi`` is what NVIDIA_SMI printed there, ``environ`` hides devices.
    """
    found = replace(probe_inventory(environ, root=root), ram_gib=_ram_gib(root))
    told = () if _hides_some(environ) else _parse_nvidia_smi(smi)
    return replace(found, accelerators=told) if told else found


def driver_of(version_file: str, smi: str) -> str | None:
    """The version of NVIDIA's driver, from /proc/driver/nvidia/version or what NVIDIA_SMI printed."""
    if match := re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]+)\s", version_file):
        return match[1]
    match = _SMI_LINE.match(smi)
    return match[6] if match else None


def _hides_some(environ: Mapping[str, str]) -> bool:
    """Whether not all that nvidia-smi lists is to be used."""
    return environ.get("DS_ACCELERATOR") == "cpu" or environ.get("CUDA_VISIBLE_DEVICES") is not None


class _GivenTwice(ValueError):
    """A key that stands twice in one mapping."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _GivenTwice(f"{next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return found


def _parse_host(entry: Any, where: str) -> Inventory:
    entry = _mapping(entry, where, "accelerators, cpu and ram_gib", _HOST_KEYS)
    listed = entry.get("accelerators")
    if not isinstance(listed, list):
        raise ConfigError(f"{where}: accelerators is no list", hint="write [] for a node without any")
    accelerators = tuple(
        Accelerator(str(i), _parse_accelerator(item, f"{where}: accelerators[{i}]"))
        for i, item in enumerate(listed)
    )
    cpu = _mapping(entry.get("cpu", {}), f"{where}: cpu", "fp16 and bf16", ("fp16", "bf16"))
    for key, value in cpu.items():
        if value not in _SUPPORT:
            raise ConfigError(f"{where}: cpu.{key} is {value!r}", hint=f"write one of {', '.join(_SUPPORT)}")
    ram = _positive(entry.get("ram_gib"), f"{where}: ram_gib")
    device = Device(CPU_NAME, "", cpu.get("fp16", "no"), cpu.get("bf16", "slow"))
    return Inventory(accelerators, device, ram_gib=ram)


def _parse_accelerator(item: Any, where: str) -> Device:
    item = _mapping(item, where, "name, memory_gib and compute_capability", _ACCELERATOR_KEYS)
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: name is missing", hint='write {"name": "a100-80g"}')
    memory = _positive(item.get("memory_gib"), f"{where}.memory_gib")
    capability, arch = item.get("compute_capability"), item.get("arch", "")
    if capability is not None:
        match = re.fullmatch(r"(\d{1,2})\.(\d)", str(capability))
        if match is None:
            raise ConfigError(f"{where}.compute_capability is {capability!r}", hint='write it as "8.0"')
        arch = f"sm_{match[1]}{match[2]}"
    device = named_device(name, str(arch))
    return device if memory is None else replace(device, memory_gib=memory)


def _mapping(value: Any, where: str, what: str, known: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {json.dumps(value)[:40]} is no mapping of {what}", hint=_HOW_TO_MAKE_ONE)
    for key in value:
        if known is not None and key not in known:
            raise ConfigError(f"{where}: unknown key {key}", hint=f"keys: {', '.join(known)}")
    return value


def _positive(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**40:
        raise ConfigError(f"{where} is {json.dumps(value)}", hint="write a number of GiB, or leave it out")
    return float(value)


def _parse_nvidia_smi(text: str) -> tuple[Accelerator, ...]:
    """Empty where it says something else than a table."""
    found = []
    for line in text.splitlines():
        match = _SMI_LINE.fullmatch(line)
        if match is None:
            return ()
        device = named_device(match[2], f"sm_{match[4]}{match[5]}")
        if match[3].isdecimal():
            device = replace(device, memory_gib=round(int(match[3]) / 1024 * USABLE_SHARE, 2))
        found.append(Accelerator(match[1], device))
    return tuple(found)


def _ram_gib(root: Path) -> float | None:
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    match = re.search(r"^MemTotal:\s+(\d+) kB$", text, re.MULTILINE)
    return round(int(match[1]) / 2**20, 1) if match else None
