"""All links of a launch, waited for together."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator

from dslaunch.launch.link import AgentLink

_LAST_CHUNKS = 64


class Links:
    """Reads what the agents say and sends what waits for them. ``opened``: may still say something.

    What is to be done for one of them costs the same however many there are.
    """

    def __init__(self, wake_fd: int, on_wake: Callable[[], None]) -> None:
        self._all: list[AgentLink] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake_fd, selectors.EVENT_READ, None)
        self._on_wake = on_wake
        self._writing: set[int] = set()
        self._unsent: set[AgentLink] = set()
        self._acks: deque[AgentLink] = deque()
        self._ending: deque[AgentLink] = deque()  # the first to end first
        self.opened: set[AgentLink] = set()

    def __iter__(self) -> Iterator[AgentLink]:
        return iter(self._all)

    def add(self, link: AgentLink, read_events: Callable[[AgentLink], bool]) -> None:
        """Watch ``link``; ``read_events`` reads its stdout and returns False at its end."""
        self._all.append(link)
        self.opened.add(link)
        link.on_unsent = self._unsent.add
        link.on_ending = self._ending.append
        self._unsent.add(link)
        self._selector.register(link.stdout_fd, selectors.EVENT_READ, (link, read_events))
        self._selector.register(link.stderr_fd, selectors.EVENT_READ, (link, AgentLink.read_stderr))

    def wait(self, deadline: float) -> None:
        """Until something came or was sent, or until ``deadline`` (monotonic time)."""
        self._watch_writes()
        while self._ending and self._ending[0] not in self.opened:
            self._ending.popleft()
        if self._ending:
            deadline = min(deadline, self._ending[0].ends_by)
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for key, mask in self._selector.select(timeout):
            if key.data is None:
                self._on_wake()
                continue
            link, read = key.data
            if mask & selectors.EVENT_WRITE:
                link.flush()
            elif not read(link):
                self._selector.unregister(key.fd)
                if key.fd == link.stdout_fd:
                    self.opened.discard(link)
        while self._ending and time.monotonic() >= self._ending[0].ends_by:
            self._end(self._ending.popleft())
        while self._acks:
            self._acks.popleft().send_ack()

    def _end(self, link: AgentLink) -> None:
        """Read what is left there, and no more: something else holds it open."""
        if link in self.opened:
            read = self._selector.get_key(link.stdout_fd).data[1]
            for _ in range(_LAST_CHUNKS):
                if not read(link):
                    break
            self._selector.unregister(link.stdout_fd)
            self.opened.discard(link)

    def send_ack_soon(self, link: AgentLink) -> None:
        """Send what :meth:`AgentLink.send_ack` does, in the next :meth:`wait`. For any thread."""
        self._acks.append(link)

    def beat(self, silent_since: float) -> list[AgentLink]:
        """Show the agents elsewhere that we live; those of which nothing has come since then."""
        others = [link for link in self.opened if not link.is_local and link.said_hello]
        for link in others:
            link.send("beat")
        return [link for link in others if link.heard_at < silent_since and not link.done]

    def _watch_writes(self) -> None:
        """Wait for the agents' stdin to take more only where something is still to be sent."""
        self._unsent.difference_update([link for link in self._unsent if not link.has_unsent])
        unsent = self._unsent & self.opened
        wanted = {link.stdin_fd: link for link in unsent if link.stdin_fd is not None}
        for fd in self._writing - set(wanted):
            with contextlib.suppress(KeyError, ValueError):  # closed by now
                self._selector.unregister(fd)
        for fd in set(wanted) - self._writing:
            self._selector.register(fd, selectors.EVENT_WRITE, (wanted[fd], None))
        self._writing = set(wanted)

    def close(self, timeout_s: Callable[[AgentLink], float]) -> None:
        """Stop what still runs, each within its time, which is the same for all of them."""
        by = [(link, time.monotonic() + timeout_s(link)) for link in self._all]
        for link, _ in by:
            link.end_stdin()
        for link, deadline in by:
            link.close(deadline - time.monotonic())
        self._selector.close()
