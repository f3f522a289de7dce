"""Starts an agent by pdsh, which hands no stdin on, and passes on what the supervisor and the agent say.

ONE file, standard library only; runs on the launcher's machine, one for each host. Its stdin is what the
supervisor sends. The first line is ``{"command": [...], "folder": "...", "host": "...", "relay": "..."}``,
the next two are the agent and its orders. These go into a file in ``folder`` that only its owner can read
and that the host sees too; its path in hex takes the place of PATH_IN_HEX in ``command``. What runs there
takes the file away and connects back, and that connection then carries all else.
"""

from __future__ import annotations

import ctypes
import hmac
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

HELLO_S = 5.0  # for one that connects to say the token
LINGER_S = 2.0  # for pdsh to end when the agent has
LOOK_S = 0.2
PATH_IN_HEX = "PATH_IN_HEX"


def write_orders(folder: str, lines: list[bytes]) -> bytes:
    path = os.path.join(os.fsencode(folder), b".orders-" + secrets.token_hex(8).encode())
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as stream:
        stream.write(b"".join(lines))
        stream.flush()
        os.fsync(stream.fileno())
    return path


def own_addresses(host: str) -> list[str]:
    """At which the host may find us: our end of the way to it, and what our own name leads to."""
    found = []
    for name in (host, socket.gethostname()):
        try:
            told = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):
            continue
        for family, kind, protocol, _, target in told:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(target)  # no packet is sent
                    found.append(probe.getsockname()[0])
            except OSError:
                continue
    return list(dict.fromkeys(found))


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """pdsh, which ends when we do; what it says is for people."""

    def before_exec() -> None:
        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGTERM))  # PR_SET_PDEATHSIG

    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=before_exec)


def wait_for_call(
    server: socket.socket, token: bytes, process: subprocess.Popen[bytes]
) -> socket.socket | None:
    """The connection that says the token; None where pdsh ended, or our stdin did, before there was one."""
    while process.poll() is None:
        ready, _, _ = select.select([server.fileno(), 0], [], [], LOOK_S)
        if 0 in ready:  # nothing is sent before the agent has said something: it is the end
            return None
        if server.fileno() in ready:
            link = server.accept()[0]
            link.settimeout(HELLO_S)
            try:
                with link.makefile("rb", 0) as stream:
                    said = stream.readline(100)
            except OSError:
                said = b""
            if hmac.compare_digest(said, token + b"\n"):
                link.settimeout(None)
                return link
            link.close()
    return None


def copy(source: int, target: int) -> None:
    try:
        while data := os.read(source, 65536):
            while data:
                data = data[os.write(target, data) :]
    except OSError:
        pass


def send_stdin(link: socket.socket) -> None:
    copy(0, link.fileno())
    try:
        link.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def main() -> int:
    stdin = open(0, "rb", 0, closefd=False)  # noqa: SIM115
    request: dict[str, Any] = json.loads(stdin.readline())
    program, orders = stdin.readline(), stdin.readline()
    server = (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=8)
        if (socket.has_dualstack_ipv6())
        else socket.create_server(("", 0), backlog=8)
    )
    token = secrets.token_hex(32)
    place = {"addresses": own_addresses(request["host"]), "port": server.getsockname()[1], "token": token}
    lines = [request["relay"].encode(), json.dumps(place).encode("ascii") + b"\n", program, orders]
    path = write_orders(request["folder"], lines)
    try:
        process = start([word.replace(PATH_IN_HEX, path.hex()) for word in request["command"]])
        link = wait_for_call(server, token.encode("ascii"), process)
    finally:
        if os.path.exists(path):
            os.unlink(path)
    server.close()
    if link is not None:
        threading.Thread(target=send_stdin, args=(link,), daemon=True).start()
        copy(link.fileno(), 1)
    return end(process)


def end(process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + LINGER_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if process.poll() is None:
        process.terminate()
    return process.wait()


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main() & 0xFF)  # a thread may be reading
