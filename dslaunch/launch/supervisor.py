"""Runs a LaunchPlan: one agent per host, first failure stops all, nothing is left behind."""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dslaunch.core.command import Command
from dslaunch.core.errors import EXIT_STOPPED_AT_CHECKPOINT, EnvironmentNotReady
from dslaunch.core.events import JsonlWriter
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.core.topology import Host
from dslaunch.launch import local
from dslaunch.launch.link import AgentLink
from dslaunch.launch.orders import build_orders
from dslaunch.launch.ports import lease_port
from dslaunch.launch.ready import check_ready
from dslaunch.launch.signals import FORWARD, SignalInbox, means_kill
from dslaunch.launch.terminal import SafeEvents, StreamWriter
from dslaunch.launch.text import printable
from dslaunch.launch.verdict import Outcome, RankEnd, describe_code, list_ranks, render_end

# One file per way to reach a host; each turns (host, orders) into the Command that starts its agent.
LAUNCHERS: Mapping[str, Callable[[Host, dict[str, Any]], Command]] = {"local": local.build_agent_command}

_AGENT_SLACK_S = 20.0  # an agent that has been told to stop and is silent this much longer is killed
_LEFTOVERS_SHOWN = 5


def supervise(
    plan: LaunchPlan,
    *,
    events: JsonlWriter | None,
    out: BinaryIO,
    err: BinaryIO,
    keep_fds: Sequence[int] = (),
    signals: SignalInbox | None = None,
    own_worker: bool = False,
) -> Outcome:
    """Start every rank of ``plan`` and stay until nothing of them is left.

    Rank 0's stdout goes to ``out`` and its stderr to ``err``, byte for byte; of
    the other ranks only lines that look like errors go to ``err``. All of it is in
    the run directory's logs. The agents inherit ``keep_fds``: a lock in it is held
    until the ranks are gone, even where this process is killed before them.
    ``signals`` is an inbox that is entered already; a cancel in it starts nothing.
    ``own_worker``: the ranks are dslaunch's own, so that their exit codes have its meaning.

    The exit code is the first failing rank's own, 128+n for a signal; 128+n when
    signal n cancelled the launch; 75 when all ranks stopped at a checkpoint; 1
    when some did and others had to be stopped; 77 when a host's agent was lost.

    Raises ConfigError or EnvironmentNotReady where the ranks cannot be started.
    """
    environ = check_ready(plan)
    lease = lease_port(plan.master_port)
    try:
        with SignalInbox() if signals is None else contextlib.nullcontext(signals) as inbox:
            writers = StreamWriter(out), StreamWriter(err)
            launch = _Launch(plan, inbox, SafeEvents(events), *writers, own_worker)
            try:
                launch.start(lease.port, environ, keep_fds)
                launch.serve()
                return launch.finish()
            finally:
                launch.close()
    finally:
        lease.close()


