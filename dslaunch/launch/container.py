"""The agent and its ranks inside of a container: what goes in front of the command that starts it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from dslaunch.core.devices import accelerator_of
from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.plan import IMAGE_RUNTIMES, LaunchPlan

# What the image has of its own. The launcher's would lead to places that are not there.
_THE_IMAGES_OWN = (
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TMPDIR",
    "XDG_CACHE_HOME", "CUDA_HOME", "CUDA_PATH", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CC", "CXX",
    "TORCH_EXTENSIONS_DIR",
)  # fmt: skip


def enter_words(plan: LaunchPlan) -> tuple[str, ...]:
    """The words that run the rest of a command line inside of the plan's container; none without one.

    The run directory and the working directory are there under their own paths: apptainer and pyxis
    are told to bind them, of a running container it is asked when the agent looks for them.
    pyxis is a part of srun: its words are the last options of that.
    """
    container = plan.container
    if container is None:
        return ()
    if container.runtime == "pyxis":
        mounts = [f"--container-mounts={','.join(f'{path}:{path}' for path in _bound(plan))}"]
        return (f"--container-image={container.image}", *(mounts if _bound(plan) else ()), *container.args)
    if container.runtime == "apptainer":
        assert container.image is not None
        gpus = ("--nv",) if plan.device_type == "cuda" and accelerator_of(plan.devices) == "cuda" else ()
        binds = tuple(word for path in _bound(plan) for word in ("--bind", path))
        return ("apptainer", "exec", *gpus, *binds, *container.args, container.image)
    assert container.name is not None
    return (container.runtime, "exec", "-i", *container.args, container.name)


def without_the_images_own(env: Mapping[str, str]) -> dict[str, str]:
    """What of ``env`` makes sense inside of a container."""
    return {
        name: value
        for name, value in env.items()
        if name not in _THE_IMAGES_OWN and not name.startswith("CONDA_")
    }


def check_container(plan: LaunchPlan, environ: Mapping[str, str], *, here: bool) -> None:
    """Raises ConfigError for a directory that cannot be bound, or pyxis without srun; EnvironmentNotReady
    where ``here``, on this machine, the runtime is missing."""
    if plan.container is None:
        return
    runtime = plan.container.runtime
    for path in _bound(plan) if runtime in IMAGE_RUNTIMES else ():
        if ":" in path or "," in path:
            raise ConfigError(
                f"{path} cannot be bound into a container: {runtime} takes : and , for separators",
                hint="use directories without them for --run-dir and launch.cwd",
            )
    if runtime == "pyxis":
        if plan.via != "slurm":
            raise ConfigError(
                f"pyxis is a part of srun, and hosts are reached by {plan.via}; nothing was started",
                hint="start it in a Slurm job (--via slurm), or take apptainer, docker or podman",
            )
    elif here and shutil.which(runtime, path=environ.get("PATH", os.defpath)) is None:
        raise EnvironmentNotReady(
            f"no {runtime} in PATH; nothing was started", hint=f"install {runtime}, or load its module"
        )


def _bound(plan: LaunchPlan) -> tuple[str, ...]:
    return tuple(path for path in dict.fromkeys((plan.run_dir, plan.cwd)) if path != "/")
