"""A batch script's directives and commands: which scheduler, how many nodes and tasks, what it launches."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from dslaunch.config.check.scripts.shell import Command, read_shell
from dslaunch.core.finding import Finding, Severity

Scheduler = Literal["slurm", "pbs", "lsf", "sge", "flux"]

_SENTINELS: dict[Scheduler, re.Pattern[str]] = {
    "slurm": re.compile(r"^#SBATCH(?:\s+|$)(.*)"),
    "pbs": re.compile(r"^#PBS(?:\s+|$)(.*)"),
    "lsf": re.compile(r"^#BSUB(?:\s+|$)(.*)"),
    "sge": re.compile(r"^#\$\s+(-.*)"),
    "flux": re.compile(r"^#\s*flux:\s*(.*)", re.IGNORECASE),
}
_SHORT = {
    "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-G": "--gpus", "-o": "--output",
    "-e": "--error", "-t": "--time", "-p": "--partition", "-K": "--kill-on-bad-exit", "-w": "--nodelist",
}  # fmt: skip
# Commands that start others on the job's nodes.
SPREADERS = {
    "srun", "mpirun", "mpiexec", "mpiexec.hydra", "prun", "prte", "aprun", "jsrun", "lrun", "blaunch",
    "pbsdsh", "pbs_tmrsh", "qrsh", "flux", "ssh", "pdsh", "clush", "parallel", "xargs",
    "dslaunch", "ibrun", "ray",
}  # fmt: skip
# Commands behind which the real one stands.
_WRAPPERS = {
    "singularity", "apptainer", "docker", "podman", "podman-hpc", "shifter", "conda", "mamba", "micromamba",
    "numactl", "timeout", "stdbuf", "nsys", "taskset", "nice", "uv", "poetry", "bash", "sh",
    "python", "python3",
}  # fmt: skip
# Options that take no value: the next word may be a command.
_SRUN_FLAGS = {
    "-l", "-u", "-K", "-v", "-vv", "-Q", "-O", "-E", "-X", "-s", "-k", "--label", "--unbuffered",
    "--exclusive", "--exact", "--overlap", "--overcommit", "--kill-on-bad-exit", "--no-kill",
    "--container-mount-home", "--no-container-mount-home", "--container-writable",
    "--container-remap-root", "--",
}  # fmt: skip
_WRAPPER_FLAGS = {
    "-c", "-lc", "-i", "-u", "--", "--nv", "--rocm", "--cleanenv", "--contain", "--writable-tmpfs",
    "--no-capture-output", "--rm",
}  # fmt: skip


@dataclass(frozen=True)
class Directive:
    """One line for the scheduler. ``ignored``: it stands after the first command, where nobody reads it."""

    line: int
    text: str
    ignored: bool = False


@dataclass
class Job:
    """A batch script as the rules see it."""

    text: str
    scheduler: Scheduler
    directives: list[Directive]
    commands: list[Command]
    options: dict[str, tuple[str, int]] = field(default_factory=dict)  # name, long for Slurm -> (value, line)

    @cached_property
    def nodes(self) -> int | None:
        """Number of nodes; None where the script does not say."""
        if self.scheduler == "slurm":
            return self._slurm_nodes()
        if self.scheduler == "pbs":
            return _pbs_nodes(" ".join(d.text for d in self.directives))
        if self.scheduler == "lsf":
            return _lsf_nodes(" ".join(d.text for d in self.directives))
        if self.scheduler == "flux" and (value := self.number("--nodes")):
            return value
        return None

    @property
    def spans_nodes(self) -> bool:
        return (self.nodes or 0) > 1

    @property
    def tasks_per_node(self) -> int | None:
        """Slurm: tasks that srun starts on each node; None where the script does not say."""
        per_node, tasks = self.number("--ntasks-per-node"), self.number("--ntasks")
        if per_node is not None:
            return per_node
        if tasks is not None and self.nodes:
            return -(-tasks // self.nodes)
        return None if tasks is not None or "--ntasks-per-node" in self.options else 1

    def tasks_of(self, options: Mapping[str, str]) -> int | None:
        """Tasks on each node of an srun with these options of its own; None where they do not say."""
        if per_node := _count(options.get("--ntasks-per-node", "")):
            return per_node
        if "--ntasks" in options:
            tasks, nodes = _count(options["--ntasks"]), _count(options.get("--nodes", "")) or self.nodes
            return -(-tasks // nodes) if tasks and nodes else None
        return self.tasks_per_node

    def _slurm_nodes(self) -> int | None:
        value = self.options.get("--nodes", ("", 0))[0]
        if match := re.match(r"\d+", value):
            return _count(match.group())
        if value or "--ntasks" in self.options:
            tasks, per_node = self.number("--ntasks"), self.number("--ntasks-per-node")
            return -(-tasks // per_node) if tasks and per_node and not value else None
        return None

    def number(self, option: str) -> int | None:
        return _count(self.options.get(option, ("", 0))[0])

    @cached_property
    def launches(self) -> list[Launch]:
        """Every command that starts a launcher of ranks, in order."""
        found = []
        for command in self.commands:
            launcher = find_launcher(command)
            if launcher:
                found.append(Launch(command, launcher))
        return found

    def runs(self, *names: str) -> bool:
        return any(command.name in names for command in self.commands)


@dataclass(frozen=True)
class Launch:
    """``launcher``: deepspeed, torchrun or accelerate; ``command`` may start it through srun."""

    command: Command
    launcher: str

    @property
    def spreader(self) -> str | None:
        """srun, mpirun, ...: what brings it to other nodes; None where it runs on the first alone."""
        return self.command.name if self.command.name in SPREADERS else None

    def has(self, *options: str) -> bool:
        words = self.command.inner_words()
        return any(word == option or word.startswith(f"{option}=") for word in words for option in options)


def finding(code: str, severity: Severity, line: int, message: str, hint: str) -> Finding:
    """A finding about a line of a script."""
    return Finding(code, severity, "", message, line, None, hint)


def read_job(text: str) -> Job | None:
    """The job of a script; None where no line is for a scheduler. Raises nothing."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    lines = text.split("\n")
    found = next(
        (name for line in lines for name, sentinel in _SENTINELS.items() if sentinel.match(line)), None
    )
    if found is None:
        return None
    job = Job(text, found, [], read_shell(text))
    first = min((command.line for command in job.commands), default=len(lines) + 1)
    stops = found in ("slurm", "pbs")  # LSF and SGE read every line
    inside = {command.line for command in job.commands if command.heredoc}
    for number, line in enumerate(lines, start=1):
        if number in inside:
            continue  # another job's script
        if match := _SENTINELS[found].match(line):
            job.directives.append(Directive(number, match[1].strip(), stops and number > first))
    for directive in job.directives:
        if not directive.ignored:
            words = _split(directive.text)
            for name, value in _read_options(words, slurm=found == "slurm")[0].items():
                job.options[name] = (value, directive.line)
    return job


