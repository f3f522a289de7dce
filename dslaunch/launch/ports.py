"""The master port: a free one found by binding, or the asked one checked, with who holds it."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.launch import agent

# What names the job, the innermost first: Flux may run inside of a Slurm job.
_JOB_IDS = ("FLUX_ENCLOSING_ID", "FLUX_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
# What tells one of its starts, or members, from another.
_WHICH = ("SLURM_RESTART_COUNT", "LSB_JOBINDEX", "SGE_TASK_ID")


class PortLease:
    """A port that no other launch on this machine will pick while this is open.

    The port itself is left unbound for rank 0. The reservation is an abstract
    Unix socket, which the kernel frees however this process ends.
    """

    def __init__(self, port: int, reservation: socket.socket | None) -> None:
        self.port = port
        self._reservation = reservation

    def close(self) -> None:
        if self._reservation is not None:
            self._reservation.close()


def port_seed(environ: Mapping[str, str], restart: str = "0") -> str | None:
    """What a free port is chosen by in a batch job, so that each restart has its own; None: by chance.

    A rank of the start before that lives on behind a cut cable is not to find the next one.
    """
    job = next((environ[name] for name in _JOB_IDS if environ.get(name)), None)
    return job and "/".join([job, *(environ.get(name, "") for name in _WHICH), restart])


def lease_port(wanted: int | None, seed: str | None = None) -> PortLease:
    """``wanted`` if it is free, or any free port: for a ``seed`` the same each time, unless it is taken.

    Raises EnvironmentNotReady where ``wanted`` is taken, naming the process that
    holds it where /proc shows that, or where no free port is found.
    """
    if wanted is not None:
        reservation = agent.reserve_port(wanted)
        if reservation is None or not agent.is_free_port(wanted):
            if reservation is not None:
                reservation.close()
            raise EnvironmentNotReady(
                f"master_port {wanted} is taken{agent.holder_text(wanted)}; nothing was started",
                hint="leave master_port out, and a free port is found",
            )
        return PortLease(wanted, reservation)
    try:
        return PortLease(*agent.find_port(seed))
    except agent.Refusal as refusal:
        raise EnvironmentNotReady(refusal.message, hint=refusal.hint) from None
