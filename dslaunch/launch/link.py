"""The supervisor's end of one agent: its process, commands to it, events from it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.core.events import parse_line
from dslaunch.core.topology import Host
from dslaunch.launch.agent import UNKILLABLE_S

_CHUNK = 65536
_KEEP_STDERR = 8192
_KEEP_NOISE = 1024
_DRAIN_S = 0.2  # for the last of it to come
_KEEPER_S = UNKILLABLE_S + 5.0
_LAST_WORDS_S = 1.0
_ACK_EVERY = 1 << 16  # bytes of output written before an agent is told


class AgentLink:
    """One started agent. It runs in its own session: a terminal's Ctrl-C reaches only us.

    It inherits the descriptors in ``keep_fds``. ``is_local``: its ranks are processes of this
    machine. Raises EnvironmentNotReady where it cannot be started.
    """

    def __init__(
        self, host: Host, command: Command, keep_fds: Sequence[int] = (), *, is_local: bool = True
    ) -> None:
        self.host = host
        self.is_local = is_local
        self.done = False  # it said so: nothing of its ranks is left
        self.was_killed = False  # what leads to another host, by us, before it ended by itself
        self.said_hello = False
        self.heard_at = time.monotonic()
        self.ends_by = float("inf")  # from then on its stdout counts as ended, whoever else holds it open
        self.groups: set[int] = set()  # process groups of ranks that run, for when the agent dies
        self.stderr = self.noise = b""  # the end of each; noise: what is no event on its stdout
        # Told when :attr:`has_unsent` may have become true, and that :attr:`ends_by` is known.
        self.on_unsent: Callable[[AgentLink], object] = id
        self.on_ending: Callable[[AgentLink], object] = id
        self._buffer = b""
        self._outbox = bytearray()
        self._unacked = 0
        self._room: float = float("inf") if command.stdin_room is None else command.stdin_room
        self._lock = threading.Lock()
        try:
            self.process = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.env},
                cwd=command.cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=tuple(keep_fds),
            )
        except OSError as error:
            raise EnvironmentNotReady(
                f"cannot start {command.argv[0]} for host {host.name}: {error.strerror}; nothing was started"
            ) from error
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self._write(command.stdin or b"")

    @property
    def stdin_fd(self) -> int | None:
        """To wait for where :attr:`has_unsent`; None once it is closed."""
        assert self.process.stdin is not None
        return None if self.process.stdin.closed else self.process.stdin.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether commands wait for the agent to read: a connection that is slow, or cut."""
        return bool(self._outbox) and self._room > 0

    @property
    def stdout_fd(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def stderr_fd(self) -> int:
        assert self.process.stderr is not None
        return self.process.stderr.fileno()

    def send(self, command: str, **fields: Any) -> None:
        """Give the agent a command; does nothing where it is gone."""
        self._write(json.dumps({"command": command, **fields}).encode("ascii") + b"\n")

    def note_written(self, num_bytes: int) -> bool:
        """Count output of its ranks that is out; True when :meth:`send_ack` is due. For any thread."""
        with self._lock:
            self._unacked += num_bytes
            return self._unacked >= _ACK_EVERY

    def send_ack(self) -> None:
        """Let the agent send more, if enough of its output has been written to be worth a message."""
        with self._lock:
            if self._unacked < _ACK_EVERY:
                return
            num_bytes, self._unacked = self._unacked, 0
        self.send("ack", bytes=num_bytes)

    def read_events(self) -> Iterator[dict[str, Any]]:
        """The events in one chunk of its stdout. Lines that are no events (login noise) are skipped.

        Raises EOFError at the end of its stdout.
        """
        is_late = time.monotonic() >= self.ends_by
        if is_late and not _is_ready(self.stdout_fd, select.POLLIN, 0.0):
            raise EOFError
        data = os.read(self.stdout_fd, _CHUNK)
        if not data:
            raise EOFError
        self.heard_at = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            event = _event_of(line)
            if event is None:
                self.noise = (self.noise + line + b"\n")[-_KEEP_NOISE:]
            elif event["event"] == "room":
                self._make_room(int(event.get("bytes", 0)))
            else:
                yield event

    def read_stderr(self) -> bool:
        """Keep the end of what the agent (or the way to reach it) complains of; False at its end."""
        data = os.read(self.stderr_fd, _CHUNK)
        self.stderr = (self.stderr + data)[-_KEEP_STDERR:]
        return bool(data)

    def drain_stderr(self) -> None:
        """Read what its end has left there. Something else may still hold it open."""
        while _is_ready(self.stderr_fd, select.POLLIN, _DRAIN_S) and self.read_stderr():
            pass

    def end_stdin(self) -> None:
        """Which makes the agent stop its ranks; not yet where something still waits to be sent."""
        if not self.has_unsent:
            self._close_stdin()

    def close(self, timeout_s: float) -> None:
        """End of stdin makes the agent stop its ranks; wait for it, then be sure."""
        deadline = time.monotonic() + timeout_s
        while self.has_unsent and (fd := self.stdin_fd) is not None and time.monotonic() < deadline:
            _is_ready(fd, select.POLLOUT, deadline - time.monotonic())
            self.flush()
        self._close_stdin()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def rouse(self) -> None:
        """CONT to the agent, or to what leads to it: one that somebody stopped would obey no command."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:  # not reaped: the number is still its own
                os.kill(self.process.pid, signal.SIGCONT)

    def note_done(self) -> None:
        """The agent has said its last word: nothing of its ranks is left."""
        self.done = True
        self.groups.clear()
        self._end_soon()

    def kill(self) -> None:
        """KILL the agent, whose ranks the kernel then kills, and what else they have started.

        Of what leads to another host (a wrapper around ssh, an mpirun) all that it has started here too:
        it may hold our pipes open, and would try the host for minutes.
        """
        self.groups, groups = set(), self.groups
        self._end_soon()
        if not self.is_local:
            self.was_killed = not _has_ended(self.process)
            kill_with_descendants(self.process)
            self.process.wait()
            return
        self.process.send_signal(signal.SIGQUIT)  # its keeper kills it, and all that is left of the ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.wait(_KEEPER_S) >= 0:
                return
        self.process.kill()
        for group in groups:  # at once: these numbers get used again
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self.process.wait()

    def _end_soon(self) -> None:
        if self.ends_by == float("inf"):
            self.ends_by = time.monotonic() + _LAST_WORDS_S
            self.on_ending(self)

    def flush(self) -> None:
        """Hand over what waits, as far as the pipe takes it. Never blocks."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:
            self._outbox.clear()
            return
        try:
            while self.has_unsent:
                some = self._outbox[: int(min(self._room, _CHUNK))]
                count = self.process.stdin.write(some)
                if not count:  # the pipe is full
                    return
                del self._outbox[:count]
                self._room -= count
        except OSError:
            self._close_stdin()

    def _make_room(self, num_bytes: int) -> None:
        self._room += num_bytes
        self._write(b"")

    def _write(self, data: bytes) -> None:
        self._outbox += data
        self.flush()
        if self.has_unsent:
            self.on_unsent(self)

    def _close_stdin(self) -> None:
        assert self.process.stdin is not None
        self._outbox.clear()
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def _event_of(line: bytes) -> dict[str, Any] | None:
    event = parse_line(line)
    return event if event is not None and isinstance(event.get("event"), str) else None


def _is_ready(fd: int, for_what: int, timeout_s: float) -> bool:
    """As select.select says, which knows no descriptor above 1023: that is of the 340th host."""
    poll = select.poll()
    poll.register(fd, for_what)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def kill_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """KILL a process that was started here in a session of its own, and what came of it; does not wait.

    Also what is left of its group where it has ended itself: a wrapper around ssh may.
    """
    if process.returncode is not None:  # reaped: its number may be another's by now
        return
    for pid in _descendants(process.pid):  # while their parents still stand for them
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it, which would set its number free."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _descendants(int(child))
            yield int(child)
