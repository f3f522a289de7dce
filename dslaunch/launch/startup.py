"""The start of a launch: every host's agent is up, ready and can reach rank 0 before any rank starts."""

from __future__ import annotations

import heapq
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dslaunch.core.command import Command
from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.core.events import utc_now
from dslaunch.core.hostfile import filter_text
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import Host
from dslaunch.launch import carried, local, mpich, openmpi, pdsh, slurm, ssh
from dslaunch.launch.container import enter_words
from dslaunch.launch.jit_cache import held_here
from dslaunch.launch.link import AgentLink
from dslaunch.launch.orders import build_orders, common_orders, is_elsewhere, way_to
from dslaunch.launch.preflight import (
    ReadyHost,
    find_doubts,
    given_twice,
    one_machine_doubt,
    ready_host,
    way_doubts,
)
from dslaunch.launch.text import said
from dslaunch.launch.verdict import describe_code

# One file per way to reach a host; each turns (host, orders, our environment, words that lead into
# a container) into the Command that starts its agent.
LAUNCHERS: Mapping[str, Callable[[Host, dict[str, Any], Mapping[str, str], Sequence[str]], Command]] = {
    "local": local.build_agent_command,
    "ssh": ssh.build_agent_command,
    "slurm": slurm.build_agent_command,
    "openmpi": openmpi.build_agent_command,
    "mpich": mpich.build_agent_command,
    "pdsh": pdsh.build_agent_command,
}
# What each says where another try may succeed.
WORTH_ANOTHER_TRY = {
    "ssh": ssh.WORTH_ANOTHER_TRY,
    "slurm": slurm.WORTH_ANOTHER_TRY,
    "openmpi": openmpi.WORTH_ANOTHER_TRY,
    "mpich": mpich.WORTH_ANOTHER_TRY,
    "pdsh": pdsh.WORTH_ANOTHER_TRY,
}
# What to do about what they say otherwise. The MPIs and pdsh reach hosts by ssh, most often.
_HINTS = {**carried.HINTS, **ssh.HINTS, **slurm.HINTS}
# Programs that stay when what they started has failed, and how that is seen.
HAS_GIVEN_UP: Mapping[str, Callable[[int], bool]] = {"mpich": mpich.has_given_up}

_FANOUT = 64  # agents that may be connecting at once
_LEAST_FANOUT = 8  # where hosts, or a jump host before them, turn connections away
_ANSWER_S = 60.0  # for a host to answer; counted anew with each one that does
_LOOK_S = 0.5  # between two looks at programs that stay
_TRIES = 3
_SHOWN = 8


@contextmanager
def lay_run_witness(plan: LaunchPlan, own_worker: bool) -> Iterator[Mapping[str, Any] | None]:
    """Where ranks are elsewhere, a file by which their agents see whether it is the same run directory.

    It must be for our own worker; and in containers, with which logs that are written there would go.
    """
    needed = own_worker or plan.container is not None
    with lay_witness(Path(plan.run_dir), wanted=plan.container is not None or plan.via != "local") as witness:
        yield None if witness is None else {**witness, "needed": needed}


@contextmanager
def lay_witness(folder: Path, *, wanted: bool) -> Iterator[Mapping[str, Any] | None]:
    """A file in ``folder`` by which a program elsewhere sees that it is the same directory there.

    Raises EnvironmentNotReady where it cannot be written.
    """
    if not wanted:
        yield None
        return
    text = uuid.uuid4().hex
    path = folder / f".seen-by-all-hosts-{text[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise EnvironmentNotReady(
            f"cannot write the run directory {folder}: {error.strerror}; nothing was started",
            hint="free space there, or give another --run-dir",
        ) from error
    try:
        yield {"path": str(path), "text": text}
    finally:
        path.unlink(missing_ok=True)


class HostsUnusable(EnvironmentNotReady):
    """Hosts on which no rank can be started: ``hosts`` are their names."""

    def __init__(self, message: str, hosts: Sequence[str], *, hint: str | None) -> None:
        super().__init__(message, hint=hint)
        self.hosts = tuple(hosts)


