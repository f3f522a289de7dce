"""Asks hosts, all at once, what a run would find there (probe.py), and tries the way to the first of them."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dslaunch.core.command import Command, holds_secret
from dslaunch.core.plan import Via
from dslaunch.core.topology import Host, is_this_machine
from dslaunch.launch import agent, mpich, openmpi, probe, slurm, ssh
from dslaunch.launch.asking import NoAnswer, Program
from dslaunch.launch.carried import LOADER, loader_argv, packed
from dslaunch.launch.container import without_the_images_own
from dslaunch.launch.orders import encode_orders, forwarded
from dslaunch.launch.preflight import Surroundings, surroundings_fields
from dslaunch.launch.startup import HAS_GIVEN_UP, WORTH_ANOTHER_TRY

_FANOUT = 64
_TRIES = 3
_PEERS = 8  # other hosts whose names each host looks up

# Puts the agent where the probe imports it from; neither needs dslaunch to be installed.
_BUNDLE = """
import sys, types
for name in ("dslaunch", "dslaunch.launch", "dslaunch.launch.agent"):
    sys.modules[name] = types.ModuleType(name)
agent = sys.modules["dslaunch.launch"].agent = sys.modules["dslaunch.launch.agent"]
exec(compile({agent!r}, "agent.py", "exec"), agent.__dict__)
exec(compile({probe!r}, "probe.py", "exec"))
"""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The ranks' Python on one host. ``problem``: why it cannot be used; all else is empty then.

    ``packages``: name -> version, None where it is not there.
    """

    problem: str | None = None
    version: str = ""
    packages: Mapping[str, str | None]
    torch_cuda: str | None = None
    has_headers: bool = False


@dataclass(frozen=True, kw_only=True)
class HostFacts(Surroundings):
    """What one host has; probe.py says how it is found out.

    ``tools``: name -> version, "" where it does not tell, None where it is not there.
    ``files``: path -> text, ``device_files``: paths; :func:`root_of` makes a root of them.
    """

    node: str
    glibc: str | None
    cpu: str
    cores: int
    interpreter: Interpreter
    tools: Mapping[str, str | None]
    files: Mapping[str, str]
    device_files: Sequence[str]
    smi: str | None
    visible: Mapping[str, str]
    ops: str
    has_cwd: bool
    witness: str | None  # why the run directory is not seen there
    addresses: Mapping[str, Sequence[str] | None]
    own_addresses: Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What came of one host. ``problem``: why it did not answer; ``facts`` are None then.

    ``skew_s``: how far its clock is ahead of ours, as far as that is certain. ``meets_at``: address and
    port at which the others find it, of the first host alone; ``meet_problem``: why there is none, and
    a hint. ``unreached``: why no connection to it was had; ``interface``: on the way there.
    """

    host: Host
    facts: HostFacts | None = None
    problem: str | None = None
    skew_s: float = 0.0
    meets_at: tuple[str, int] | None = None
    meet_problem: tuple[str, str] | None = None
    unreached: str | None = None
    interface: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """What is asked of every host; see probe.py. ``environ`` is this machine's, ``env`` what ranks are
    given everywhere; ``gpus``: for srun.
    """

    python: str
    packages: Sequence[str]
    environ: Mapping[str, str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str
    witness: Mapping[str, str] | None
    cache: str
    ops: str
    smi: Sequence[str]
    master_addr: str | None = None
    master_port: int | None = None
    via: Via = "ssh"  # by it all hosts are reached, by ssh those that are not this machine
    within: Sequence[str] = ()  # words that lead into a container on each host
    gpus: bool = False


def probe_hosts(hosts: Sequence[Host], request: ProbeRequest, *, timeout_s: float) -> tuple[Probed, ...]:
    """Ask every host, 64 at a time; each has ``timeout_s`` to answer. Starts and changes nothing there.

    The first host listens on a free port while the others connect to it.
    """
    place: Future[tuple[str, int] | None] = Future()
    have_tried = threading.Semaphore(0)

    def ask(node_rank: int) -> Probed:
        try:
            with _answering(hosts, node_rank, request, timeout_s) as (program, probed):
                if node_rank == 0:
                    place.set_result(None if probed.meets_at is None else probed.meets_at)
                    for _ in hosts[1:]:
                        have_tried.acquire()
                elif (where := place.result()) is not None:
                    tried = program.ask({"addr": where[0], "port": where[1]}, "reached")
                    return replace(probed, unreached=tried["problem"], interface=tried["interface"])
                return probed
        except NoAnswer as error:
            return Probed(host=hosts[node_rank], problem=str(error))
        finally:
            if node_rank > 0:
                have_tried.release()
            elif not place.done():
                place.set_result(None)

    with ThreadPoolExecutor(min(_FANOUT, len(hosts))) as pool:
        return tuple(pool.map(ask, range(len(hosts))))


@contextlib.contextmanager
def root_of(facts: HostFacts) -> Iterator[Path]:
    """A folder that looks like the host's / to the functions of core that read /proc and /sys."""
    with TemporaryDirectory(prefix="dslaunch-doctor-") as name:
        for path, text in (*facts.files.items(), *((path, "") for path in facts.device_files)):
            target = Path(name, path.lstrip("/"))
            if ".." in target.parts:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", errors="replace")
        yield Path(name)


