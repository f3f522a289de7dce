"""The node agent: starts the ranks of one host, watches them, leaves nothing behind.

ONE file, standard library only, Python 3.8 or newer, Linux: it is run by path
(``python -I -S agent.py``) or sent over stdin to a host that has no dslaunch.
That it must travel alone is why it is longer than our other files. From top to bottom: what a rank's
output passes through (Log, Stream, Rank), the Agent with its loop (starting, reading, ends), then what is
asked of the host (the run directory, ports and addresses, limits, devices, programs and processes), the
keeper, and how it all begins (``main``).

Its stdin is JSON lines. The first is the orders::

    {"protocol": PROTOCOL, "argv": [...], "cwd": "...", "env": {...}, "host": "...",
     "visible_devices": {"slots": ["0"], "of": ["0", "1"], "variable": "ZE_AFFINITY_MASK" | null} | null,
     "witness": {"path": "...", "text": "...", "needed": true} | null, "auto_threads": true,
     "cache": {"path": "...", "needed": true}, "packages": ["torch", ...],
     "ops_cpu": "1a2b3c4d" | null, "failure_grace_s": 5.0, "checkpoint_grace_s": 120.0,
     "host_timeout_s": 30.0 | null, "meet": {"peers": ["b"], "addr": "..." | null,
              "port": 29500 | null, "leased": false, "seed": "..." | null} | null,
     "ranks": [{"rank": 0, "env": {...}, "args": [...], "log": "...", "show": "all" | "errors"}]}

then commands: ``{"command": "reach", "addr": "...", "port": n}``, ``{"command":
"start", "env": {...}, "net": true, "time": "2026-01-31T12:00:00Z"}``, ``{"command": "stop", "grace_s": 5}``,
``{"command": "kill"}``, ``{"command": "signal", "name": "USR1"}``, ``{"command":
"ack", "bytes": n}``, ``{"command": "beat"}``. End of stdin, or no command for
``host_timeout_s``, means that the supervisor is gone: the ranks are stopped.
``meet`` is for the host of rank 0: it says at which address and port ranks of
other hosts find it. ``witness`` is a file that a shared run directory shows; where it,
or a cache that can be written, is ``needed``, nothing starts without.

Its stdout is JSON lines, one event each: ``hello``, ``refused`` (nothing was
started), ``ready``, ``reached``, ``start``, ``output``, ``error_line``, ``exit``,
``log_error``, ``stop_asked`` (by a signal to this process), ``leftover``, ``beat``,
``done``. Text holds non-UTF-8 bytes as lone surrogates (surrogateescape, escaped
by JSON), so every byte arrives as it was.

USR1 and USR2 to this process go to the ranks: Slurm's ``--signal`` sends them here.

What is killed is only ever a child of this process: a rank that has not been
reaped yet (with its process group, whose number is then still taken), or a
process that lost its parent and was handed to us, their subreaper, by the kernel.
Where this process is killed, the kernel kills the ranks and hands what they had started to our parent,
the keeper, which does nothing but wait and then ends it. Where the keeper is killed, we stop the ranks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import glob
import hashlib
import json
import os
import random
import re
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

PROTOCOL = 5
CHUNK = 65536
WINDOW = 1 << 20  # bytes of shown output that may be on their way; then the rank's pipe is left to fill
TAIL = 16384  # bytes of stderr kept for the report of a failure
TAIL_LINES = 30
LAST = 300  # bytes of the line that a rank wrote last
FLUSH_S = 0.2  # an unfinished line (a prompt, a progress bar) is logged after this long
TICK_S = 0.05
START_S = 0.05  # ranks are started for so long at a time
SETTLE_S = 1.0  # helpers of a rank that ended well may take this long to end by themselves
UNKILLABLE_S = 10.0
REACH_S = 10.0  # for a connection to the host of rank 0
MOST_LOCKS = 20  # of a cache of ops are looked at
LOWEST_PORT = 15000  # below are ports that sites give to services
ERROR_LINE = re.compile(rb"^(\w+\.)*\w*(Error|Exception|Interrupt)\b|\b(ERROR|CRITICAL|FATAL)\b")
ESCAPE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\].{0,200}?(\x07|\x1b\\))")  # a colour, a title
CUDA_VARIABLE = b"CUDA_VISIBLE_DEVICES"
# AMD's runtime heeds one of the first two, the first first; they count among what the third leaves.
AMD_VARIABLES = (b"HIP_VISIBLE_DEVICES", CUDA_VARIABLE, b"ROCR_VISIBLE_DEVICES")
SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh", "busybox"}
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *PASSED_ON)
REFUSED = 3  # exit code where nothing was started
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def to_bytes(value: str) -> bytes:
    return value.encode("utf-8", "surrogateescape")


def to_text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


# --- the parts of an agent --------------------------------------------------------------------------


class Refusal(Exception):
    """The orders cannot be carried out; nothing was started."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Log:
    """A rank's log. A full disk loses lines, never stops the rank; the gap is noted when space returns."""

    def __init__(self, path: bytes, on_error: Callable[[str], None]) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.is_used = os.fstat(self.fd).st_size > 0  # by an earlier start of the run
        self.on_error = on_error
        self.lost = 0

    def mark_start(self, when: str) -> None:
        if self.is_used:
            self.write(to_bytes(f"\n[dslaunch: started anew {when}]\n"))

    def write(self, data: bytes) -> None:
        if self.lost:
            note = b"[dslaunch: %d bytes could not be written here]\n" % self.lost
            if self._write(note) < len(note):
                self.lost += len(data)
                return
            self.lost = 0
        self.lost += len(data) - self._write(data)

    def _write(self, data: bytes) -> int:
        done = 0
        while done < len(data):
            try:
                done += os.write(self.fd, data[done:])
            except OSError as error:
                if not self.lost:
                    self.on_error(error.strerror or str(error))
                break
        return done


