"""How ranks are started: once on every node, each with its own number."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.config.check.scripts.job import Job, Launch, finding, srun_options
from dslaunch.core.finding import Finding

_TASK_VARIABLE = re.compile(r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID))\b")
_SPREAD = {
    "slurm": "srun --ntasks-per-node=1 ...",
    "pbs": "pbsdsh or mpiexec --ppn 1 ...",
    "lsf": "blaunch -z ...",
    "sge": "qrsh -inherit ...",
}
_RANK_USE = re.compile(r"\bsrun\b|rank|RANK|NODE_?ID|machine|index", re.ASCII)


def _check_early_ranks(job: Job) -> Iterator[Finding]:
    """A task's own number, expanded by the batch shell, is that of the first task for all of them."""
    if job.scheduler != "slurm":
        return
    for command in job.commands:
        match = _TASK_VARIABLE.search(command.live)
        if match is None or not _RANK_USE.search(_TASK_VARIABLE.sub("", command.text)):
            continue
        if command.name in ("echo", "printf", "[", "[[", "test") or command.in_function:
            continue
        if match[1] == "SLURM_NODEID" and job.nodes == 1:
            continue
        if job.nodes == 1 and job.tasks_per_node == 1:
            continue
        certain = job.spans_nodes or job.nodes == 1
        yield finding(
            "rank-too-early",
            "error" if certain else "warning",
            command.line,
            f"${match[1]} is expanded here by the batch shell, where it is 0: every task gets 0",
            f"let the task expand it: srun bash -c '... ${match[1]} ...' in single quotes",
        )


def _check_gpus(job: Job) -> Iterator[Finding]:
    if job.scheduler != "slurm":
        return
    places = [(value, line) for name, (value, line) in job.options.items() if name == "--gpus-per-task"]
    places += [
        (value, command.line)
        for command in job.commands
        if command.name == "srun" and (value := srun_options(command).get("--gpus-per-task"))
    ]
    for value, line in places:
        if value.rpartition(":")[2] == "1" and job.tasks_per_node != 1:
            message = (
                "--gpus-per-task=1 shows each task one GPU as number 0, but local rank 1 looks for number 1"
            )
            hint = "write --gpus-per-node=N: NCCL needs to see the peers, too"
            yield finding("gpus-per-task", "warning", line, message, hint)


def _check_launchers(job: Job) -> Iterator[Finding]:
    """Launchers start the ranks of one node; they must run once on every node."""
    for launch in job.launches:
        if launch.command.heredoc:
            continue
        if launch.spreader == "srun":
            yield from _check_spread(job, launch)
        elif launch.spreader is None and job.spans_nodes and not launch.command.in_function:
            yield from _check_first_node(job, launch)


def _check_spread(job: Job, launch: Launch) -> Iterator[Finding]:
    options = srun_options(launch.command)
    tasks, line = job.tasks_of(options), launch.command.line
    if (tasks or 1) > 1 and not _one_rank(launch):
        yield finding(
            "launcher-per-task",
            "error",
            line,
            f"srun starts {launch.launcher} {tasks} times on each node, and each starts a whole node's ranks",
            "add --ntasks-per-node=1 to srun, or start the script itself once per rank",
        )
    alone = options.get("--nodes") == "1" or options.get("--ntasks") == "1"
    told = launch.has("--no_ssh") or launch.has("--node_rank")
    if launch.launcher == "deepspeed" and job.spans_nodes and not alone and not told:
        yield finding(
            "launcher-per-node",
            "error",
            line,
            "srun starts deepspeed on every node; each trains alone or starts all the nodes again",
            "start deepspeed once with --hostfile, or add --no_ssh and --node_rank, or use torchrun",
        )


def _one_rank(launch: Launch) -> bool:
    """Whether the launcher starts a single rank: then one per task is right."""
    text = launch.command.text
    return bool(re.search(r"--(?:nproc[_-]per[_-]node|num_gpus|num_processes)[= ]['\"]?1\b", text))


def _check_first_node(job: Job, launch: Launch) -> Iterator[Finding]:
    if launch.has("--hostfile", "-H", "--launcher") or _in_loop(job):
        return
    spread = _SPREAD.get(job.scheduler, "flux run -N ...")
    hint = "give it --hostfile FILE" if launch.launcher == "deepspeed" else f"start it on each node: {spread}"
    yield finding(
        "first-node-only",
        "warning",
        launch.command.line,
        f"the job has {job.nodes} nodes, but {launch.launcher} is started on the first alone",
        hint,
    )


def _in_loop(job: Job) -> bool:
    """A loop that starts something in the background on each node, the first node in the script itself."""
    return any(command.name == "srun" and command.end == "&" for command in job.commands)


def _check_pipes(job: Job) -> Iterator[Finding]:
    if re.search(r"pipefail|PIPESTATUS", job.text):
        return
    launching = {id(launch.command) for launch in job.launches}
    for index, command in enumerate(job.commands[:-1]):
        following = job.commands[index + 1]
        starts = command.name in ("srun", "mpirun", "mpiexec") or id(command) in launching
        if starts and command.end == "|" and following.name == "tee":
            message = "the exit code is that of tee: a job that failed ends as COMPLETED"
            yield finding(
                "pipe-hides-failure", "warning", command.line, message, "add `set -o pipefail` above"
            )


def _check_hang(job: Job) -> Iterator[Finding]:
    for launch in job.launches:
        if launch.spreader != "srun" or not job.spans_nodes or "SLURM_KILL_BAD_EXIT" in job.text:
            continue
        if "--kill-on-bad-exit" not in srun_options(launch.command):
            message = "when one node fails, srun leaves the others waiting until the time limit"
            yield finding(
                "hang-on-failure", "info", launch.command.line, message, "add --kill-on-bad-exit=1 to srun"
            )
            return


RULES = (
    _check_early_ranks,
    _check_gpus,
    _check_launchers,
    _check_pipes,
    _check_hang,
)