class _Launch:
    """One launch as it runs."""

    def __init__(
        self, plan: LaunchPlan, signals: SignalInbox, events: SafeEvents, out: StreamWriter,
        err: StreamWriter, own_worker: bool,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.own_worker = own_worker
        self.signals = signals
        self.events = events
        self.out, self.err = out, err
        self.links: list[AgentLink] = []
        self.selector = selectors.DefaultSelector()
        self.started_at = time.monotonic()
        self.hosts = {place.rank: place.host for place in plan.topology.ranks()}
        self.pids: dict[int, int] = {}
        self.ends: dict[int, RankEnd] = {}
        self.shown: dict[int, set[str]] = {}  # by rank: lines of stderr that the user has seen
        self.first_failure: RankEnd | None = None
        self.cancelled_by: int | None = None
        self.cancelled_at = float("-inf")
        self.late: tuple[int, ...] = ()
        self.lost_host: str | None = None
        self.refusal: EnvironmentNotReady | None = None
        self.checkpoint_deadline = float("inf")
        self.kill_agents_at = float("inf")
        self.leftovers = 0
        self._handlers: Mapping[str, Callable[[AgentLink, dict[str, Any]], None]] = {
            "start": self._on_start,
            "refused": self._on_refused,
            "output": self._on_output,
            "error_line": self._on_error_line,
            "exit": self._on_exit,
            "log_error": self._on_log_error,
            "stop_asked": self._on_stop_asked,
            "leftover": self._on_leftover,
            "done": self._on_done,
        }

    # --- starting and serving -------------------------------------------------------------------

    def start(self, master_port: int, environ: Mapping[str, str], keep_fds: Sequence[int]) -> None:
        self.events.write(
            "launch_start",
            world_size=self.plan.topology.world_size,
            hosts=[host.name for host in self.plan.topology.hosts],
            via=self.plan.via,
            master_addr=self.plan.master_addr or "127.0.0.1",
            master_port=master_port,
        )
        build_agent_command = LAUNCHERS[self.plan.via]
        self.selector.register(self.signals.fd, selectors.EVENT_READ, None)
        self._handle_signals()
        if self._is_ending():
            return
        for node_rank, host in enumerate(self.plan.topology.hosts):
            orders = build_orders(self.plan, node_rank, master_port=master_port, environ=environ)
            link = AgentLink(host, build_agent_command(host, orders), keep_fds)
            self.links.append(link)
            self.selector.register(link.stdout_fd, selectors.EVENT_READ, (link, self._read_events))
            self.selector.register(link.stderr_fd, selectors.EVENT_READ, (link, self._read_stderr))

    def serve(self) -> None:
        open_links = set(self.links)
        while open_links:
            for key, _ in self.selector.select(self._timeout()):
                if key.data is None:
                    self.signals.drain()
                    continue
                link, read = key.data
                if not read(link):
                    self.selector.unregister(key.fd)
                    if key.fd == link.stdout_fd:
                        open_links.discard(link)
            self._handle_signals()
            for link in self.links:
                link.send_ack()
            self._check_deadlines()

    def _timeout(self) -> float | None:
        deadline = min(self.checkpoint_deadline, self.kill_agents_at)
        return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())

    def _read_stderr(self, link: AgentLink) -> bool:
        return link.read_stderr()

    def _read_events(self, link: AgentLink) -> bool:
        try:
            for event in link.read_events():
                handler = self._handlers.get(event["event"])
                if handler is not None:  # "hello" says nothing that is needed here
                    handler(link, event)
        except EOFError:
            if not link.done:
                self._on_agent_lost(link)
            return False
        return True

    # --- what agents report ---------------------------------------------------------------------

    def _on_start(self, link: AgentLink, event: dict[str, Any]) -> None:
        link.groups.add(event["pid"])
        self.pids[event["rank"]] = event["pid"]
        self.events.write("rank_start", rank=event["rank"], host=link.host.name, pid=event["pid"])

    def _on_refused(self, link: AgentLink, event: dict[str, Any]) -> None:
        tail = "; nothing was started" if not self.pids else "; what had started was stopped"
        message = f"host {link.host.name}: {printable(event['message'])}{tail}"
        self.refusal = self.refusal or EnvironmentNotReady(message, hint=event["hint"])
        self._stop(self.plan.failure_grace_s)

    def _on_output(self, link: AgentLink, event: dict[str, Any]) -> None:
        data = event["data"].encode("utf-8", "surrogateescape")
        writer = self.out if event["stream"] == "stdout" else self.err
        writer.write(data, lambda: self._note_written(link, len(data)))

    def _on_error_line(self, link: AgentLink, event: dict[str, Any]) -> None:
        line = event["data"].encode("utf-8", "surrogateescape")
        # After the first failure the others only complain about the one that is gone.
        show = self.first_failure is None and self.cancelled_by is None
        text = f"{link.host.name}:{event['rank']}| ".encode() + line + b"\n" if show else b""
        if show:
            self.shown.setdefault(event["rank"], set()).add(event["data"])
        self.err.write(text, lambda: self._note_written(link, event["bytes"]))

    def _on_exit(self, link: AgentLink, event: dict[str, Any]) -> None:
        link.groups.discard(event["pid"])
        code: int = event["code"]
        end = RankEnd(
            rank=event["rank"],
            host=link.host.name,
            code=code,
            seconds=time.monotonic() - self.started_at,
            max_rss_bytes=event["max_rss_kib"] * 1024,
            asked=event["asked"],
            tail=tuple(event["tail"]),
        )
        self.ends[end.rank] = end
        self._record_exit(end, event["pid"])
        if code == 0 or end.asked or self._is_ending():  # stopped by us: not what went wrong
            return
        if code == EXIT_STOPPED_AT_CHECKPOINT:
            # All ranks stop at the same step; the others are about to exit the same way.
            grace_s = self.plan.checkpoint_grace_s
            self.checkpoint_deadline = min(self.checkpoint_deadline, time.monotonic() + grace_s)
            return
        self.first_failure = end
        how = describe_code(code, own_worker=self.own_worker)
        self.events.write("first_failure", rank=end.rank, host=end.host, how=how, stderr=list(end.tail))
        if len(self.ends) < self.plan.topology.world_size:
            self._say(f"rank {end.rank} on {end.host} {_briefly(code)}; stopping the others")
        self._stop(self.plan.failure_grace_s)

    def _on_log_error(self, link: AgentLink, event: dict[str, Any]) -> None:
        path = self._log_path(event["rank"])
        self._say(f"cannot write {path}: {event['message']}; the rank runs on, its output there has a gap")

    def _on_stop_asked(self, link: AgentLink, event: dict[str, Any]) -> None:
        if not self._is_ending():
            number: int = event["signal"]
            what = f"{signal.Signals(number).name} to the agent on {link.host.name}"
            self._cancel(number, time.monotonic(), what)

    def _on_leftover(self, link: AgentLink, event: dict[str, Any]) -> None:
        self.leftovers += 1
        stopped_by_us = self.cancelled_by is not None or self.first_failure is not None
        self.events.write("leftover", host=link.host.name, pid=event["pid"], program=event["name"])
        if not stopped_by_us and self.leftovers <= _LEFTOVERS_SHOWN:
            process = f"process {event['pid']} ({event['name']}) on {link.host.name}"
            self._say(f"{process} outlived its rank; stopped")

    def _on_done(self, link: AgentLink, event: dict[str, Any]) -> None:
        link.done = True
        link.groups.clear()
        if event["dropped"]:
            log = self._log_path(0)
            self._say(f"{event['dropped']} bytes of rank 0's output were not shown while stopping; see {log}")
        if event["left"]:
            self._say(
                f"processes {event['left']} on {link.host.name} did not die of KILL (stuck in the kernel); "
                "they go when what they wait for ends"
            )

    def _on_agent_lost(self, link: AgentLink) -> None:
        link.kill_groups()
        code = link.process.wait()
        while link.read_stderr():  # its last words, which may not have been read yet
            pass
        words = printable(link.stderr.decode("utf-8", "replace").strip()[-1000:])
        how = f"the agent on {link.host.name} {describe_code(code)}" + (f": {words}" if words else "")
        self.events.write("host_lost", host=link.host.name, how=how)
        if not self.pids:
            self.refusal = self.refusal or EnvironmentNotReady(f"{how}; nothing was started")
        elif not self._is_ending():
            self.lost_host = link.host.name
            self._say(f"{how}; its ranks are lost")
        self._stop(self.plan.failure_grace_s)

    # --- stopping -------------------------------------------------------------------------------

    def _is_ending(self) -> bool:
        """Whether the ranks were told to stop: what ends from then on is not the reason for it."""
        reasons = (self.first_failure, self.cancelled_by, self.lost_host, self.refusal)
        return bool(self.late) or any(reason is not None for reason in reasons)

    def _stop(self, grace_s: float) -> None:
        for link in self.links:
            link.send("stop", grace_s=grace_s)
        self._note_stop(grace_s)

    def _kill(self) -> None:
        for link in self.links:
            link.send("kill")
        self._note_stop(0.0)

    def _note_stop(self, grace_s: float) -> None:
        limit = time.monotonic() + grace_s + self.plan.failure_grace_s + _AGENT_SLACK_S
        self.kill_agents_at = min(self.kill_agents_at, limit)
        self.checkpoint_deadline = float("inf")

    def _handle_signals(self) -> None:
        while self.signals.pending:
            number, at = self.signals.pending.popleft()
            name = signal.Signals(number).name
            self.events.write("launcher_signal", signal=name)
            if number in FORWARD:
                for link in self.links:
                    link.send("signal", name=name.removeprefix("SIG"))
            elif not self._is_ending():
                self._cancel(number, at, "Ctrl-C" if number == signal.SIGINT else name)
            elif means_kill(number, at - self.cancelled_at):
                self._say(f"{name} again: killing what is left" if self.cancelled_by else f"{name}: killing")
                self.cancelled_by = self.cancelled_by or number
                self._kill()

    def _cancel(self, number: int, at: float, what: str) -> None:
        self.cancelled_by, self.cancelled_at = number, at
        grace_s = self.plan.checkpoint_grace_s
        again = "; once more kills them at once" if number == signal.SIGINT else ""
        if not self.links:
            self._say(f"{what}: no rank was started")
            return
        self._say(f"{what}: ranks were asked to stop and have {grace_s:g} s to write a checkpoint{again}")
        self._stop(grace_s)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now >= self.checkpoint_deadline:
            self.late = tuple(sorted(set(self.hosts) - set(self.ends)))
            self.events.write("checkpoint_late", ranks=list(self.late))
            what = "stop at the checkpoint that others stopped at" if self.own_worker else "end as others did"
            self._say(f"{list_ranks(list(self.late))} did not {what}; stopping what is left")
            self._stop(self.plan.failure_grace_s)
        if now >= self.kill_agents_at:
            self.kill_agents_at = float("inf")
            for link in self.links:
                if not link.done:
                    self._say(f"the agent on {link.host.name} does not answer; killing it and its ranks")
                    link.kill()

    # --- the end --------------------------------------------------------------------------------

    def finish(self) -> Outcome:
        """The outcome, recorded and told. Raises what an agent refused."""
        if self.refusal is not None:
            self.events.write("launch_end", exit_code=self.refusal.exit_code, refused=self.refusal.message)
            raise self.refusal
        outcome = Outcome(
            ends=tuple(self.ends[rank] for rank in sorted(self.ends)),
            first_failure=self.first_failure,
            cancelled_by=self.cancelled_by,
            lost_host=self.lost_host,
            late=self.late,
            num_ranks=self.plan.topology.world_size,
            own_worker=self.own_worker,
        )
        self.events.write("launch_end", exit_code=outcome.exit_code)
        if self.events.problem:
            self._say(f"events.jsonl has a gap: {self.events.problem}")
        first = -1 if outcome.first_failure is None else outcome.first_failure.rank
        # Of rank 0 all was shown as it came, of the others single lines.
        shown = None if first == 0 else frozenset(self.shown.get(first, ()))
        words = render_end(outcome, RunDir(Path(self.plan.run_dir)), shown=shown)
        self.err.write(words.encode("utf-8", "surrogateescape"))
        return outcome

    def close(self) -> None:
        """Stop what still runs (only after an error of ours), then let the last output out."""
        for link in self.links:
            link.close(self.plan.failure_grace_s * 2 + _AGENT_SLACK_S if not link.done else _AGENT_SLACK_S)
        self.selector.close()
        before = len(self.signals.pending)
        self.out.close(lambda: len(self.signals.pending) > before)
        if self.out.problem is not None:
            log = self._log_path(0)
            self._say(f"rank 0's output could not all be written here: {self.out.problem}; see {log}")
        self.err.close(lambda: len(self.signals.pending) > before)

    # --- small things ---------------------------------------------------------------------------

    def _record_exit(self, end: RankEnd, pid: int) -> None:
        how = {"exit_code": end.code} if end.code >= 0 else {"signal": -end.code}
        self.events.write(
            "rank_exit", rank=end.rank, host=end.host, pid=pid, seconds=round(end.seconds, 3),
            max_rss_bytes=end.max_rss_bytes, asked=end.asked, **how,
        )  # fmt: skip

    def _note_written(self, link: AgentLink, num_bytes: int) -> None:
        if link.note_written(num_bytes):  # in a writer's thread
            self.signals.wake()

    def _log_path(self, rank: int) -> Path:
        return RunDir(Path(self.plan.run_dir)).rank_log(rank)

    def _say(self, text: str) -> None:
        self.err.write(f"dslaunch: {text}\n".encode("utf-8", "surrogateescape"))


def _briefly(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