class Lease:
    """A port for the ranks to meet at that no other launch on this machine picks while this lives.

    The reservation is an abstract Unix socket, which the kernel frees however this
    process ends. Until the ranks start, the port itself can be listened on, for others to try.
    """

    def __init__(self, port: int | None, *, leased: bool = True, seed: str | None = None) -> None:
        self.port = port or 0
        self.reservation = self.server = None  # type: socket.socket | None
        if port is None:
            self.port, self.reservation = find_port(seed)
        elif not leased:
            self.reservation = reserve_port(port)
            if self.reservation is None or not is_free_port(port):
                raise Refusal(f"master_port {port} is taken{holder_text(port)}",
                              "leave master_port out: a free one is found")  # fmt: skip

    def listen(self, ipv6: bool) -> None:
        self.server = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_STREAM)
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.server.bind(("::" if ipv6 else "0.0.0.0", self.port))
            self.server.listen(4096)  # the kernel shakes hands; nobody needs to accept
        except OSError as error:
            raise Refusal(f"cannot listen on port {self.port}: {error.strerror}",
                          "give another --master-port") from None  # fmt: skip

    def stop_listening(self) -> None:
        if self.server is not None:
            self.server.close()


class Stream:
    """One pipe of a rank: read in chunks, passed on to ``on_lines`` in whole lines."""

    def __init__(self, rank: Rank, name: str, fd: int, on_lines: Callable[[Stream, bytes], None]) -> None:
        self.rank, self.name, self.fd, self.on_lines = rank, name, fd, on_lines
        self.pending = b""
        self.pending_since = 0.0
        os.set_blocking(fd, False)

    def feed(self, data: bytes, now: float) -> None:
        if not self.pending:
            self.pending_since = now
        data = self.pending + data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - cut > CHUNK:
            cut = len(data)
        self.pending = data[cut:]
        if cut:
            self.pending_since = now
            self.on_lines(self, data[:cut])

    def flush(self) -> None:
        if self.pending:
            data, self.pending = self.pending, b""
            self.on_lines(self, data)


class Rank:
    """One rank: its orders, its process, what is known of it."""

    def __init__(self, orders: dict[str, Any], log: Log) -> None:
        self.number: int = orders["rank"]
        self.show_all: bool = orders["show"] == "all"
        self.env = {to_bytes(k): to_bytes(v) for k, v in orders["env"].items()}
        self.args = [to_bytes(word) for word in orders.get("args", ())]
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.streams: list[Stream] = []
        self.alive = False
        self.tail = b""
        self.last = b""  # the lines that came last, of either stream
        self.state = ""  # of its process when it was told to stop, as the kernel writes it
        self.error_line = b""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


