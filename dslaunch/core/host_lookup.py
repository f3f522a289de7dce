"""One host under two names: a name and an address, which only a name server can tell, or two of ours."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from dslaunch.core.errors import HostfileError
from dslaunch.core.topology import Host, is_address, is_this_machine, plain_name

_THREADS = 16
_TIMEOUT_S = 2.0

Lookup = Callable[[Collection[str]], Mapping[str, Collection[str]]]


def check_named_once(hosts: Sequence[Host], name: str, lookup: Lookup | None = None) -> None:
    """Raise HostfileError where a host of the hostfile ``name`` stands there as a name and as an address.

    Nothing is looked up where names and addresses are not mixed. Names that a name server
    does not answer for in time are let pass. What only the hosts themselves can tell (an alias of
    somebody's ssh configuration) their agents do, before ranks start.
    """
    ours = [host.name for host in hosts if is_this_machine(host.name, look_up=is_address(host.name))]
    if len(ours) > 1:
        raise HostfileError(
            f"{name}: {ours[0]} and {ours[1]} are one host: this machine",
            hint="keep one of the two lines, with all its slots",
        )
    addresses = {plain_name(host.name): host.name for host in hosts if is_address(host.name)}
    names = [host.name for host in hosts if not is_address(host.name)]
    if not addresses or not names:
        return
    for host, found in (lookup or addresses_of)(names).items():
        for address in found:
            if (listed := addresses.get(plain_name(address))) is not None:
                raise HostfileError(
                    f"{name}: {host} and {listed} are one host: {host} has that address",
                    hint="keep one of the two lines, with all its slots",
                )


def addresses_of(names: Collection[str], timeout_s: float = _TIMEOUT_S) -> dict[str, tuple[str, ...]]:
    """Name -> addresses, of those names that are resolved within ``timeout_s`` seconds."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[str, tuple[str, ...]]] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    # Daemons: a name server that never answers must not hold up the end of the process.
    for _ in range(min(_THREADS, len(names))):
        threading.Thread(target=_resolve, args=(waiting, answers), daemon=True).start()
    end = time.monotonic() + timeout_s
    found: dict[str, tuple[str, ...]] = {}
    while len(found) < len(names) and (left := end - time.monotonic()) > 0:
        try:
            name, addresses = answers.get(timeout=left)
        except queue.Empty:
            break
        found[name] = addresses
    return found


def _resolve(
    waiting: queue.SimpleQueue[str], answers: queue.SimpleQueue[tuple[str, tuple[str, ...]]]
) -> None:
    import socket

    while True:
        try:
            name = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):
            found = []
        answers.put((name, tuple({str(address[0]) for _, _, _, _, address in found})))