@contextlib.contextmanager
def _answering(
    hosts: Sequence[Host], node_rank: int, request: ProbeRequest, timeout_s: float
) -> Iterator[tuple[Program, Probed]]:
    """The probe on one host and what it has found, while it still runs. Raises NoAnswer."""
    host = hosts[node_rank]
    is_local = is_here(request.via, host)
    stdin = _packed_probe() + encode_orders(_orders(hosts, node_rank, request, is_local=is_local))
    command = _command(host, stdin, request, is_local=is_local)
    worth = WORTH_ANOTHER_TRY.get(request.via, ())
    for attempt in range(1, _TRIES + 1):
        program = Program(command, timeout_s, HAS_GIVEN_UP.get(request.via, lambda _: False))
        try:
            began = time.time()
            hello = program.ask(command.stdin or b"", "hello")
            heard = time.time()
        except NoAnswer:
            turned_away = any(text in program.said() for text in worth)
            program.close()
            if is_local or not turned_away or attempt == _TRIES:
                raise
            time.sleep(random.uniform(0.1, 0.5) * attempt)
            continue
        try:
            answer = program.ask(b"", "facts")
            # Its clock was read between the two of ours.
            skew_s = min(0.0, hello["time"] - began) + max(0.0, hello["time"] - heard)
            yield program, _probed(host, answer, skew_s)
        finally:
            program.close()
        return


def is_here(via: Via, host: Host) -> bool:
    """Whether a host is asked without that way to it: this machine, where ssh would lead to it."""
    return via in ("local", "ssh") and is_this_machine(host.name)


def _command(host: Host, stdin: bytes, request: ProbeRequest, *, is_local: bool) -> Command:
    within = request.within
    if is_local:
        loader = loader_argv() if within else (sys.executable, "-I", "-S", "-c", LOADER)
        return Command(argv=(*within, *loader), stdin=stdin)
    if request.via == "slurm":
        return slurm.build_command(host, stdin, request.environ, gpus=request.gpus, within=within)
    if request.via == "openmpi":
        return openmpi.build_command(host, stdin, within)
    if request.via == "mpich":
        return mpich.build_command(host, stdin, request.environ, within)
    return ssh.build_command(host, stdin, within)


def _probed(host: Host, answer: dict[str, Any], skew_s: float) -> Probed:
    meet = answer["meet"]
    return Probed(
        host=host,
        facts=_host_facts(answer["facts"]),
        skew_s=skew_s,
        meets_at=None if meet["addr"] is None else (meet["addr"], meet["port"]),
        meet_problem=None if meet["problem"] is None else (meet["problem"], meet["hint"]),
    )


def _host_facts(found: dict[str, Any]) -> HostFacts:
    interpreter = Interpreter(**{"packages": {}, **found["interpreter"]})
    return HostFacts(**found | surroundings_fields(found) | {"interpreter": interpreter})


def _orders(
    hosts: Sequence[Host], node_rank: int, request: ProbeRequest, *, is_local: bool
) -> dict[str, Any]:
    env = forwarded(request.environ) if request.via != "slurm" and not is_local else {}
    if request.within:
        env = without_the_images_own(forwarded(request.environ))
    env = {**env, **request.env}
    others = [host.name for host in hosts if host is not hosts[node_rank]][:_PEERS]
    meet = {"peers": others, "addr": request.master_addr, "port": request.master_port}
    return {
        "python": request.python,
        "packages": list(request.packages),
        "env": {name: value for name, value in env.items() if not holds_secret(name, value)},
        "cwd": request.cwd,
        "witness": request.witness if request.within or not is_local else None,
        "cache": request.cache,
        "ops": request.ops,
        "ops_cpu": None if "TORCH_EXTENSIONS_DIR" in request.environ or request.within else agent.cpu_key(),
        "smi": list(request.smi),
        "names": others,
        "meet": meet if node_rank == 0 else None,
    }


@cache
def _packed_probe() -> bytes:
    ours, theirs = (Path(str(module.__file__)).read_text("utf-8") for module in (probe, agent))
    return packed(_BUNDLE.format(agent=theirs, probe=ours).encode())
