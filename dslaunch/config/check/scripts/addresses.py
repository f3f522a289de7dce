"""Hosts, ports and files of a job that others may share."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.config.check.scripts.job import Job, finding, srun_options
from dslaunch.config.check.scripts.shell import Command
from dslaunch.core.finding import Finding

_LOGIN_HOST = re.compile(r"\$\{?(SLURM_SUBMIT_HOST|PBS_O_HOST|SGE_O_HOST|LSB_SUB_HOST)\b")
_MASTER = re.compile(r"(?:\bMASTER_ADDR=|--master[_-]addr[= ]|--main_process_ip[= ])\s*(?P<value>\S.*)")
_PORT = re.compile(
    r"(?:\b(?:MASTER_PORT|master_port)=|--master[_-]port[= ]|--main_process_port[= ])"
    r"['\"]?(?P<port>\d{4,5})\b"
)
_NODELIST = re.compile(r"\$\{?(SLURM_(?:JOB_|STEP_)?NODELIST|SLURM_NODELIST)\b(?P<cut>%|#|:|\[)?")
_SPLIT = re.compile(r"(?:--nodelist|--exclude|-w|-x)[= ]?\s*[\"']?(?P<array>\$\{\w+\[@\][^}]*\})")
_SCHEDULER_FILES = ("PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_HOSTFILE")


def _check_hostfiles(job: Job) -> Iterator[Finding]:
    for launch in job.launches:
        match = re.search(r"(?:--hostfile|-H)[= ]\s*[\"']?\$\{?(\w+)", launch.command.text)
        if launch.launcher == "deepspeed" and match and match[1] in _SCHEDULER_FILES:
            yield finding(
                "hostfile-form",
                "error",
                launch.command.line,
                f"${match[1]} is no DeepSpeed hostfile: its lines have no slots=, and hosts repeat",
                "write one line `host slots=N` for each host",
            )


def _check_made_hostfile(job: Job) -> Iterator[Finding]:
    for command in job.commands:
        if command.name != "srun" or not re.search(r"\bhostname\b.*>\s*\S", command.text):
            continue
        tasks = job.tasks_of(srun_options(command)) or 1
        if tasks > 1:
            message = f"writes each host {tasks} times, once a task; DeepSpeed refuses a host named twice"
            hint = 'use `scontrol show hostnames "$SLURM_JOB_NODELIST"`, with slots=N behind each'
            yield finding("hostfile-form", "error", command.line, message, hint)


def _check_master(job: Job) -> Iterator[Finding]:
    for command in job.commands:
        match = _MASTER.search(command.text)
        if match is None:
            continue
        value = match["value"].strip("\"'")
        if login := _LOGIN_HOST.search(value):
            yield finding(
                "master-addr",
                "error",
                command.line,
                f"${login[1]} is the host that the job was submitted from, not one of the job's",
                "take the first node of the job",
            )
        elif job.spans_nodes and re.match(r"(?:localhost|127\.\d+\.\d+\.\d+|::1)\b", value):
            message = f"MASTER_ADDR {value.split()[0]}: each of the {job.nodes} nodes would wait for itself"
            yield finding("master-addr", "error", command.line, message, "take the first node of the job")
        elif job.spans_nodes and _per_task(command, match.start()) and re.match(r"[`$]\(?\s*hostname", value):
            message = "hostname is run in the task, so every node takes itself for the master"
            yield finding("master-addr", "error", command.line, message, "set it before srun")


def _per_task(command: Command, at: int) -> bool:
    """Whether a place of a command is expanded by the tasks, not by the batch shell."""
    return command.name == "srun" and not command.live[at : at + 8].strip()


def _check_port(job: Job) -> Iterator[Finding]:
    if "--exclusive" in job.options or any(re.search(r"-x\b|excl", d.text) for d in job.directives):
        return
    for command in job.commands:
        match = _PORT.search(command.text)
        if match is None or command.heredoc:
            continue
        message = f"port {match['port']} is fixed: two jobs on one node would meet on it"
        variable = {"slurm": "SLURM_JOB_ID", "lsf": "LSB_JOBID", "sge": "JOB_ID"}.get(job.scheduler)
        hint = (
            f"derive it from the job: $((20000 + {variable} % 20000))"
            if variable
            else "derive it from the job id"
        )
        yield finding("fixed-port", "info", command.line, message, hint)
        return  # once is enough


def _check_nodelist(job: Job) -> Iterator[Finding]:
    """gpu[001-003,7] is one word: cutting it at commas or dashes gives hosts that are not there."""
    if job.scheduler != "slurm":
        return
    for index, command in enumerate(job.commands):
        match = _NODELIST.search(command.text)
        if match is None or "hostnames" in command.text or "hostlist" in command.text.lower():
            continue
        following = job.commands[index + 1] if index + 1 < len(job.commands) else command
        piped = command.end == "|" and following.name in ("cut", "head", "awk", "sed", "tr", "perl", "grep")
        inner = re.search(r"\|\s*(?:cut|head|awk|sed|tr|perl)\b|(?:cut|awk|sed|tr)\b[^|]*<<<", command.text)
        master = (found := _MASTER.search(command.text)) and found["value"].strip("\"'").startswith(
            match.group()
        )
        if (
            piped
            or inner
            or master
            or (match["cut"] in ("%", "#", ":") and not _default(command.text, match))
        ):
            message = f"${match[1]} is compact (gpu[001-003]): a piece of it is no host name"
            hint = 'use `scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1`'
            yield finding("nodelist-cut", "warning", command.line, message, hint)


def _check_split_nodelist(job: Job) -> Iterator[Finding]:
    """``--nodelist="${NODES[@]}"`` is a word for each node: all but the first become srun's command."""
    for command in job.commands:
        if command.name == "srun" and (match := _SPLIT.search(command.text)):
            message = f"{match['array']} is a word for each node: srun takes the second one for the command"
            joined = match["array"].replace("[@]", "[*]")
            hint = f'join them by commas: $(IFS=,; echo "{joined}")'
            yield finding("nodelist-split", "error", command.line, message, hint)


def _default(text: str, match: re.Match[str]) -> bool:
    """``${NAME:-x}`` and ``${NAME:?x}`` cut nothing."""
    return text[match.end() : match.end() + 1] in ("-", "=", "?", "+")


def _check_files(job: Job) -> Iterator[Finding]:
    for command in job.commands:
        if re.search(r">>\s*\S*\.deepspeed_env\b", command.text):
            message = ".deepspeed_env grows with every job, and each later one reads what is left there"
            yield finding("env-file-grows", "warning", command.line, message, "write it anew with >")
        if command.name in ("cat", "tee") and "<<" in command.text:
            written = re.search(r"(?:>|\btee)\s*[\"']?([^\s\"']+\.json)\b", command.text)
            if written and "$" not in written[1] and not written[1].startswith("/tmp/"):
                message = f"{written[1]} is written by every job: two jobs overwrite each other's"
                yield finding("shared-path", "info", command.line, message, "put the job id into its name")


RULES = (
    _check_hostfiles,
    _check_made_hostfile,
    _check_master,
    _check_port,
    _check_nodelist,
    _check_split_nodelist,
    _check_files,
)