def find_launcher(command: Command) -> str | None:
    """The launcher of ranks that a command starts, itself or behind srun, a container or ``bash -c``."""
    name = command.name
    if (
        name not in SPREADERS
        and name not in _WRAPPERS
        and name not in ("deepspeed", "torchrun", "accelerate")
    ):
        return None
    words = command.inner_words()
    start = _read_options(words[1:], slurm=True)[1] + 1 if name == "srun" else 0
    for index, word in enumerate(words[start:], start=start):
        before = words[index - 1] if index > start else ""
        if before.startswith("-") and before != "-m" and "=" not in before and before not in _WRAPPER_FLAGS:
            continue  # an option's value
        base = word.rpartition("/")[2].strip("'\"();")
        following = words[index + 1] if index + 1 < len(words) else ""
        if base == "deepspeed" and before not in ("install", "activate", "import", "show"):
            return "deepspeed"
        if base == "torchrun" or re.fullmatch(r"torch\.distributed\.(run|launch)", word):
            return "torchrun"
        if base == "accelerate" and following == "launch":
            return "accelerate"
    return None


def srun_options(command: Command) -> dict[str, str]:
    """srun's own options by long name: those before the command that it starts."""
    return _read_options(command.argv()[1:], slurm=True)[0]


def _read_options(words: list[str], *, slurm: bool) -> tuple[dict[str, str], int]:
    """``--name=value``, ``--name value``, ``-N4``, ``-N 4`` under their long names, and where they end."""
    flags = _SRUN_FLAGS if slurm else ()
    found: dict[str, str] = {}
    index = 0
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        index += 1
        name, equals, value = word.partition("=")
        if not name.startswith("--") and len(name) > 2:
            name, value = name[:2], name[2:] + equals + value
        elif not equals and word not in flags and index < len(words) and not words[index].startswith("-"):
            value = words[index]
            index += 1
        found[_SHORT.get(name, name) if slurm else name] = value
        if word == "--":
            break
    return found, index


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def _count(text: str) -> int | None:
    """A number that can be meant; None for other texts, 0 and what no cluster has."""
    return int(text) or None if text.isdecimal() and len(text) < 8 else None


def _pbs_nodes(text: str) -> int | None:
    if match := re.search(r"select=([^\s,]+)", text):
        chunks = [re.match(r"(\d+)", chunk) for chunk in match[1].split("+")]
        return sum((chunk and _count(chunk[1])) or 1 for chunk in chunks)
    match = re.search(r"nodes=(\d+)", text)
    return _count(match[1]) if match else None


def _lsf_nodes(text: str) -> int | None:
    if match := re.search(r"-nnodes\s+(\d+)", text):
        return _count(match[1])
    slots, per_host = re.search(r"-n\s+(\d+)", text), re.search(r"ptile=(\d+)", text)
    number, share = (_count(found[1]) if found else None for found in (slots, per_host))
    if number and share:
        return -(-number // share)
    return 1 if re.search(r"span\[hosts=1\]", text) else None
