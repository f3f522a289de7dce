"""Runs a LaunchPlan: one agent per host, first failure stops all, nothing is left behind."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dslaunch.core.errors import EXIT_STOPPED_AT_CHECKPOINT, EnvironmentNotReady
from dslaunch.core.events import JsonlWriter
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.run_dir import RunDir
from dslaunch.launch.cause import Cause
from dslaunch.launch.ends import RankEnd, list_ranks
from dslaunch.launch.link import AgentLink
from dslaunch.launch.links import Links
from dslaunch.launch.orders import is_elsewhere
from dslaunch.launch.ports import lease_port, port_seed
from dslaunch.launch.ready import check_ready
from dslaunch.launch.screen import Screen
from dslaunch.launch.signals import FORWARD, SignalInbox, means_kill
from dslaunch.launch.startup import Startup, describe_lost_agent, lay_run_witness
from dslaunch.launch.stopping import SLACK_S, Stopping
from dslaunch.launch.symptoms import is_time_out
from dslaunch.launch.terminal import SafeEvents
from dslaunch.launch.text import printable
from dslaunch.launch.verdict import Outcome, describe_briefly
from dslaunch.launch.watch import Watch

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
    restart: int = 0,
) -> Outcome:
    """Start every rank of ``plan`` and stay until nothing of them is left.

    Rank 0's stdout goes to ``out`` and its stderr to ``err``, byte for byte (on a terminal; elsewhere
    its progress bars are thinned out); of the other ranks only lines that look like errors go to
    ``err``. All of it is in the run directory's logs. The agents inherit ``keep_fds``: a lock in
    it is held until the ranks are gone, even where this process is killed before them.
    ``signals`` is an inbox that is entered already; a cancel in it starts nothing.
    ``own_worker``: the ranks are dslaunch's own, so that their exit codes have its meaning.
    ``restart``: how many starts of this launch came before.

    The exit code is the first failing rank's own, 128+n for a signal; 128+n when
    signal n cancelled the launch; 75 when all ranks stopped at a checkpoint; 1
    when some did and others had to be stopped; 77 when a host's agent was lost.

    Raises ConfigError or EnvironmentNotReady where the ranks cannot be started.
    """
    environ = check_ready(plan)
    here = not is_elsewhere(plan, plan.topology.hosts[0])
    lease = lease_port(plan.master_port, port_seed(environ, str(restart))) if here else None
    try:
        with SignalInbox() if signals is None else contextlib.nullcontext(signals) as inbox:
            launch = _Launch(plan, inbox, SafeEvents(events), Screen(out, err, plan.run_dir), own_worker)
            try:
                with lay_run_witness(plan, own_worker) as witness:
                    launch.startup.equip(environ, None if lease is None else lease.port, keep_fds, witness)
                    launch.start(restart)
                    launch.serve()
                return launch.finish()
            finally:
                launch.close()
    finally:
        if lease is not None:
            lease.close()


class _Launch:
    """One launch as it runs."""

    def __init__(
        self, plan: LaunchPlan, signals: SignalInbox, events: SafeEvents, screen: Screen, own_worker: bool
    ) -> None:
        self.plan, self.own_worker = plan, own_worker
        self.signals, self.events, self.screen = signals, events, screen
        self._say = screen.say
        self.cause = Cause()
        self.startup = Startup(plan, own_worker=own_worker)
        self.watch = Watch(plan, self.startup, screen, own_worker=own_worker)
        self.links = Links(signals.fd, signals.drain)
        self.stopping = Stopping(plan, self.links, screen.say)
        self._stop = self.stopping.stop
        self.started_at = time.monotonic()
        self.pids: dict[int, int] = {}
        self.ends: dict[int, RankEnd] = {}
        self.cancelled_at = float("-inf")
        watched = plan.via != "local" or plan.container is not None
        self.beat_s = plan.host_timeout_s / 6 if watched else float("inf")
        self.next_beat = time.monotonic() + self.beat_s
        self.leftovers, self.slept = 0, ""
        self._handlers: Mapping[str, Callable[[AgentLink, dict[str, Any]], None]] = {
            "hello": self._on_hello,
            "ready": self._on_ready,
            "reached": self._on_reached,
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

    def start(self, restart: int) -> None:
        self.events.write(
            "launch_start",
            restart=restart,
            world_size=self.plan.topology.world_size,
            hosts=[host.name for host in self.plan.topology.hosts],
            via=self.plan.via,
            master_addr=self.plan.master_addr or ("127.0.0.1" if self.plan.topology.num_nodes == 1 else None),
            master_port=self.startup.leased_port or self.plan.master_port,
        )
        self._handle_signals()
        if not self.cause.is_known:
            self.watch.say_what_is_known()
            self._start_agents()

    def _start_agents(self) -> None:
        """As many as may be connecting at once; the others follow when those have answered."""
        for link in self.startup.start_agents():
            self.links.add(link, self._read_events)

    def serve(self) -> None:
        while self.links.opened or self.startup.is_retrying:
            deadlines = (self.stopping.deadline, self.startup.deadline, self.next_beat, self.watch.deadline)
            self.links.wait(min(deadlines))
            self._handle_signals()
            self._check_deadlines()

    def _read_events(self, link: AgentLink) -> bool:
        try:
            for event in link.read_events():
                handler = self._handlers.get(event["event"])
                if handler is not None:  # a "beat" only shows that there is life
                    handler(link, event)
        except EOFError:
            if not link.done:
                self._on_agent_lost(link)
            return False
        return True

    # --- what agents report ---------------------------------------------------------------------

    def _on_hello(self, link: AgentLink, event: dict[str, Any]) -> None:
        self.startup.note_hello(link)
        self.events.write("host_up", host=link.host.name, node=event["node"], python=event["python"])
        self._start_agents()

    def _on_ready(self, link: AgentLink, event: dict[str, Any]) -> None:
        self.startup.note_ready(link, event)
        self._go_on_starting()

    def _on_reached(self, link: AgentLink, event: dict[str, Any]) -> None:
        self.startup.note_reached(link, event["problem"])
        self._go_on_starting()

    def _go_on_starting(self) -> None:
        """The next step of the start, where all hosts are done with this one."""
        if self.cause.is_known or not self.startup.advance():
            return
        if (refusal := self.startup.refusal()) is not None:
            self._refuse(refusal)
        elif self.startup.has_started:
            self.events.write("ranks_start", **self.startup.start_facts())
            for doubt in self.startup.doubts():
                self.watch.note(doubt)

    def _refuse(self, refusal: EnvironmentNotReady) -> None:
        self.cause.refusal = self.cause.refusal or refusal
        self.startup.give_up()
        self._stop(self.plan.failure_grace_s)

    def _on_start(self, link: AgentLink, event: dict[str, Any]) -> None:
        link.groups.add(event["pid"])
        self.pids[event["rank"]] = event["pid"]
        self.events.write("rank_start", rank=event["rank"], host=link.host.name, pid=event["pid"])

    def _on_refused(self, link: AgentLink, event: dict[str, Any]) -> None:
        message = printable(event["message"])
        if not self.startup.has_started:
            self.startup.note_unusable(link, message, event["hint"])
            self._go_on_starting()
            return
        tail = "what had started was stopped" if self.pids else "nothing was started"
        self._refuse(EnvironmentNotReady(f"host {link.host.name}: {message}; {tail}", hint=event["hint"]))

    def _on_output(self, link: AgentLink, event: dict[str, Any]) -> None:
        self.screen.show_output(event, functools.partial(self._note_written, link))

    def _on_error_line(self, link: AgentLink, event: dict[str, Any]) -> None:
        # After the first failure the others only complain about the one that is gone.
        hidden = self.cause.first_failure is not None or self.cause.cancelled_by is not None
        note_written = functools.partial(self._note_written, link)
        self.screen.show_error_line(link.host.name, event, note_written, hidden=hidden)

    def _on_exit(self, link: AgentLink, event: dict[str, Any]) -> None:
        link.groups.discard(event["pid"])
        seconds = time.monotonic() - self.started_at
        end = RankEnd.from_event(event, host=link.host.name, seconds=seconds)
        self.ends[end.rank], code = end, end.code
        self.events.write_exit(end, event["pid"])
        if self.cause.revise(end):
            self.events.write_first_failure(end, own_worker=self.own_worker)
            self._say(f"rank {end.rank} on {end.host} {describe_briefly(code)} before that")
        if code == 0 and not end.asked:
            self.watch.note_ended(end.rank, end.host)
        if code == 0 or end.asked or self.cause.is_known:  # stopped by us: not what went wrong
            return
        if code == EXIT_STOPPED_AT_CHECKPOINT:
            self.stopping.wait_for_checkpoint()  # all ranks stop at the same step
            return
        self.cause.first_failure = end
        self.events.write_first_failure(end, own_worker=self.own_worker)
        if len(self.ends) < self.plan.topology.world_size:
            self._say(f"rank {end.rank} on {end.host} {describe_briefly(code)}; stopping the others")
        if is_time_out(end.tail):
            self.stopping.ask_and_stop()
        else:
            self._stop(self.plan.failure_grace_s)

    def _on_log_error(self, link: AgentLink, event: dict[str, Any]) -> None:
        path = self._log_path(event["rank"])
        self._say(f"cannot write {path}: {event['message']}; the rank runs on, its output there has a gap")

    def _on_stop_asked(self, link: AgentLink, event: dict[str, Any]) -> None:
        if not self.cause.is_known:
            number: int = event["signal"]
            what = f"{signal.Signals(number).name} to the agent on {link.host.name}"
            self._cancel(number, time.monotonic(), what)

    def _on_leftover(self, link: AgentLink, event: dict[str, Any]) -> None:
        self.leftovers += 1
        self.events.write("leftover", host=link.host.name, pid=event["pid"], program=event["name"])
        if not self.cause.is_known and self.leftovers <= _LEFTOVERS_SHOWN:
            process = f"process {event['pid']} ({event['name']}) on {link.host.name}"
            self._say(f"{process} outlived its rank; stopped")

    def _on_done(self, link: AgentLink, event: dict[str, Any]) -> None:
        link.note_done()
        if event["dropped"]:
            log = self._log_path(0)
            self._say(f"{event['dropped']} bytes of rank 0's output were not shown while stopping; see {log}")
        if event["left"]:
            self._say(
                f"processes {event['left']} on {link.host.name} did not die of KILL (stuck in the kernel); "
                "they go when what they wait for ends"
            )

    def _on_agent_lost(self, link: AgentLink) -> None:
        """The end of its stdout without a last word: it died, or the way to it did."""
        link.kill()
        how = describe_lost_agent(link)
        if not self.startup.has_started:
            if self.cause.is_known:
                return  # cancelled or refused: nothing is started any more
            if self.startup.try_again(link):
                self._say(f"{how}; trying again")
                self._start_agents()
                return
            self.startup.note_lost(link, how)
            self._start_agents()
            self._go_on_starting()
            return
        self._lose(link, how)

    def _note_sleep(self, now: float) -> bool:
        """Say it where this process did not run for so long that hosts may have given it up."""
        slept_s = now - self.next_beat
        if slept_s <= self.plan.host_timeout_s / 2:
            return False
        self.next_beat, self.slept = now, f"this launcher did not run for {slept_s:.0f} s"
        self._say(f"{self.slept}; hosts may have taken it for gone")
        return True

    def _lose(self, link: AgentLink, how: str) -> None:
        self._note_sleep(time.monotonic())
        how += f"; {self.slept}" if self.slept else ""
        self.events.write("host_lost", host=link.host.name, how=how)
        if self.cause.note_lost(link.host.name, how, time.monotonic() - self.started_at):
            self._say(f"{how}; its ranks are lost")
        self._stop(self.plan.failure_grace_s)

    # --- stopping -------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        while self.signals.pending:
            number, at = self.signals.pending.popleft()
            name = signal.Signals(number).name
            self.events.write("launcher_signal", signal=name)
            if number in FORWARD:
                self.stopping.pass_on(name.removeprefix("SIG"))
            elif not self.cause.is_known:
                self._cancel(number, at, "Ctrl-C" if number == signal.SIGINT else name)
            elif means_kill(number, at - self.cancelled_at):
                self._say(f"{name}{' again' if self.cause.cancelled_by else ''}: killing what is left")
                self.cause.cancelled_by = self.cause.cancelled_by or number
                self._stop(0.0, "kill")

    def _cancel(self, number: int, at: float, what: str) -> None:
        self.cause.cancelled_by, self.cancelled_at = number, at
        grace_s = self.plan.checkpoint_grace_s
        again = "; once more kills them at once" if number == signal.SIGINT else ""
        if not self.startup.has_started:
            self.startup.give_up()
            self._say(f"{what}: no rank was started")
            self._stop(0.0)
            return
        self._say(f"{what}: ranks were asked to stop and have {grace_s:g} s to write a checkpoint{again}")
        self._stop(grace_s)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        ranks_up, is_ending = len(self.pids) - len(self.ends), self.cause.is_known
        self.watch.tick(now, hosts_up=len(self.links.opened), ranks_up=ranks_up, is_ending=is_ending)
        if now >= self.startup.deadline:
            for link in self.startup.note_silent():
                link.kill()
            self._start_agents()
            self._go_on_starting()
        if now >= self.next_beat:
            self._beat(now)
        if now >= self.stopping.checkpoint_deadline:
            late = self.cause.late = tuple(sorted({*range(self.plan.topology.world_size)} - {*self.ends}))
            self.events.write("checkpoint_late", ranks=late)
            what = "stop at the checkpoint that others stopped at" if self.own_worker else "end as others did"
            self._say(f"{list_ranks(late)} did not {what}; stopping what is left")
            self._stop(self.plan.failure_grace_s)
        self.stopping.tick(now)

    def _beat(self, now: float) -> None:
        """Show the agents elsewhere that we live, and give up those that show no life any more."""
        slept, self.next_beat = self._note_sleep(now), now + self.beat_s
        if slept:  # what they sent in the meantime has yet to be read
            return
        self.slept = ""  # what was lost by it has shown
        # Before ranks run an agent may be busy for longer: with names, a slow file system, a firewall.
        since = now - self.plan.host_timeout_s if self.startup.has_started else float("-inf")
        for link in self.links.beat(silent_since=since):
            link.done = True  # said here in its place
            link.kill()
            self._lose(link, f"no sign of life from {link.host.name} for {self.plan.host_timeout_s:g} s")

    # --- the end --------------------------------------------------------------------------------

    def finish(self) -> Outcome:
        """The outcome, recorded and told. Raises what an agent refused."""
        if (refusal := self.cause.refusal) is not None and self.cause.cancelled_by is None:
            self.events.write("launch_end", exit_code=refusal.exit_code, refused=refusal.message)
            raise refusal
        outcome = Outcome(
            ends=tuple(self.ends[rank] for rank in sorted(self.ends)),
            first_failure=self.cause.first_failure,
            cancelled_by=self.cause.cancelled_by,
            lost=self.cause.lost,
            late=self.cause.late,
            num_ranks=self.plan.topology.world_size,
            own_worker=self.own_worker,
            progress=self.watch.read_progress(),
            unshared_hosts=self.startup.unshared_hosts,
        )
        self.events.write_end(outcome)
        if self.events.problem:
            self._say(f"events.jsonl has a gap: {self.events.problem}")
        self.screen.show_end(outcome)
        return outcome

    def close(self) -> None:
        """Stop what still runs (only after an error of ours), then let the last output out."""
        grace_s = self.plan.failure_grace_s * 2 + SLACK_S
        self.links.close(lambda link: SLACK_S if link.done else grace_s)
        before = len(self.signals.pending)
        self.screen.close(lambda: len(self.signals.pending) > before)

    def _note_written(self, link: AgentLink, num_bytes: int) -> None:
        if link.note_written(num_bytes):  # in a writer's thread
            self.links.send_ack_soon(link)
            self.signals.wake()

    def _log_path(self, rank: int) -> Path:
        return RunDir(Path(self.plan.run_dir)).rank_log(rank)
