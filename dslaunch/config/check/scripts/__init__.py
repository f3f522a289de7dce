"""What goes wrong in batch scripts that launch DeepSpeed: Slurm, PBS, LSF, SGE.

Each rule looks at a whole :class:`Job` and yields findings. A rule that cannot know says nothing:
a script that is right has no error and no warning. What schedulers do is from their manuals
(Slurm 22.05 to 26.05, OpenPBS, LSF 10.1, Grid Engine 8.1.9).
"""

from __future__ import annotations

from dslaunch.config.check import Target
from dslaunch.config.check.scripts import addresses, directives, launches
from dslaunch.config.check.scripts.configs import check_written_configs
from dslaunch.config.check.scripts.job import Job, finding, read_job
from dslaunch.core.finding import Finding

_RULES = (*directives.RULES, *launches.RULES, *addresses.RULES)


def check_batch_script(text: str, target: Target) -> tuple[Finding, ...]:
    """Findings about a batch script, in file order; nothing for a script without a scheduler's directives."""
    job = read_job(text)
    if job is None:
        return ()
    found = [item for rule in _RULES for item in rule(job)]
    found += check_written_configs(job, target)
    if "\r\n" in text:
        found.insert(0, _crlf(job))
    return tuple(sorted(found, key=lambda item: item.line or 0))


def _crlf(job: Job) -> Finding:
    refuses = {"slurm": "sbatch refuses such a script", "pbs": "qsub refuses such a script"}
    then = refuses.get(job.scheduler, "the shell takes the carriage return for a part of each command")
    return finding("line-ends", "error", 1, f"lines end as on Windows (CRLF): {then}", "run dos2unix on it")
