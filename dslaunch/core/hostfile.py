"""Hostfiles: DeepSpeed's ``host slots=N`` lines, read strictly, and host filters.

    worker-0 slots=8
    alice@worker-1:2222 slots=0,1,4    # user, ssh port, and ids in place of a count
    [fe80::1]:22 slots=2
    worker-2 slots=3,                  # one id: the comma tells it from a count

DeepSpeed 0.19.8 (launcher/runner.py, ``_parse_hostfile``) reads counts alone: it
ignores what follows ``slots=N`` on a line, where here that is an error, and takes
the first of several ids for a count. :mod:`dslaunch.core.deepspeed_hostfile` writes
what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dslaunch.core.errors import HostfileError
from dslaunch.core.topology import HOST_NAME, Host, is_address, plain_name

_HOST = re.compile(
    r"(?:(?P<user>[^@\s:\[\]]+)@)?"
    r"(?:\[(?P<v6>[0-9A-Fa-f:.%A-Za-z0-9_-]+)\]|(?P<name>" + HOST_NAME.pattern + r"))"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
# A number, or what CUDA takes for a GPU or a part of one.
_SLOT_ID = re.compile(r"[0-9]+|(?:GPU|MIG)-[A-Za-z0-9_.:/-]+|[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4,12}){1,4}")


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """The hosts of a hostfile's text, in its order. ``name`` is the file's, for messages.

    Raises HostfileError with file, line and column at the first wrong line.
    """
    hosts, errors = read_hostfile(text, name)
    if errors:
        raise errors[0]
    return hosts


def read_hostfile(text: str, name: str) -> tuple[tuple[Host, ...], tuple[HostfileError, ...]]:
    """The hosts of the lines that are right, and an error for each that is wrong."""
    hosts: list[Host] = []
    errors: list[HostfileError] = []
    known: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        content = line.split("#", 1)[0].rstrip()
        if not content.strip():
            continue
        try:
            host = _parse_line(content, f"{name}:{number}")
            _check_new(host.name, number, known, f"{name}:{number}:{_column(content)}")
        except HostfileError as error:
            errors.append(error)
        else:
            hosts.append(host)
    if not hosts and not errors:
        hint = "write one line per host: worker-0 slots=8"
        errors.append(HostfileError(f"{name}: no host in it", hint=hint))
    return tuple(hosts), tuple(errors)


def _check_new(host: str, number: int, known: dict[str, tuple[int, str]], where: str) -> None:
    """Note the name in ``known``. Raises HostfileError where the host is there already."""
    if (first := _note_name(host, number, known)) is None:
        return
    alias = f" (as {first[1]})" if first[1] != host else ""
    raise HostfileError(
        f"{where}: host {host} is given twice, first in line {first[0]}{alias}",
        hint="put all its slots in one line" if not alias else "keep one name, with all its slots",
    )


def render_hostfile(hosts: Sequence[Host]) -> str:
    """A hostfile that :func:`parse_hostfile` reads back to the same hosts.

    Slots 0 .. n-1 are written as a count, which DeepSpeed reads too.
    """
    return "".join(f"{host_text(host)} slots={_slots_text(host.slots)}\n" for host in hosts)


def select_hosts(
    hosts: Sequence[Host],
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int | None = None,
    num_gpus_per_node: int | None = None,
) -> tuple[Host, ...]:
    """The hosts and slots of a run.

    ``include`` and ``exclude`` as DeepSpeed writes them: hosts joined by ``@``,
    each with ``:`` and slot ids where not all are meant (``a@b:0,2``). Raises
    HostfileError for a host or slot that is not there, for filters that
    contradict each other, and where fewer nodes or slots are there than asked for.
    """
    if include is not None and exclude is not None:
        raise HostfileError("include and exclude are both given", hint="give one of the two")
    if (include or exclude) and num_nodes is not None:
        raise HostfileError("num_nodes cannot be combined with include or exclude", hint="leave one out")
    chosen = list(hosts)
    if include is not None:
        wanted = _parse_filter(include, chosen, "include")
        chosen = [replace(h, slots=wanted[h.name] or h.slots) for h in chosen if h.name in wanted]
    if exclude is not None:
        chosen = _without(chosen, _parse_filter(exclude, chosen, "exclude"))
    if num_nodes is not None:
        if num_nodes > len(chosen):
            raise HostfileError(
                f"num_nodes {num_nodes}, but there are {len(chosen)} hosts",
                hint=f"use num_nodes {len(chosen)}",
            )
        chosen = chosen[:num_nodes]
    if num_gpus_per_node is not None:
        chosen = [_first_slots(host, num_gpus_per_node) for host in chosen]
    if not chosen:
        raise HostfileError("no host is left after the filter", hint="loosen include or exclude")
    return tuple(chosen)


def _note_name(name: str, number: int, known: dict[str, tuple[int, str]]) -> tuple[int, str] | None:
    """Line and name of the same machine in an earlier line; otherwise ``known`` takes this one up.

    The same are names that differ in case, a short name and one with a domain, two
    spellings of an address, and the names of the machine itself. What only a name
    server knows is not asked here.
    """
    key = plain_name(name)
    label = key.split(".")[0] if not is_address(key) else key
    dotted = label != key
    same = (key, label) if dotted else (key, f"{label}.")
    first = next((known[k] for k in same if k in known), None)
    if first is None:
        known[key] = (number, name)
        if dotted:
            known.setdefault(f"{label}.", (number, name))
    return first


def _parse_line(content: str, where: str) -> Host:
    column = _column(content)
    fields = content.split()
    match = _HOST.fullmatch(fields[0])
    if match is None:
        raise HostfileError(f"{where}:{column}: {fields[0]!r} is not a host", hint=_host_hint(content))
    _check_address(match["v6"] or match["name"], bool(match["v6"]), f"{where}:{column}")
    if len(fields) == 1:
        raise HostfileError(f"{where}:{len(content) + 1}: slots are missing", hint=_slots_hint(fields[0], ""))
    slot_column = content.index(fields[1], content.index(fields[0]) + len(fields[0])) + 1
    rest = content[slot_column - 1 :]
    if not fields[1].startswith("slots="):
        raise HostfileError(
            f"{where}:{slot_column}: {fields[1]!r} is not slots=N", hint=_slots_hint(fields[0], rest)
        )
    if len(fields) > 2:
        extra = content.index(fields[2], slot_column - 1 + len(fields[1])) + 1
        raise HostfileError(
            f"{where}:{extra}: {fields[2]!r} after the slots", hint=_slots_hint(fields[0], rest)
        )
    slots = _parse_slots(fields[1].removeprefix("slots="), f"{where}:{slot_column + len('slots=')}")
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 1 <= port <= 65535:
        raise HostfileError(f"{where}:{column}: port {port} is not between 1 and 65535")
    return Host(name=match["v6"] or match["name"], slots=slots, user=match["user"], port=port)


def _check_address(name: str, bracketed: bool, where: str) -> None:
    """Raises HostfileError for what has the form of an address and is none, such as 10.0.0.300."""
    if not bracketed and not re.fullmatch(r"[0-9]+(\.[0-9]*)+", name):
        return
    if not is_address(name) or bracketed != (":" in name):
        raise HostfileError(
            f"{where}: {name} is not an IPv{6 if bracketed else 4} address",
            hint="brackets are for IPv6 addresses alone" if bracketed else "write four numbers from 0 to 255",
        )


def _host_hint(content: str) -> str:
    """What to write in place of a field that is no host."""
    field = content.split()[0]
    if field.startswith("slots="):
        return f"write the host's name first: worker-0 {field}"
    if field.startswith(("<", "{", "$")):
        return f"write the name of a host in place of {field}"
    if field.count(":") > 1 and is_address(field):
        return f"write an IPv6 address in brackets: [{field}] slots={_count(content[len(field) :])}"
    if "," in field:
        name, _, rest = field.partition(",")
        return f"write one host a line: {name} slots={_count(rest + content.split(field, 1)[1])}"
    return "write host, user@host, host:port or [IPv6]:port"


def _slots_hint(host: str, rest: str) -> str:
    """The line as it is most likely meant: its host with the first number behind it."""
    name, colon, number = host.rpartition(":")
    if not rest and colon and number.isdecimal() and int(number) <= 16:  # no port is that low
        return f"write {name} slots={number}"
    return f"write {host} slots={_count(rest)}"


def _count(text: str) -> str:
    match = re.search(r"[0-9]+(?:,[0-9]+)*", text)
    return match.group() if match and match.group() != "0" else "8"


def _parse_slots(text: str, where: str) -> tuple[str, ...]:
    if re.fullmatch(r"[0-9]+", text):
        count = int(text) if len(text) < 10 else -1  # Python turns no text of 5,000 digits into a number
        if not 0 < count <= 4096:
            raise HostfileError(
                f"{where}: slots={text}: a host has between 1 and 4096", hint="remove the line, or fix it"
            )
        return tuple(map(str, range(count)))
    ids = text.removesuffix(",").split(",") if text.count(",") == 1 else text.split(",")
    for slot in ids:
        if glued := re.fullmatch(r"([0-9]+)[A-Za-z_-].*", slot):
            raise HostfileError(
                f"{where}: slots={text}: {slot!r} is neither a number nor the id of a device",
                hint=f"write slots={glued[1]}",
            )
        if not _SLOT_ID.fullmatch(slot):
            shown = f"{slot!r} is neither a number nor the id of a device" if slot else "an empty slot id"
            raise HostfileError(
                f"{where}: slots={text}: {shown}",
                hint="write a count or ids: slots=4, slots=0,2 or, for one id, slots=3,",
            )
    if len(set(ids)) != len(ids):
        twice = next(s for s in ids if ids.count(s) > 1)
        raise HostfileError(f"{where}: slots={text}: slot {twice} is given twice")
    return tuple(ids)


def _column(content: str) -> int:
    return len(content) - len(content.lstrip()) + 1


def host_text(host: Host) -> str:
    """A host as a hostfile has it: ``alice@worker-1:2222``, ``[fe80::1]``."""
    user, port = f"{host.user}@" if host.user else "", f":{host.port}" if host.port else ""
    return user + _bracketed(host.name) + port


def filter_text(names: Iterable[str]) -> str:
    """All slots of these hosts, as ``--include`` and ``--exclude`` have them: ``worker-1@[fe80::1]``."""
    return "@".join(map(_bracketed, names))


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _slots_text(slots: tuple[str, ...]) -> str:
    if slots == tuple(map(str, range(len(slots)))):
        return str(len(slots))
    # One numeric id alone would read back as a count.
    return ",".join(slots) + ("," if len(slots) == 1 and slots[0].isdecimal() else "")


def _parse_filter(text: str, hosts: Sequence[Host], what: str) -> dict[str, tuple[str, ...]]:
    """Host name -> slot ids; an empty tuple means all of them."""
    by_name = {host.name: host for host in hosts}
    wanted: dict[str, tuple[str, ...]] = {}
    for part in text.split("@"):
        match = re.fullmatch(r"\s*(?:\[([^\]]+)\]|([^:\s]+))(?::(\S+))?\s*", part)
        if match is None:
            raise HostfileError(f"{what} {text!r}: {part!r} is not host or host:0,1", hint="write a@b:0,2")
        name = match[1] or match[2]
        if name not in by_name:
            raise HostfileError(f"{what} {text!r}: there is no host {name}", hint=_filter_hint(part, by_name))
        ids = tuple(match[3].split(",")) if match[3] else ()
        for slot in ids:
            if slot not in by_name[name].slots:
                has = ", ".join(by_name[name].slots)
                raise HostfileError(
                    f"{what} {text!r}: host {name} has no slot {slot!r}", hint=f"it has {has}"
                )
        if name in wanted and (not ids or not wanted[name]):
            raise HostfileError(f"{what} {text!r}: host {name} is given twice")
        merged = (*wanted.get(name, ()), *ids)
        wanted[name] = tuple(s for s in by_name[name].slots if s in merged)
    return wanted


def _filter_hint(part: str, names: Iterable[str]) -> str:
    """What to write in place of a host that is not there."""
    if is_address(part.strip()) and ":" in part:
        return f"write an IPv6 address in brackets: [{part.strip()}]"
    import difflib

    near = difflib.get_close_matches(part.strip().strip("[]"), names, n=1)
    return f"did you mean {_bracketed(near[0])}?" if near else f"the hosts are: {', '.join([*names][:10])}"


def _without(hosts: Sequence[Host], unwanted: dict[str, tuple[str, ...]]) -> list[Host]:
    left = []
    for host in hosts:
        if host.name not in unwanted:
            left.append(host)
        elif unwanted[host.name]:
            slots = tuple(s for s in host.slots if s not in unwanted[host.name])
            if slots:
                left.append(replace(host, slots=slots))
    return left


def _first_slots(host: Host, count: int) -> Host:
    if count > len(host.slots):
        raise HostfileError(
            f"num_gpus_per_node {count}, but host {host.name} has {len(host.slots)} slots",
            hint=f"use num_gpus_per_node {len(host.slots)}, or leave the host out",
        )
    return replace(host, slots=host.slots[:count])
