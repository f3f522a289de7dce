"""Lines for the scheduler: what it does not read, or reads as something else."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.config.check.scripts.job import Job, finding, srun_options
from dslaunch.core.finding import Finding


def _check_first_line(job: Job) -> Iterator[Finding]:
    if job.scheduler == "slurm" and not job.text.startswith("#!"):
        message = "the first line is no #!: sbatch refuses the script"
        yield finding("no-shebang", "error", 1, message, "begin with #!/bin/bash")


def _check_directives(job: Job) -> Iterator[Finding]:
    for directive in job.directives:
        word = "#SBATCH" if job.scheduler == "slurm" else "#PBS"
        if directive.ignored:
            yield finding(
                "directive-ignored",
                "warning",
                directive.line,
                f"{word} {directive.text} stands after the first command, where nobody reads it",
                "move it up, before the first command",
            )
        elif job.scheduler == "slurm" and (match := re.search(r"\$\{?\w+\}?|\$\(.*?\)", directive.text)):
            yield finding(
                "directive-variable",
                "error",
                directive.line,
                f"{match.group()} is not expanded in a directive: Slurm takes it as it stands",
                "write the value, give it to sbatch on the command line, or use %j and %x in file names",
            )
    if job.scheduler == "pbs":
        text = " ".join(directive.text for directive in job.directives)
        if "select=" in text and re.search(r"-l\s*\S*\b(?:nodes|ppn)=", text):
            line = next(d.line for d in job.directives if re.search(r"\b(?:nodes|ppn)=", d.text))
            message = "nodes=...:ppn= (Torque) beside select=: qsub refuses the two together"
            yield finding("mixed-resources", "error", line, message, "keep select=")
    if job.scheduler == "sge":
        for number, written in enumerate(job.text.split("\n"), start=1):
            if re.match(r"#\$(?!\s*-)\S", written):
                message = f"{written.split()[0]} begins with #$, so Grid Engine reads it as options"
                yield finding("directive-form", "error", number, message, "put a blank between # and $")


def _check_signal(job: Job) -> Iterator[Finding]:
    if job.scheduler != "slurm" or not job.launches:
        return
    value, line = job.options.get("--signal", ("", 0))
    match = re.match(r"(?:(?P<shell>B|BR|RB|R):)?(?P<name>\w+)(?:@\d+)?$", value)
    if not value:
        if "--time" in job.options and not any(command.name == "trap" for command in job.commands):
            line = job.options["--time"][1]
            message = "at the time limit Slurm sends TERM and kills 30 s later: what was not saved is lost"
            hint = "add #SBATCH --signal=B:USR1@300 and a trap that passes it on"
            yield finding("no-signal", "info", line, message, hint)
        return
    if match is None or "B" not in (match["shell"] or ""):
        return
    name = match["name"].removeprefix("SIG")
    traps = [c for c in job.commands if c.name == "trap" and re.search(rf"\b(?:SIG)?{name}\b", c.text)]
    if not traps:
        message = f"B:{name} goes to the batch shell alone, and no trap takes it: it ends the script"
        yield finding(
            "signal-untrapped", "error", line, message, f"add a trap for {name} that passes it to srun"
        )
    elif not any(c.end == "&" or c.name in ("wait", "exec") for c in job.commands):
        message = "bash runs a trap only when the command before it has ended: the signal comes too late"
        yield finding("trap-too-late", "warning", traps[0].line, message, "start srun with & and wait for it")


def _check_cpus(job: Job) -> Iterator[Finding]:
    cpus = job.number("--cpus-per-task")
    if job.scheduler != "slurm" or not cpus or cpus == 1 or "SRUN_CPUS_PER_TASK" in job.text:
        return
    for command in job.commands:
        if command.name == "srun" and "--cpus-per-task" not in srun_options(command):
            message = f"Slurm 22.05 to 23.02 does not pass --cpus-per-task={cpus} on to srun: one CPU a task"
            hint = 'add -c "$SLURM_CPUS_PER_TASK" to srun'
            yield finding("cpus-not-passed", "info", command.line, message, hint)
            return


def _check_work_dir(job: Job) -> Iterator[Finding]:
    """PBS and Grid Engine start a job in HOME."""
    if job.scheduler not in ("pbs", "sge") or not job.launches:
        return
    options = " ".join(directive.text for directive in job.directives)
    if job.runs("cd", "pushd") or re.search(r"-cwd\b|-wd\b|-w\s|-d\s", options):
        return
    where = "$PBS_O_WORKDIR" if job.scheduler == "pbs" else "$SGE_O_WORKDIR"
    message = "the job starts in HOME, not where it was submitted"
    hint = f'add cd "{where}"' + (", or #$ -cwd" if job.scheduler == "sge" else "")
    yield finding("work-dir", "warning", job.launches[0].command.line, message, hint)


RULES = (
    _check_first_line,
    _check_directives,
    _check_signal,
    _check_cpus,
    _check_work_dir,
)
