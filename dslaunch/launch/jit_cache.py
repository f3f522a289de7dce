"""Where DeepSpeed's JIT-built ops are kept: apart for every interpreter and CPU, and version where known."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from dslaunch.core.plan import LaunchPlan
from dslaunch.core.run_dir import cache_dir
from dslaunch.launch.agent import cpu_model

_OP = "deepspeed_shm_comm"  # which joins the ranks of a CPU


def torch_extensions_dir(program: str, environ: Mapping[str, str], cwd: str) -> Path:
    """The TORCH_EXTENSIONS_DIR of ranks that run ``program``.

    An op compiled for one CPU dies of an illegal instruction on an older one, and
    one compiled for another torch does not load. So every interpreter and CPU has
    a directory of its own, and for the interpreter that runs dslaunch so has every
    version of Python, torch and DeepSpeed. Of another interpreter the versions
    are not known: who upgrades torch there removes the directory.
    """
    return cache_dir(dict(environ)) / "torch_extensions" / _key(_interpreter(program, environ, cwd))


def find_op_to_build(plan: LaunchPlan, environ: Mapping[str, str]) -> Path | None:
    """Where a script of the user's will make DeepSpeed build its communication op, in silence, for a minute.

    None where it is built already or not needed, and where nothing says that the script uses DeepSpeed.
    """
    elsewhere = plan.via != "local" or plan.container is not None
    if plan.device_type != "cpu" or elsewhere or not _names_deepspeed(plan):
        return None
    given = plan.env.get("TORCH_EXTENSIONS_DIR") or environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(given) if given else torch_extensions_dir(plan.argv[0], environ, plan.cwd)
    return None if (Path(plan.cwd, folder) / _OP / f"{_OP}.so").exists() else folder


def _names_deepspeed(plan: LaunchPlan) -> bool:
    """Whether the command, or the script in it, has the word; to be sure one would have to run it."""
    if any("deepspeed" in word for word in plan.argv):
        return True
    script = next((Path(plan.cwd, word) for word in plan.argv if word.endswith(".py")), None)
    try:
        return script is not None and b"deepspeed" in script.read_bytes()
    except OSError:
        return False


def _interpreter(program: str, environ: Mapping[str, str], cwd: str) -> str:
    found = shutil.which(program, path=environ.get("PATH"))
    return os.path.normpath(os.path.join(cwd, found or program))


def _key(interpreter: str) -> str:
    # Only our own interpreter's packages can be asked without starting it.
    ours = interpreter == os.path.normpath(sys.executable)
    versions = [f"{name} {_version(name)}" for name in ("torch", "deepspeed")] if ours else []
    parts = [interpreter, platform.python_version() if ours else "", *versions, cpu_model()]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
