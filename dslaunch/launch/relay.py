"""Runs a program out of reach of what started us. Stands between MPICH, or pdsh, and the agent.

ONE file, standard library only, Python 3.8 or newer: it is the first line on the stdin of a process
elsewhere (see carried.py), and travels as text. Two lines follow, the program and what it reads first;
whoever sends them keeps to ROOM bytes and sends more when told ``{"event": "room", "bytes": n}``.

Under pdsh, which hands no stdin on, we are the first line of a file instead: the global ``FILE`` is open
behind it. Its second line says whom to connect to, ``{"addresses": [...], "port": n, "token": "..."}``, and
that connection, where we say the token first, is then stdin and stdout.

The program runs in a session of its own, with our stdout, and is given all that comes on stdin
after that. If we are killed it sees the end of its stdin. Signals that ask it to stop, and USR1 and
USR2, are passed on; its exit code is ours.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import sys
import threading
import zlib
from typing import Any, BinaryIO

ROOM = 16384  # bytes of stdin that may be on their way before the program runs: the least that a pipe holds
BOUNDLESS = 1 << 60  # from then on we read as it comes
DIAL_S = 10.0
FILE: BinaryIO | None = globals().get("FILE")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def make_room(num_bytes: int) -> None:
    os.write(1, json.dumps({"event": "room", "bytes": num_bytes}).encode("ascii") + b"\n")


def read_two_lines() -> bytes:
    """All of stdin up to the end of the second line; what comes with it is kept."""
    data = b""
    while data.count(b"\n") < 2:
        more = os.read(0, ROOM)
        if not more:
            raise SystemExit("dslaunch relay: stdin ended before the program came")
        data += more
        make_room(len(more))
    make_room(BOUNDLESS)
    return data


def dial(where: dict[str, Any]) -> None:
    """Make a connection to whoever wrote the file our stdin and stdout."""
    seen_from = os.environ.get("SSH_CLIENT", "").split()[:1]  # where ssh came from
    problem = "no address"
    for address in seen_from + where["addresses"]:
        try:
            link = socket.create_connection((address, where["port"]), DIAL_S)
        except OSError as error:
            problem = f"{address} port {where['port']}: {error.strerror or error}"
            continue
        link.settimeout(None)
        link.sendall(where["token"].encode("ascii") + b"\n")
        os.dup2(link.fileno(), 0)
        os.dup2(link.fileno(), 1)
        link.close()
        return
    raise SystemExit(
        f"cannot connect back to the launcher at {problem}: --via pdsh needs that; --via ssh does not"
    )


def pump(data: bytes, to: int) -> None:
    """``data`` and then stdin, until its end or until nobody reads."""
    try:
        while data:
            data = data[os.write(to, data) :]
            if not data:
                # The program may have made its stdout, and so a socket that is both, not block.
                select.select([0], [], [])
                data = os.read(0, 65536)
    except OSError:
        pass
    os.close(to)


def become_program(stdin: int) -> None:
    """In the child. The program comes on its stdin, read byte by byte to the end of the line."""
    os.setsid()
    os.dup2(stdin, 0)
    os.close(stdin)
    with open(0, "rb", 0, closefd=False) as stream:
        text = zlib.decompress(base64.b64decode(stream.readline()))
    exec(compile(text, "agent.py", "exec"), {"__name__": "__main__"})


def main() -> int:
    if FILE is None:
        os.write(1, b"\n")  # ends what a login script may have left unfinished there
        data = read_two_lines()
    else:
        where = json.loads(FILE.readline())
        data = FILE.read()
        dial(where)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        become_program(read_end)
        sys.exit(0)
    os.close(read_end)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    threading.Thread(target=pump, args=(data, write_end), daemon=True).start()
    status = os.waitpid(child, 0)[1]
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


if __name__ == "__main__":
    os._exit(main())  # the thread may be reading
