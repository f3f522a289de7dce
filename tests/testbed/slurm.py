"""A real Slurm on one machine: munge, a controller on the hub of a network, a slurmd on each machine.

GPUs are character devices of no use, which Slurm counts, gives out and names in CUDA_VISIBLE_DEVICES.
Memory is given out too, so that steps which ask for too much of it are refused as on a real cluster.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.testbed.network import HUB_ADDRESS, Network, environment, run, try_to

CLIENT_TIMEOUT_S = 30  # a client of a controller that is gone waits for ever
KILL_WAIT_S = 10  # between TERM and KILL at the end of a job

_CONF = """\
ClusterName=testbed
SlurmctldHost=hub({hub})
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
SlurmdTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=30 State=UP
"""


class SlurmBed(Network):
    """Nodes n1, n2, ... with as many GPUs as ``gpus`` says; jobs are submitted on the hub."""

    infrastructure = ("slurmd", "init")  # slurmstepd too
    # sh stays pid 1, which takes over what steps leave behind.
    init = """\
mount -t tmpfs -o size=1g shm /dev/shm
hostname "$1"
slurmd -D -N "$1" &
wait $!
"""

    def __init__(self, gpus: Sequence[int], folder: Path) -> None:
        super().__init__([f"n{i}" for i in range(1, len(gpus) + 1)], folder)
        self._gpus = dict(zip(self.names, gpus, strict=True))
        self._daemons: list[subprocess.Popen[bytes]] = []
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        super().__exit__()
        os.environ.pop("SLURM_CONF", None)

    def prepare(self) -> None:
        """Keys, configuration, munge and the controller."""
        self._write_conf()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        paths = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{name}={self.folder}/munge.{path}" for name, path in paths.items()]
        self._start("munge", ["munged", "--foreground", "--force", *options])
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munge")
        self._start("slurmctld", [*self.hub(), "slurmctld", "-D"])

    def wait_until_up(self, name: str) -> None:
        """Until jobs can start on the node."""
        idle = [*self.hub(), "sinfo", "--noheader", "--nodes", name, "--states=idle", "--format=%N"]
        self._wait(lambda: try_to(*idle).stdout.strip() == name, name)

    def repair(self, name: str) -> None:
        """Start a node again that was powered off. Slurm is told, so that it need not find out by itself."""
        self.client("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
        self.cancel_all()
        self.boot(name)
        self.client("scontrol", "update", f"nodename={name}", "state=resume")
        self.wait_until_up(name)

    def client(self, *command: str) -> str:
        """What a command of Slurm's prints, run on the hub."""
        return run(*self.hub(), "timeout", str(CLIENT_TIMEOUT_S), *command)

    def submit(self, script: str, *options: str) -> Job:
        """sbatch of a bash script; what it prints goes to files in the working directory."""
        path = Path("job.sh").absolute()
        path.write_text("#!/bin/bash\n" + script)
        outputs = ("--output=job.out", "--error=job.err")
        return Job(self, self.client("sbatch", "--parsable", *outputs, *options, str(path)).strip())

    def allocate(self, num_nodes: int, *options: str) -> dict[str, str]:
        """Nodes for commands on the hub, whose environment has to hold what is returned."""
        words = ["salloc", "--no-shell", f"--nodes={num_nodes}", *options]
        said = try_to(*self.hub(), "timeout", str(CLIENT_TIMEOUT_S), *words).stderr
        granted = re.search(r"Granted job allocation (\d+)", said)
        assert granted, said
        job_id = granted[1]
        nodes = self.client("squeue", "--noheader", f"--jobs={job_id}", "--format=%N").strip()
        return {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": nodes}

    def cancel_all(self) -> None:
        """Until the nodes are free, as far as they are up."""
        self.client("scancel", "--full", "--user=root")
        queue = [*self.hub(), "squeue", "--noheader"]
        self._wait(lambda: try_to(*queue).stdout.strip() == "", "jobs have ended")

    def _write_conf(self) -> None:
        nodes, devices = [], []
        (self.folder / "state").mkdir()
        for name, count in self._gpus.items():
            (self.folder / f"spool-{name}").mkdir()
            gres = f" Gres=gpu:{count}" if count else ""
            nodes.append(f"NodeName={name} NodeAddr={self.address(name)} CPUs=4 RealMemory=2000{gres}")
            for index in range(count):
                os.mknod(self.folder / f"gpu-{name}-{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
                devices.append(f"NodeName={name} Name=gpu File={self.folder}/gpu-{name}-{index}")
        text = _CONF.format(
            hub=HUB_ADDRESS, folder=self.folder, nodes="\n".join(nodes), kill_wait=KILL_WAIT_S
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("\n".join(devices) + "\n")
        # No control group is used, but slurmd looks for a kind of them until it is told one.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            daemon = subprocess.Popen(
                command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._daemons.append(daemon)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            logs = [path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < deadline, "\n".join([f"{what}: not within 30 s", *logs])
            time.sleep(0.05)


class Job:
    """A batch job. ``state`` is Slurm's word."""

    def __init__(self, bed: SlurmBed, job_id: str) -> None:
        self.bed, self.id = bed, job_id

    def wait(self, timeout_s: float = 60.0) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of the script, 128+n where signal n ended it."""
        deadline = time.monotonic() + timeout_s
        while self.state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, f"still {self.state} after {timeout_s} s"
            time.sleep(0.1)
        code, number = self._field("ExitCode").split(":")
        out, err = (Path(name).read_text(errors="replace") for name in ("job.out", "job.err"))
        return int(code) or (128 + int(number) if int(number) else 0), out, err

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ..."""
        return self._field("JobState")

    def _field(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self.bed.client("scontrol", "show", "job", self.id))
        assert found
        return found[1]