class Agent:
    """The state of one host's ranks and the loop that serves them."""

    def __init__(self, orders: dict[str, Any], rest: bytes) -> None:
        self.orders = orders
        self.inbox = rest
        self.outbox = bytearray()
        self.supervisor_gone = False
        self.unacked = 0
        self.dropped = 0
        self.ranks: list[Rank] = []
        self.to_start: deque[Rank] = deque()
        self.time_of_start = ""
        self.before_exec = dying_with_us()
        self.selector = selectors.DefaultSelector()
        self.stopping = False
        self.stop_signal = 0  # one that somebody sent to this process
        self.to_pass_on: list[int] = []
        self.wait_for_shells = False  # a stopped shell's own child may be writing a checkpoint
        self.deadline = float("inf")
        self.settle_at = self.kill_at = self.give_up_at = float("inf")
        self.asked: set[int] = set()
        self.left: list[int] = []
        self.prepared: tuple[bytes, dict[bytes, bytes], bytes] | None = None
        self.facts: dict[str, Any] = {}  # for ``ready``
        self.lease = Lease(0)  # none as yet
        self.started = self.refused = False
        self.host_timeout_s: float = orders["host_timeout_s"] or float("inf")
        self.heard_at = self.beat_at = time.monotonic()
        self.keeper = os.getppid()
        self.oom_kills_before = oom_kills()

    # --- what is said -------------------------------------------------------------------------

    def send(self, event: str, **fields: Any) -> None:
        if not self.supervisor_gone:
            fields["event"] = event
            self.outbox += json.dumps(fields).encode("ascii") + b"\n"
            self.write_out()

    def write_out(self) -> None:
        try:
            while self.outbox:
                del self.outbox[: os.write(1, self.outbox[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more
            self.supervisor_gone = True
            self.outbox.clear()
            self.begin_stop(self.orders["failure_grace_s"])

    def forward(self, stream: Stream, data: bytes) -> None:
        rank = stream.rank
        if not rank.show_all or self.supervisor_gone:
            return
        if self.stopping and self.unacked > WINDOW:
            self.dropped += len(data)  # a stopping rank must not wait for a reader
            return
        self.unacked += len(data)
        self.send("output", rank=rank.number, stream=stream.name, data=to_text(data))

    # --- starting -----------------------------------------------------------------------------

    def prepare(self) -> tuple[bytes, dict[bytes, bytes], bytes]:
        """Everything that can be wrong is found before the first rank starts."""
        orders = self.orders
        env = dict(os.environb)
        env.update((to_bytes(k), to_bytes(v)) for k, v in orders["env"].items())
        if orders["auto_threads"] and b"OMP_NUM_THREADS" not in env:
            env[b"OMP_NUM_THREADS"] = b"%d" % max(1, usable_cores() // len(orders["ranks"]))
        if orders["ops_cpu"] is not None and orders["ops_cpu"] != cpu_key():  # not the launcher's
            env[b"TORCH_EXTENSIONS_DIR"] += b"-" + cpu_key().encode()
        if orders["visible_devices"] is not None:
            wanted = orders["visible_devices"]
            name = to_bytes(wanted["variable"]) if wanted["variable"] else device_variable(env)
            if env.get(name) is None and not wanted["variable"]:
                check_gpus(wanted["slots"])
            env[name] = to_bytes(visible_devices(wanted["slots"], wanted["of"], env.get(name)))
        self.facts = self.look_around(env)
        cwd = to_bytes(orders["cwd"])
        if not os.path.isdir(cwd):
            raise Refusal(
                f"no working directory {to_text(cwd)}",
                "create it, or start where all hosts have it (in a run file: launch.cwd)",
            )
        program = find_program(to_bytes(orders["argv"][0]), env.get(b"PATH", os.defpath.encode()), cwd)
        for item in orders["ranks"]:
            try:
                log = Log(to_bytes(item["log"]), functools.partial(self.log_error, item["rank"]))
            except OSError as error:
                raise Refusal(
                    f"cannot write {item['log']}: {error.strerror}", "give another --run-dir"
                ) from None
            self.ranks.append(Rank(item, log))
        return program, env, cwd

    def look_around(self, env: dict[bytes, bytes]) -> dict[str, Any]:
        """What this host is like; raises Refusal where the ranks cannot do without what it lacks."""
        witness, cache = self.orders["witness"], self.orders["cache"]
        unseen = witness_problem(witness)
        if unseen is not None and witness["needed"]:
            raise Refusal(unseen, "put --run-dir on a file system that all hosts share, and their containers")
        ops = to_text(env.get(b"TORCH_EXTENSIONS_DIR") or b"~/.cache/torch_extensions")
        found = look_around(cache["path"], ops)
        problem = found["cache"]["problem"]
        if problem is not None and cache["needed"]:
            raise Refusal(f"cannot write the cache {found['cache']['path']}: {problem}",
                          "set DSLAUNCH_CACHE to a directory that can be written")  # fmt: skip
        return {"unseen": unseen, "surroundings": found}

    def meet(self) -> dict[str, Any]:
        """Where ranks of other hosts find rank 0, if it runs here: address and port."""
        wanted = self.orders["meet"]
        if wanted is None:
            return {}
        self.lease = Lease(wanted["port"], leased=wanted["leased"], seed=wanted["seed"])
        if not wanted["peers"]:
            return {"addr": wanted["addr"] or "127.0.0.1", "port": self.lease.port}
        address = wanted["addr"] or own_address(wanted["peers"])
        self.lease.listen(":" in address)
        return {"addr": address, "port": self.lease.port}

    def log_error(self, rank: int, why: str) -> None:
        self.send("log_error", rank=rank, message=why)

    def start_some(self) -> None:
        """Start ranks for a moment. A cancel, a rank's end and output are seen to before the next ones."""
        until = time.monotonic() + START_S
        try:
            while self.to_start and time.monotonic() < until:
                self.start(self.to_start.popleft())
        except Refusal as refusal:
            self.refuse(refusal)

    def start(self, rank: Rank) -> None:
        assert self.prepared is not None
        program, env, cwd = self.prepared
        try:
            rank.process = subprocess.Popen(
                [to_bytes(word) for word in self.orders["argv"]] + rank.args, executable=program, cwd=cwd,
                env={**env, **rank.env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, bufsize=0, start_new_session=True, preexec_fn=self.before_exec,
            )  # fmt: skip
        except OSError as error:
            raise Refusal(*start_problem(self.orders["argv"][0], error)) from None
        assert rank.process.stdout and rank.process.stderr
        rank.log.mark_start(self.time_of_start)
        rank.alive = True
        rank.streams = [
            Stream(rank, "stdout", rank.process.stdout.fileno(), self.take_lines),
            Stream(rank, "stderr", rank.process.stderr.fileno(), self.take_lines),
        ]
        for stream in rank.streams:
            self.selector.register(stream.fd, selectors.EVENT_READ, stream)
        self.send("start", rank=rank.number, pid=rank.pid, mono=time.monotonic())

    # --- what is read -------------------------------------------------------------------------

    def read_stream(self, stream: Stream) -> bool:
        """One chunk; False when there is none now, or none ever again."""
        try:
            data = os.read(stream.fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            stream.flush()
            self.unregister(stream.fd)
            stream.rank.streams.remove(stream)
            return False
        if stream.name == "stdout":  # data for whoever reads it: not a byte is held back
            self.forward(stream, data)
        else:
            self.note_stderr(stream.rank, data)
        stream.feed(data, time.monotonic())
        return True

    def take_lines(self, stream: Stream, data: bytes) -> None:
        stream.rank.log.write(data)
        stream.rank.last = data
        if stream.name == "stderr":  # lines of others come in between: never in the middle of one
            self.forward(stream, data)

    def note_stderr(self, rank: Rank, data: bytes) -> None:
        rank.tail = (rank.tail + data)[-TAIL:]
        if rank.show_all:
            return
        *lines, rank.error_line = (rank.error_line + data).split(b"\n")
        rank.error_line = rank.error_line[-CHUNK:]
        for line in lines:
            if ERROR_LINE.search(ESCAPE.sub(b"", line)) and self.unacked <= WINDOW:
                self.unacked += len(line)
                self.send("error_line", rank=rank.number, data=to_text(line[:2000]), bytes=len(line))

    def read_stdin(self) -> None:
        try:
            data = os.read(0, CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self.unregister(0)
            self.heed_signal()  # sshd closes it because the keeper was killed: that is to be told
            self.begin_stop(self.orders["failure_grace_s"])
            return
        self.feed(data)

    def feed(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for line in lines:
            self.obey(json.loads(line.decode("ascii")))

    def obey(self, command: dict[str, Any]) -> None:
        what = command["command"]
        if what == "reach":
            self.send("reached", problem=reach_problem(command["addr"], command["port"]))
        elif what == "start":
            self.start_ranks(command)
        elif what == "stop":
            self.begin_stop(command["grace_s"])
        elif what == "kill":
            self.begin_stop(0.0)
            self.kill_at = min(self.kill_at, time.monotonic())
        elif what == "signal":
            self.signal_ranks(getattr(signal, "SIG" + command["name"]))
        elif what == "ack":
            self.unacked -= command["bytes"]

    def start_ranks(self, command: dict[str, Any]) -> None:
        if self.stopping or self.started or self.prepared is None:
            return
        self.started = True
        env = self.prepared[1]
        self.lease.stop_listening()
        env.update((to_bytes(k), to_bytes(v)) for k, v in command["env"].items())
        if command["net"] and (interface := interface_to(command["env"]["MASTER_ADDR"])):
            for name in (b"GLOO_SOCKET_IFNAME", b"NCCL_SOCKET_IFNAME"):
                env.setdefault(name, to_bytes(interface))
        self.time_of_start = command["time"]
        self.to_start.extend(self.ranks)

    def refuse(self, refusal: Refusal) -> None:
        self.refused = True
        self.send("refused", message=refusal.message, hint=refusal.hint)
        self.begin_stop(self.orders["failure_grace_s"])

    def signal_ranks(self, number: int) -> None:
        for rank in self.ranks:
            if rank.alive:
                send_signal(rank.pid, number)

    def note_signal(self, number: int, _frame: Any) -> None:
        if number in PASSED_ON:
            self.to_pass_on.append(number)
        else:
            self.stop_signal = self.stop_signal or number

    def heed_signal(self) -> None:
        while self.to_pass_on:
            self.signal_ranks(self.to_pass_on.pop(0))
        if os.getppid() != self.keeper:
            self.stop_signal = signal.SIGKILL
        if self.stop_signal and not self.stopping:
            self.send("stop_asked", signal=self.stop_signal)
            self.begin_stop(self.orders["checkpoint_grace_s"])

    # --- ends ---------------------------------------------------------------------------------

    def reap(self) -> None:
        """Collect every ended child; report those that are ranks."""
        ended = []
        by_pid = {rank.pid: rank for rank in self.ranks if rank.process is not None}
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self.asked.discard(pid)
            if pid in by_pid:
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                ended.append((by_pid[pid], code, usage.ru_maxrss))
        # Seen at the same instant, a rank that something killed is the cause and one that
        # complains (an exception, an abort) is the consequence.
        ended.sort(key=lambda item: item[1] >= 0 or item[1] == -signal.SIGABRT)
        for rank, code, max_rss_kib in ended:
            self.report_exit(rank, code, max_rss_kib)

    def report_exit(self, rank: Rank, code: int, max_rss_kib: int) -> None:
        assert rank.process is not None
        rank.alive = False
        rank.process.returncode = code
        for stream in list(rank.streams):
            for _ in range(64):  # a child of the rank may hold the pipe and write on and on
                if not self.read_stream(stream):
                    break
            stream.flush()
        self.send(
            "exit", rank=rank.number, pid=rank.pid, code=code, max_rss_kib=max_rss_kib,
            asked=self.stopping, tail=lines_of(rank.tail)[-TAIL_LINES:],
            last="".join(lines_of(rank.last[-LAST:])[-1:]), state=rank.state,
            mono=time.monotonic(), facts=self.kill_facts(code),
        )  # fmt: skip

    def kill_facts(self, code: int) -> dict[str, int | None] | None:
        """What this host knows of why a signal may have killed a rank: memory and /dev/shm."""
        if code not in (-signal.SIGKILL, -signal.SIGBUS):
            return None
        before, now = self.oom_kills_before, oom_kills()
        return {
            "memory_limit_bytes": memory_limit(),
            "oom_kills": None if before is None or now is None else now - before,
            "shm_bytes": space("/dev/shm")["total_bytes"],
        }

    def begin_stop(self, grace_s: float) -> None:
        """TERM to each rank itself, KILL after ``grace_s``; a later call can only shorten that.

        Not to its whole group: data-loader workers killed by TERM make a rank
        fail that is about to write its checkpoint.
        """
        self.deadline = min(self.deadline, time.monotonic() + grace_s)
        if self.stopping:
            return
        self.stopping = True
        self.to_start.clear()
        for rank in self.ranks:
            if rank.alive:
                self.wait_for_shells = self.wait_for_shells or program_name(rank.pid) in SHELLS
                rank.state = process_state(rank.pid)
                send_signal(rank.pid, signal.SIGTERM)
                send_signal(rank.pid, signal.SIGCONT)

    def tick(self, now: float) -> bool:
        """Advance the ending; True when nothing of ours is left."""
        self.beat(now)
        if not self.started and not self.stopping:
            return False
        for rank in self.ranks:
            for stream in rank.streams:
                if stream.pending and now - stream.pending_since >= FLUSH_S:
                    stream.flush()
        if self.to_start:
            return False
        if any(rank.alive for rank in self.ranks):
            if now >= self.deadline:
                for rank in self.ranks:
                    if rank.alive:
                        kill_group(rank.pid)
                self.note_give_up(now)
            return now >= self.give_up_at
        return self.clear_leftovers(now)

    def beat(self, now: float) -> None:
        """Show that we live, and stop the ranks where the supervisor has shown no life for too long."""
        if self.host_timeout_s == float("inf"):
            return
        if now - self.beat_at >= self.host_timeout_s / 6:
            self.beat_at = now
            self.send("beat")
        if now - self.heard_at >= self.host_timeout_s and not self.supervisor_gone:
            self.supervisor_gone = True  # what is still to be said would only fill the connection
            self.outbox.clear()
            self.begin_stop(self.orders["failure_grace_s"])

    def clear_leftovers(self, now: float) -> bool:
        children = own_children()
        if not children:
            return True
        grace_s = self.orders["failure_grace_s"]
        if self.settle_at == float("inf"):
            self.settle_at = now if self.stopping else now + SETTLE_S
            self.kill_at = min(self.kill_at, self.settle_at + grace_s)
            if self.stopping and self.wait_for_shells:
                self.kill_at = max(now, self.deadline)
        self.kill_at = min(self.kill_at, max(self.deadline, now))
        if now >= self.settle_at:
            for pid in children - self.asked:
                self.asked.add(pid)
                self.send("leftover", pid=pid, name=program_name(pid))
                send_signal(pid, signal.SIGTERM)
                send_signal(pid, signal.SIGCONT)
        if now >= self.kill_at:
            for pid in children:
                send_signal(pid, signal.SIGKILL)
            self.note_give_up(now)
        self.left = sorted(children)
        return now >= self.give_up_at

    def note_give_up(self, now: float) -> None:
        # A process in uninterruptible sleep (dead NFS, a stuck driver) does not die of KILL.
        self.give_up_at = min(self.give_up_at, now + UNKILLABLE_S)

    # --- the loop -----------------------------------------------------------------------------

    def unregister(self, fd: int) -> None:
        try:
            self.selector.unregister(fd)
        except KeyError:
            pass

    def set_reading(self) -> None:
        """Read a shown rank's pipes only while somebody takes what is shown: plain back-pressure."""
        paused = self.unacked > WINDOW and not self.stopping and not self.supervisor_gone
        for rank in self.ranks:
            for stream in rank.streams if rank.show_all else ():
                registered = stream.fd in self.selector.get_map()
                if paused and registered:
                    self.selector.unregister(stream.fd)
                elif not paused and not registered:
                    self.selector.register(stream.fd, selectors.EVENT_READ, stream)

    def set_writing(self, writing: bool) -> None:
        registered = 1 in self.selector.get_map()
        if writing and not registered:
            self.selector.register(1, selectors.EVENT_WRITE, "out")
        elif not writing and registered:
            self.selector.unregister(1)

    def timeout(self, now: float) -> float | None:
        if self.to_start:
            return 0
        if self.stopping or (self.started and not any(rank.alive for rank in self.ranks)):
            return TICK_S
        if any(stream.pending for rank in self.ranks for stream in rank.streams):
            return FLUSH_S
        return None if self.host_timeout_s == float("inf") else self.host_timeout_s / 12

    def serve(self, wake_fd: int) -> None:
        self.selector.register(0, selectors.EVENT_READ, "in")
        self.selector.register(wake_fd, selectors.EVENT_READ, "wake")
        self.feed(b"")  # commands that came together with the orders
        while not self.tick(time.monotonic()):
            self.start_some()
            self.set_reading()
            self.set_writing(bool(self.outbox))
            for key, _ in self.selector.select(self.timeout(time.monotonic())):
                if key.data == "in":
                    self.read_stdin()
                elif key.data == "out":
                    self.write_out()
                elif key.data == "wake":
                    os.read(wake_fd, CHUNK)
                elif key.fd in self.selector.get_map():
                    self.read_stream(key.data)
            self.heed_signal()
            self.reap()

    def finish(self) -> None:
        for rank in self.ranks:
            for stream in list(rank.streams):
                for _ in range(64):
                    if not self.read_stream(stream):
                        break
                stream.flush()
        self.send("done", dropped=self.dropped, left=self.left if own_children() else [])
        if not self.supervisor_gone:
            os.set_blocking(1, True)
            self.write_out()


# --- what is asked of the host: the run directory, ports and addresses ------------------------------


def witness_problem(witness: dict[str, Any] | None) -> str | None:
    """That this host does not see the run directory that the launcher wrote to; None where it does."""
    if witness is None:
        return None
    path = to_bytes(witness["path"])
    folder = os.path.dirname(path)
    try:
        os.listdir(folder)  # NFS looks anew
        with open(path, encoding="utf-8") as stream:
            seen = stream.read()
    except OSError as error:
        seen = error.strerror or str(error)
    if seen == witness["text"]:
        return None
    return f"the run directory {to_text(folder)} of the launcher is not seen there ({seen or 'another one'})"


def find_port(seed: str | None = None) -> tuple[int, socket.socket]:
    """A free port and its reservation; the same for the same ``seed`` as long as it is free.

    Raises Refusal where there is none.
    """
    # Outside the ephemeral range: within it, the ranks' own outgoing connections may take
    # the port between our test and rank 0's bind.
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as stream:
            low = int(stream.read().split()[0])
    except (OSError, ValueError, IndexError):
        low = 32768
    pool = range(LOWEST_PORT, low) if low - LOWEST_PORT >= 200 else range(LOWEST_PORT, 65536)
    chance = random.SystemRandom() if seed is None else random.Random(seed)
    for port in chance.sample(pool, 200):
        reservation = reserve_port(port)
        if reservation is not None:
            if is_free_port(port):
                return port, reservation
            reservation.close()
    raise Refusal("no free port for the ranks to meet at", "give --master-port")


def reserve_port(port: int) -> socket.socket | None:
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        reservation.bind(f"\0dslaunch-master-port-{port}")
    except OSError:
        reservation.close()
        return None
    return reservation


def is_free_port(port: int) -> bool:
    """Whether a server could listen on ``port`` on every interface, IPv4 and IPv6."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TCPStore does
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            # No such family on this machine: nobody can hold the port there.
    return True


def holder_text(port: int) -> str:
    """Who listens on ``port``, in the words that follow "is taken"."""
    holder = find_holder(port)
    return f" by process {holder[0]} ({holder[1]})" if holder else " by another process or launch"


def find_holder(port: int) -> tuple[int, str] | None:
    """Process id and program name of who listens on TCP ``port``; None where /proc does not show it."""
    inodes = _listening_inodes(port)
    for link in glob.iglob("/proc/[0-9]*/fd/*") if inodes else ():
        try:
            if os.readlink(link) in inodes:
                pid = link.split("/")[2]
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
                    return int(pid), stream.read().strip()
        except OSError:  # it is gone, or not ours to see
            continue
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as stream:
                lines = stream.read().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes


def own_address(peers: list[str]) -> str:
    """The address that the other hosts reach this one at: that from which the kernel would send to them."""
    for name in peers:
        address = address_towards(name)
        if address is not None:
            return address
    fields = os.environ.get("SSH_CONNECTION", "").split()  # peers may be names of the launcher's ssh_config
    if len(fields) == 4 and not is_loopback(fields[2]):
        return fields[2]
    raise Refusal(
        f"at which address the other hosts ({', '.join(peers[:3])}) find this one is not known",
        "give it: --master-addr",
    )


def address_towards(name: str) -> str | None:
    """Our end of the route to a host; None where it cannot be looked up or leads nowhere else."""
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # no packet is sent
                address: str = probe.getsockname()[0]
        except OSError:
            continue
        if not is_loopback(address):
            return address
    return None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def reach_problem(address: str, port: int) -> str | None:
    """Why no connection to the host of rank 0 can be made; None where it can."""
    try:
        socket.create_connection((address, port), REACH_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def interface_to(address: str) -> str | None:
    """The network interface on the way to ``address``; None where that is not to be found out."""
    own = address_towards(address)
    if own is None:
        return None
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError:
            continue
        if socket.inet_ntoa(answer[20:24]) == own:
            return name
    try:
        packed = socket.inet_pton(socket.AF_INET6, own.partition("%")[0]).hex()
        with open("/proc/net/if_inet6", encoding="ascii") as stream:
            return next((line.split()[5] for line in stream if line.startswith(packed)), None)
    except OSError:
        return None


# --- its cores, memory, versions and CPU ------------------------------------------------------------


def usable_cores(root: str = "/") -> int:
    """Cores that this process may use: its affinity, cut by the CPU quotas of its cgroups (v2 and v1)."""
    cores = len(os.sched_getaffinity(0))
    for folder in cgroups(root, "cpu"):
        quota = cpu_quota(folder)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return cores


def versions_beside(program: bytes, packages: Sequence[str], python_path: bytes = b"") -> dict[str, str]:
    """Of the environment whose program this is: its Python and ``packages``, by the names of their metadata.

    No process is started for it. Python is left out where the program has none of its own, like /bin/sh,
    and so are its third number where nothing tells it, and packages that only a .pth file leads to.
    """
    path = to_text(program)
    top = os.path.dirname(os.path.dirname(path))
    is_python = os.path.basename(path).startswith("python")
    settings = read_text(os.path.join(top, "pyvenv.cfg"))
    tops = tops_of_packages(top, settings) if is_python or top not in ("/", "/usr") else []
    exact = re.match(r"python3\.\d+", os.path.basename(os.path.realpath(path)))
    name = exact.group() if is_python and exact else "python3.*"
    libs = [lib for top in tops for lib in sorted(glob.glob(os.path.join(glob.escape(top), "lib*", name)))]
    found = {}
    if is_python and os.path.realpath(path) == os.path.realpath(sys.executable):
        found["python"] = sys.version.split()[0]
    elif is_python or settings or os.path.isdir(os.path.join(top, "conda-meta")):
        found.update(python_of(top, settings, libs))
    folders = [*filter(None, to_text(python_path).split(os.pathsep))]
    folders += [os.path.join(lib, kind) for lib in libs for kind in ("site-packages", "dist-packages")]
    folders += [os.path.join(top, "lib/python3/dist-packages") for top in tops]
    names = {name.replace("-", "_").lower(): name for name in packages}
    for folder in folders:
        for entry in entries(folder):
            key = re.split(r"[-.]", entry)[0].lower()
            version = version_of(folder, entry) if key in names else None
            if version:
                found.setdefault(names[key], version)
    return found


def tops_of_packages(top: str, settings: str) -> list[str]:
    """Below which Python of ``top`` looks for packages; ``settings``: of its pyvenv.cfg."""
    tops = ["/usr/local", top] if top == "/usr" else [top]  # as Debian's does
    home = re.search(r"^home *= *(.+)$", settings, re.MULTILINE)
    if home and re.search(r"^include-system-site-packages *= *true", settings, re.MULTILINE):
        tops += tops_of_packages(os.path.dirname(home.group(1).strip()), "")
    return tops


def python_of(top: str, settings: str, libs: Sequence[str]) -> dict[str, str]:
    """The version of an environment's Python, as venv, conda or the name of its library tells."""
    written = re.search(r"^version(?:_info)? *= *(\d+\.\d+\.\d+)", settings, re.MULTILINE)
    records = " ".join(entries(os.path.join(top, "conda-meta")))
    told = written or re.search(r"\bpython-(3\.\d+\.\d+)-", records)
    if told:
        return {"python": told.group(1)}
    kinds = {os.path.basename(lib)[len("python"):] for lib in libs}  # fmt: skip
    return {"python": kinds.pop()} if len(kinds) == 1 else {}


def version_of(folder: str, entry: str) -> str | None:
    """What an entry of a folder of packages tells: pip's or conda's metadata, an old editable one's link."""
    if entry.endswith(".egg-link"):
        source = read_text(os.path.join(folder, entry)).split("\n")[0].strip()
        found = glob.glob(os.path.join(glob.escape(source), "*.egg-info/PKG-INFO"))
        told = re.search(r"^Version: *(\S+)", read_text(found[0]), re.MULTILINE) if found else None
        return told.group(1) if told else None
    match = re.match(r"[^-]+-([^-]+?)(?:-py3\.\d+)?\.(?:dist|egg)-info$", entry)
    return match.group(1) if match else None


def entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def cgroups(root: str, controller: str) -> list[str]:
    """The folders that may limit our use of ``controller`` (cpu, memory): of our cgroup and all above it.

    The top is always among them: in a container it often is the container's own.
    """
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as stream:
            lines = [line.rstrip("\n").split(":", 2) for line in stream]
    except (OSError, ValueError):
        return []
    folders = []
    for line in lines:
        if len(line) < 3 or (line[1] and controller not in line[1].split(",")):
            continue
        parts = [part for part in line[2].split("/") if part]
        for mount in (line[1], controller) if line[1] else ("", "unified"):
            top = os.path.join(root, "sys/fs/cgroup", mount)
            folders += [os.path.join(top, *parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def cpu_quota(folder: str) -> float | None:
    """Cores' worth of CPU time that a cgroup may use; None where it has no limit."""
    try:
        with open(os.path.join(folder, "cpu.max"), encoding="ascii") as stream:
            quota, period = stream.read().split()
    except (OSError, ValueError):
        try:  # cgroup v1
            with open(os.path.join(folder, "cpu.cfs_quota_us"), encoding="ascii") as stream:
                quota = stream.read()
            with open(os.path.join(folder, "cpu.cfs_period_us"), encoding="ascii") as stream:
                period = stream.read()
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max"
        return None


def memory_limit(root: str = "/") -> int | None:
    """Bytes that the ranks may use together: the least of the limits of our cgroups; None without one."""
    limits = []
    for folder in cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroup v2, v1
            text = read_text(os.path.join(folder, name)).strip()
            if text.isdigit() and int(text) < 1 << 60:  # v1 writes a huge number for none
                limits.append(int(text))
    return min(limits, default=None)


def oom_kills(root: str = "/") -> int | None:
    """How many processes of our cgroup the kernel's out-of-memory killer has ended; None: not known.

    Where the cgroup has no count, that of the whole machine.
    """
    folders = cgroups(root, "memory")
    files = [os.path.join(f, name) for f in folders for name in ("memory.events", "memory.oom_control")]
    for path in (*files, os.path.join(root, "proc/vmstat")):
        for line in read_text(path).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def cpu_model(root: str = "/") -> str:
    """The CPU's architecture, flags and name, one a line. Where two are equal, native code can be shared."""
    found: dict[str, str] = {}
    try:
        with open(os.path.join(root, "proc/cpuinfo"), encoding="utf-8", errors="replace") as stream:
            for line in stream:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                found[name.strip()] = value.strip()
    except OSError:
        pass
    wanted = ("CPU part", "Features", "flags", "model name")
    return "\n".join([os.uname().machine, *(f"{name}={found[name]}" for name in wanted if name in found)])


def cpu_key() -> str:
    return hashlib.sha256(cpu_model().encode("utf-8", "surrogateescape")).hexdigest()[:8]


# --- its disk, limits, and locks that killed builds left -------------------------------------------


def look_around(cache: str, ops: str, root: str = "/") -> dict[str, Any]:
    """What may keep a run from going well here, for the launcher's side to judge (preflight.py).

    ``cache`` need not be there yet; ``ops``: torch's cache of compiled ops.
    """
    cache, ops = os.path.expanduser(cache), os.path.expanduser(ops)
    return {
        "machine": os.uname().machine,
        "identity": identity(),
        "shm": space(os.path.join(root, "dev/shm")),
        "cache": {"path": cache, **space(cache), "problem": write_problem(cache)},
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": os.path.isdir(os.path.join(root, "sys/class/infiniband")),
        "locks": torch_locks(ops),
    }


def identity() -> str:
    """The same from all that look at one machine, under whatever name they got there; empty: not known."""
    boot = read_text("/proc/sys/kernel/random/boot_id").strip()
    try:
        return " ".join([os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")]) if boot else ""
    except OSError:
        return ""


def space(path: str) -> dict[str, int | None]:
    """Bytes and inodes of the file system that ``path`` is or will be on; None: not counted there."""
    try:
        found = os.statvfs(existing(path))
    except OSError:
        return {"total_bytes": None, "free_bytes": None, "free_inodes": None}
    return {
        "total_bytes": found.f_blocks * found.f_frsize,
        "free_bytes": found.f_bavail * found.f_frsize,
        "free_inodes": found.f_favail if found.f_files else None,
    }


def existing(path: str) -> str:
    """``path`` or the nearest folder above it that is there."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def write_problem(path: str) -> str | None:
    """Why nothing can be written at ``path``. A quota that is used up shows only when writing."""
    name = os.path.join(existing(path), f".dslaunch-{os.uname().nodename}-{os.getpid()}-{time.time_ns()}")
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.unlink(name)
            left = 65536
            while left:
                left -= os.write(fd, b"x" * left)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return None


def torch_locks(folder: str) -> list[dict[str, Any]]:
    """torch's lock files in a cache of ops. ``held``: whether a process here has one open; None where /proc
    does not show: another user's. torch keeps it open while it builds (torch/utils/file_baton.py).
    """
    top, found = glob.escape(folder), {}
    # Where nobody says where the cache is, torch makes one below it for each Python and CUDA.
    for path in sorted(glob.glob(os.path.join(top, "*/lock")) + glob.glob(os.path.join(top, "*/*/lock"))):
        try:
            found[path] = os.stat(path)
        except OSError:
            continue
        if len(found) == MOST_LOCKS:
            break
    held = opened({(status.st_dev, status.st_ino) for status in found.values()})
    locks = []
    for path, status in found.items():
        theirs = status.st_uid != os.getuid() and os.getuid() != 0
        is_held = (status.st_dev, status.st_ino) in held
        locks.append({"path": path, "held": None if theirs and not is_held else is_held})
    return locks


def opened(wanted: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Which of these files (device and inode) a process of this host has open, as far as /proc shows."""
    found = set()
    for link in glob.iglob("/proc/[0-9]*/fd/*") if wanted else ():
        try:
            status = os.stat(link)
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return wanted & found


# --- its devices ------------------------------------------------------------------------------------


def device_variable(env: dict[bytes, bytes], root: str = "/") -> bytes:
    """The variable that this host's device ids are counted in, and so have to be written to."""
    amd = os.path.exists(os.path.join(root, "dev/kfd"))
    if not amd or os.path.isdir(os.path.join(root, "proc/driver/nvidia/gpus")):
        return CUDA_VARIABLE
    return next((name for name in AMD_VARIABLES if name in env), AMD_VARIABLES[0])


def models_of_gpus(root: str = "/") -> list[str]:
    """The models of this host's GPUs, in the order of their ids; empty where they are not listed.

    NVIDIA's by name, else AMD's by architecture (gfx942).
    """
    found = []
    for path in sorted(glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*/information"))):
        text = read_text(path)
        model = re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)
        minor = re.search(r"^Device Minor:\s*(\d+)\s*$", text, re.MULTILINE)
        # A container without GPUs still sees the host's list, but not the device files.
        if model and minor and os.path.exists(os.path.join(root, "dev/nvidia" + minor.group(1))):
            found.append(model.group(1))
    if found or not os.path.exists(os.path.join(root, "dev/kfd")):
        return found
    nodes = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    for node in sorted(entries(nodes), key=lambda name: int(name) if name.isdigit() else -1):
        path = os.path.join(nodes, node, "properties")
        version = re.search(r"^gfx_target_version ([1-9]\d*)$", read_text(path), re.MULTILINE)
        if version:  # 0: the CPUs of a node
            number = int(version.group(1))
            found.append(f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}")
    return found


def check_gpus(slots: Sequence[str], root: str = "/") -> None:
    """Raises Refusal for a slot that is no GPU of this host, as far as they can be told by looking."""
    models = models_of_gpus(root)
    names = ("dev/nvidia[0-9]*", "dev/kfd", "dev/dxg")
    if not models and any(glob.glob(os.path.join(root, name)) for name in names):
        return  # WSL's, or of a container that hides the list
    ids = [str(index) for index in range(len(models))]
    for slot in slots:
        if slot not in ids and (slot.isdecimal() or not ids):
            has = f"{len(ids)} ({','.join(ids)})" if ids else "none"
            raise Refusal(f"the plan is for GPU {slot}, and this host has {has}",
                          "correct its slots, or use --gpu cpu for ranks on the CPU")  # fmt: skip


def devices_of(slots: Sequence[str], all_slots: Sequence[str], given: Sequence[str]) -> dict[str, str | None]:
    """The device of each slot among the ``given``, None where there is none; never one for two slots.

    Slots are ids where the host's whole list of them is among the given, however few of them are
    used; otherwise they count places.
    """
    if all(slot in given for slot in all_slots):
        return {slot: slot for slot in slots}
    return {s: given[int(s)] if s.isdecimal() and int(s) < len(given) else None for s in slots}


def visible_devices(slots: Sequence[str], all_slots: Sequence[str], inherited: bytes | None) -> str:
    """The device list of this host's ranks, always within what the scheduler gave us."""
    if inherited is None:
        return ",".join(slots)
    given = [item.strip() for item in to_text(inherited).split(",") if item.strip()]
    given = given[: given.index("-1")] if "-1" in given else given  # CUDA's own rule
    devices = []
    for slot, device in devices_of(slots, all_slots, given).items():
        if device is None:
            listed = ",".join(all_slots)
            raise Refusal(
                f"slot {slot} of {listed} is not among the {len(given)} devices visible here"
                f" ({','.join(given)})",
                "list as many slots as there are, or their very ids; or ask the scheduler for more devices",
            )
        devices.append(device)
    return ",".join(devices)


# --- programs and processes -------------------------------------------------------------------------


def find_program(name: bytes, path: bytes, cwd: bytes) -> bytes:
    if b"/" in name:
        candidates = [os.path.join(cwd, name)]
    else:
        candidates = [os.path.join(cwd, part, name) for part in path.split(b":")]
    for candidate in candidates:
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    shown = to_text(name)
    if any(os.path.isfile(candidate) for candidate in candidates):
        raise Refusal(f"{shown} is not executable", "chmod +x it, or put its interpreter in front")
    where = "" if b"/" in name else " in PATH"
    raise Refusal(f"no program {shown}{where}", "check the first word of the command")


def start_problem(program: str, error: OSError) -> tuple[str, str]:
    if error.errno == errno.ENOEXEC:
        return f"{program} is not a program this system can run", "give it a #! line, or name its interpreter"
    if error.errno == errno.E2BIG:
        return "the arguments and environment are too long for the kernel", "pass long data in a file"
    return f"cannot start {program}: {error.strerror}", "see the system's message"


def own_children() -> set[int]:
    """Children of this process that have not been reaped (ended ones too)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as stream:
            return {int(pid) for pid in stream.read().split()}
    except OSError:
        pass
    mine = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            mine.add(int(name))
    return mine


def program_name(pid: int) -> str:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return "?"


def process_state(pid: int) -> str:
    """R, S, D, T, ...; empty where it is gone."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[0] if fields else ""


def lines_of(data: bytes) -> list[str]:
    """The lines that are not empty, of a progress bar its last state."""
    states = [[state for state in line.split(b"\r") if state.strip()][-1:] for line in data.split(b"\n")]
    return [to_text(line) for state in states for line in state]


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


# --- the keeper -------------------------------------------------------------------------------------


def go_below(*, ends_orphans: bool) -> None:
    """Fork and go on as the child; the parent becomes its keeper, and ends with its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no end of a child is told
    heeded = {number for number in HEEDED if signal.getsignal(number) != signal.SIG_IGN}  # nohup
    heeded |= {signal.SIGCHLD, signal.SIGCONT, signal.SIGQUIT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heeded)
    me = os.getpid()
    child = os.fork()
    if child > 0:
        prctl(PR_SET_NAME, b"dslaunch-keeper")  # `pkill python` is not meant for us
        os.close(0)
        code = keep(child, heeded)
        if ends_orphans and code not in (0, REFUSED):
            end_children()
        os._exit(code)
    os.setsid()  # whoever signals the keeper's group does not mean us: it passes that on
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != me:  # it died before the line above
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def keep(child: int, heeded: set[signal.Signals]) -> int:
    """Pass signals on to ``child`` until it ends; its exit code, 128+n for a signal. QUIT kills it."""
    while True:
        number = signal.sigwaitinfo(heeded).si_signo
        if number != signal.SIGCHLD:
            send_signal(child, signal.SIGKILL if number == signal.SIGQUIT else number)
            continue
        status = reap_all().get(child)
        if status is None:
            continue
        if not os.WIFSIGNALED(status):
            return os.WEXITSTATUS(status)
        os.write(2, b"the agent was killed by signal %d\n" % os.WTERMSIG(status))
        return 128 + os.WTERMSIG(status)


def reap_all() -> dict[int, int]:
    """The status of each child that has ended since the last call, by process id."""
    ended: dict[int, int] = {}
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return ended
            ended[pid] = status
    except ChildProcessError:
        return ended


def end_children() -> None:
    """KILL all that the agent has left: it was handed to us, and so were the children of what we kill."""
    deadline = time.monotonic() + UNKILLABLE_S
    while time.monotonic() < deadline:
        reap_all()
        children = own_children()
        if not children:
            return
        for pid in children:
            send_signal(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, TICK_S)


def dying_with_us() -> Callable[[], None]:
    """What a new process is to do before it is another program: the kernel kills it where we are killed."""
    libc = ctypes.CDLL(None)
    me = os.getpid()

    def before_exec() -> None:
        libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != me:  # we died before the line above
            os._exit(1)

    return before_exec


def prctl(option: int, value: int | bytes) -> int:
    argument = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    result: int = ctypes.CDLL(None).prctl(option, argument)
    return result


# --- the beginning ----------------------------------------------------------------------------------


def read_orders() -> tuple[dict[str, Any], bytes]:
    data = b""
    while b"\n" not in data:
        more = os.read(0, CHUNK)
        if not more:
            sys.exit("dslaunch agent: stdin ended before the orders came")
        data += more
    line, _, rest = data.partition(b"\n")
    orders = json.loads(line.decode("ascii"))
    if orders.get("protocol") != PROTOCOL:
        sys.exit(f"dslaunch agent: protocol {orders.get('protocol')!r}, this agent speaks {PROTOCOL}")
    return orders, rest


def wake_on_signals(agent: Agent) -> int:
    """A descriptor that becomes readable when a child ends or someone asks us to stop."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in HEEDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, agent.note_signal)
    return read_fd


def main() -> int:
    if own_children():  # of a login script that ran in this process before us: not ours to end
        go_below(ends_orphans=False)
    if prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        sys.exit("dslaunch agent: cannot become a subreaper; Linux 3.4 or newer is needed")
    go_below(ends_orphans=True)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # not inherited
    orders, rest = read_orders()
    os.set_blocking(1, False)
    agent = Agent(orders, rest)
    wake_fd = wake_on_signals(agent)
    version = sys.version.split()[0]
    agent.outbox += b"\n"  # ends what a login script may have left unfinished there
    agent.send("hello", protocol=PROTOCOL, node=os.uname().nodename, pid=os.getpid(), python=version)
    try:
        agent.prepared = agent.prepare()
        program, env, _ = agent.prepared
        versions = versions_beside(program, orders["packages"], env.get(b"PYTHONPATH", b""))
        gpus = models_of_gpus() if orders["visible_devices"] is not None else []
        agent.send("ready", time=time.time(), versions=versions, gpus=gpus, **agent.facts, **agent.meet())
    except Refusal as refusal:
        agent.refuse(refusal)
    agent.serve(wake_fd)
    agent.finish()
    return REFUSED if agent.refused else 0


if __name__ == "__main__":
    sys.exit(main())