class Startup:
    """What has been heard of each host so far, and what is still to be done before ranks can start.

    Nothing here walks over all hosts at an event of one.
    """

    def __init__(self, plan: LaunchPlan, *, own_worker: bool = False) -> None:
        self.plan, self.own_worker = plan, own_worker
        self.environ: Mapping[str, str] = {}
        self.leased_port: int | None = None
        self.keep_fds: Sequence[int] = ()
        self.witness: Mapping[str, Any] | None = None
        self._common: Mapping[bool, dict[str, Any]] = {}  # by whether a host is elsewhere
        self.has_started = False
        self._answer_by = float("inf")
        self._look_at = float("inf")
        self._waiting = deque(range(plan.topology.num_nodes))
        self._retries: list[tuple[float, int]] = []  # a heap: when, node rank
        self._fanout = _FANOUT
        self._tries: Counter[int] = Counter()
        self._links: dict[int, AgentLink] = {}
        self._node_ranks: dict[AgentLink, int] = {}
        self._connecting: set[int] = set()
        self._awaited = set(range(plan.topology.num_nodes))  # hosts that are not done with this step
        self._ready: dict[int, dict[str, Any]] = {}
        self._ready_hosts: dict[int, ReadyHost] = {}
        self._asked_to_reach = False
        self._unreached: dict[int, str] = {}
        self._unusable: dict[str, tuple[str, str | None]] = {}

    def equip(
        self,
        environ: Mapping[str, str],
        leased_port: int | None,
        keep_fds: Sequence[int],
        witness: Mapping[str, Any] | None,
    ) -> None:
        """What the agents are given besides the plan; see :func:`dslaunch.launch.orders.build_orders`."""
        self.environ, self.leased_port = environ, leased_port
        self.keep_fds, self.witness = keep_fds, witness
        self._common = {e: common_orders(self.plan, environ, elsewhere=e) for e in (False, True)}

    @property
    def deadline(self) -> float:
        """When to call :meth:`note_silent` and :meth:`start_agents` (monotonic time)."""
        retry_at = self._retries[0][0] if self._retries else float("inf")
        return min(self._answer_by, self._look_at, retry_at)

    # --- agents ---------------------------------------------------------------------------------

    @property
    def is_retrying(self) -> bool:
        """Whether an agent is to be started again, after a moment."""
        return bool(self._retries)

    def start_agents(self) -> list[AgentLink]:
        """Start the agents that may connect now."""
        started = []
        while self._retries and self._retries[0][0] <= time.monotonic():
            self._waiting.append(heapq.heappop(self._retries)[1])
        while self._waiting and len(self._connecting) < self._fanout:
            node_rank = self._waiting.popleft()
            self._tries[node_rank] += 1
            link = self._connect(node_rank, self.plan.topology.hosts[node_rank])
            self._links[node_rank], self._node_ranks[link] = link, node_rank
            self._connecting.add(node_rank)
            started.append(link)
        if started:
            self._answer_by = time.monotonic() + _ANSWER_S
            self._look_at = time.monotonic() + _LOOK_S if self.plan.via in HAS_GIVEN_UP else float("inf")
        return started

    def _connect(self, node_rank: int, host: Host) -> AgentLink:
        is_local = not is_elsewhere(self.plan, host)
        build_agent_command = LAUNCHERS[way_to(self.plan, host)]
        orders = build_orders(
            self.plan, node_rank, environ=self.environ, elsewhere=not is_local,
            leased_port=self.leased_port if node_rank == 0 else None,
            witness=None if is_local else self.witness, needs_cache=self.own_worker,
            common=self._common[not is_local],
        )  # fmt: skip
        command = build_agent_command(host, orders, self.environ, enter_words(self.plan))
        return AgentLink(host, command, self.keep_fds, is_local=is_local)

    def try_again(self, link: AgentLink) -> bool:
        """Whether an agent that was lost before its first word is started anew: we were turned away."""
        node_rank = self._node_ranks[link]
        worth = any(text in link.stderr for text in WORTH_ANOTHER_TRY.get(self.plan.via, ()))
        if link.is_local or link.said_hello or not worth or self._tries[node_rank] >= _TRIES:
            return False
        del self._links[node_rank], self._node_ranks[link]
        self._connecting.discard(node_rank)
        self._fanout = max(_LEAST_FANOUT, self._fanout // 2)
        delay_s = random.uniform(0.1, 0.5) * self._tries[node_rank]
        heapq.heappush(self._retries, (time.monotonic() + delay_s, node_rank))
        return True

    # --- what is heard --------------------------------------------------------------------------

    def note_hello(self, link: AgentLink) -> None:
        link.said_hello = True
        self._connecting.discard(self._node_ranks[link])

    def note_ready(self, link: AgentLink, facts: dict[str, Any]) -> None:
        node_rank = self._node_ranks[link]
        self._ready[node_rank] = facts
        self._ready_hosts[node_rank] = ready_host(link.host.name, len(link.host.slots), facts, time.time())
        self._awaited.discard(node_rank)
        self._answer_by = time.monotonic() + _ANSWER_S

    def note_reached(self, link: AgentLink, problem: str | None) -> None:
        self._awaited.discard(self._node_ranks[link])
        if problem is not None:
            self._unreached[self._node_ranks[link]] = problem

    def note_unusable(self, link: AgentLink, why: str, hint: str | None) -> None:
        node_rank = self._node_ranks[link]
        self._awaited.discard(node_rank)
        self._connecting.discard(node_rank)
        self._unusable.setdefault(link.host.name, (why, hint))

    def note_lost(self, link: AgentLink, how: str) -> None:
        """An agent, or the way to it, ended without a last word."""
        self.note_unusable(link, how, hint_for(link.stderr) or self._silent_hint(link))

    def _silent_hint(self, link: AgentLink) -> str | None:
        by_ssh = self.plan.via == "ssh" and not link.is_local
        return ssh.SILENT_HINT if by_ssh and not link.said_hello and not link.stderr.strip() else None

    def note_silent(self) -> list[AgentLink]:
        """Hosts that have not answered in time are unusable; their links."""
        self._end_those_that_gave_up()
        if time.monotonic() < self._answer_by:
            return []
        self._answer_by = float("inf")
        silent = [self._links[node_rank] for node_rank in sorted(self._awaited) if node_rank in self._links]
        for link in silent:
            words = said(link.stderr, 500, noise=b"" if link.said_hello else link.noise)
            it_said = f"; it said: {words}" if words else ""
            self.note_unusable(link, f"no answer within {_ANSWER_S:g} s{it_said}", self._silent_hint(link))
        return silent

    def _end_those_that_gave_up(self) -> None:
        """So that their end is heard, and what they said."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S if self._connecting else float("inf")
        for link in (self._links[node_rank] for node_rank in self._connecting):
            if HAS_GIVEN_UP[self.plan.via](link.process.pid):
                link.kill()

    def describe_wait(self) -> str | None:
        """Which hosts the start waits for, e.g. ``2 of 3 hosts have answered; waiting for node3``."""
        if self.has_started or not self._awaited:
            return None
        hosts = self.plan.topology.hosts
        total = len(hosts) - self._asked_to_reach
        done = f"reached {hosts[0].name}" if self._asked_to_reach else "answered"
        names = [hosts[node_rank].name for node_rank in sorted(self._awaited)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        waiting = f"waiting for {', '.join(names[:_SHOWN])}{more}"
        return waiting if total == 1 else f"{total - len(names)} of {total} hosts have {done}; {waiting}"

    # --- going on -------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Take the next step where all hosts are done with this one; False where some are not."""
        if self.has_started or self._awaited:
            return False
        if not self._asked_to_reach and self.plan.device_type != "cpu":
            self._refuse_what_is_given_twice()
        self._judge_the_ways()
        if self._unusable:
            return True
        if not self._asked_to_reach and self.plan.topology.num_nodes > 1:
            self._asked_to_reach = True
            self._awaited = set(range(1, self.plan.topology.num_nodes))
            self._answer_by = time.monotonic() + _ANSWER_S
            addr, port = self.meeting_point()
            for node_rank, link in self._links.items():
                if node_rank > 0:
                    link.send("reach", addr=addr, port=port)
            return False
        self._start_ranks()
        return True

    def _refuse_what_is_given_twice(self) -> None:
        """One GPU for two ranks, where two names of hosts lead to one machine."""
        ready = sorted(self._ready_hosts.items())
        hosts = self.plan.topology.hosts
        twice = given_twice([(hosts[n], host.surroundings.identity) for n, host in ready])
        for node_rank, host in ready if twice else ():
            if host.name in twice:
                doubt = one_machine_doubt(*twice[host.name])
                self.note_unusable(self._links[node_rank], doubt.message, doubt.hint)

    def _judge_the_ways(self) -> None:
        """Whose fault it is that some did not reach the first host."""
        if not self._unreached:
            return
        hosts = self.plan.topology.hosts
        unreached = {hosts[node_rank].name: why for node_rank, why in sorted(self._unreached.items())}
        chosen = self.plan.master_addr is not None
        doubts = way_doubts([host.name for host in hosts], self.meeting_point(), unreached, chosen=chosen)
        for node_rank in (0, *self._unreached):
            if (doubt := doubts.get(hosts[node_rank].name)) is not None:
                self.note_unusable(self._links[node_rank], doubt.message, doubt.hint)

    def _start_ranks(self) -> None:
        self.has_started = True
        self._answer_by = float("inf")
        addr, port = self.meeting_point()
        env = {"MASTER_ADDR": addr, "MASTER_PORT": str(port)}
        for link in self._links.values():
            link.send("start", env=env, net=self.plan.topology.num_nodes > 1, time=utc_now())

    def give_up(self) -> None:
        """Start nothing more. What has not led to a host yet ends now: it might try for minutes."""
        self._waiting.clear()
        self._retries.clear()
        for link in (self._links[node_rank] for node_rank in self._connecting):
            if not link.is_local:
                link.kill()
        self._answer_by = float("inf")

    def meeting_point(self) -> tuple[str, int]:
        """MASTER_ADDR and MASTER_PORT, as the agent on host 0 found them."""
        return self._ready[0]["addr"], self._ready[0]["port"]

    def start_facts(self) -> dict[str, Any]:
        """What events.jsonl has of the start of the ranks."""
        addr, port = self.meeting_point()
        return {"master_addr": addr, "master_port": port, "unshared_hosts": self.unshared_hosts}

    @property
    def unshared_hosts(self) -> tuple[str, ...]:
        """Those that do not see the run directory: their ranks' logs are there and not here."""
        return tuple(host.name for _, host in sorted(self._ready_hosts.items()) if host.unseen is not None)

    def doubts(self) -> list[str]:
        """What the user should know of the hosts before their ranks start."""
        hosts = [host for _, host in sorted(self._ready_hosts.items())]
        locks = {lock.path for host in hosts for lock in host.surroundings.locks}
        held = held_here(locks)
        return find_doubts(hosts, clears_locks=self.own_worker, held_here=held, planned=self.plan.devices)

    def refusal(self) -> HostsUnusable | None:
        """The error that names every host that cannot be used, and why."""
        if not self._unusable:
            return None
        hosts = [host.name for host in self.plan.topology.hosts if host.name in self._unusable]
        hints = {hint for _, hint in self._unusable.values()}
        cure = hints.pop() if len(hints) == 1 else None
        hint = "; or ".join(filter(None, (cure, self._without(hosts)))) or None
        lines = [f"{host}: {self._unusable[host][0]}" for host in hosts]
        if len(hosts) == 1:
            return HostsUnusable(f"host {lines[0]}; nothing was started", hosts, hint=hint)
        head = f"{len(hosts)} of {self.plan.topology.num_nodes} hosts cannot be used; nothing was started:"
        shown = [head, *(f"  {line}" for line in lines[:_SHOWN])]
        if len(hosts) > _SHOWN:
            shown.append(f"  and {len(hosts) - _SHOWN} more")
        return HostsUnusable("\n".join(shown), hosts, hint=hint)

    def _without(self, hosts: list[str]) -> str | None:
        if len(hosts) == self.plan.topology.num_nodes:
            return None
        return f"leave out what cannot be used: --exclude {filter_text(hosts)}"


def hint_for(said: bytes) -> str | None:
    """What to do where the way to a host ended with these words; None where nothing is known."""
    return next((hint for words, hint in _HINTS.items() if words in said), None)


def describe_lost_agent(link: AgentLink) -> str:
    """How an agent that was lost without a last word ended, or the way to it, with what that said."""
    code = link.process.wait()
    link.drain_stderr()
    words = said(link.stderr, 1000, noise=b"" if link.said_hello else link.noise)
    if link.is_local:
        code, words = (128 - code, "") if code > 128 else (code, words)  # as its keeper tells a signal
        return f"the agent on {link.host.name} {describe_code(code)}" + (f": {words}" if words else "")
    if not words and link.was_killed:  # by us: its code says nothing, and the client had not seen an end
        return f"the agent on {link.host.name} ended, or the connection to it did"
    end = f" (signal {-code})" if code < 0 else f" (code {code})"  # of the client on this machine
    return f"the connection to {link.host.name} ended" + (f": {words}" if words else end)
