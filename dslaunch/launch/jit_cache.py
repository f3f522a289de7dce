"""Where DeepSpeed's JIT-built ops are kept: apart for every interpreter, its versions and CPU."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from dslaunch.core.plan import LaunchPlan
from dslaunch.core.run_dir import cache_dir
from dslaunch.launch.agent import cpu_model, opened, versions_beside

_PACKAGES = ("torch", "deepspeed")
_CUDA = re.compile(r"^(?:cuda|hip)\b[^=\n]*= *['\"]([^'\"]+)['\"]", re.MULTILINE)
_OP = "deepspeed_shm_comm"  # which joins the ranks of a CPU


def torch_extensions_dir(program: str, environ: Mapping[str, str], cwd: str) -> Path:
    """The TORCH_EXTENSIONS_DIR of ranks that run ``program``.

    An op compiled for one CPU dies of an illegal instruction on an older one, and one compiled for
    another torch, CUDA or Python does not load. So every interpreter, CPU, Python, torch (with the CUDA
    or ROCm that it is built for) and DeepSpeed has a directory of its own. Of another interpreter than
    the one that runs dslaunch they are known by the files of its environment.
    """
    return cache_dir(dict(environ)) / "torch_extensions" / _key(_interpreter(program, environ, cwd))


def cache_of(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """dslaunch's cache as ranks of ``plan`` find it; ``~`` is their home, in a container."""
    if plan.container is not None:
        return {**environ, **plan.env}.get("DSLAUNCH_CACHE") or "~/.cache/dslaunch"
    return str(cache_dir({**environ, **plan.env}).absolute())


def held_here(locks: Collection[str]) -> set[str]:
    """Those of torch's lock files that a process of this machine has open, or that are gone by now."""
    found, gone = {}, set()
    for path in locks:
        try:
            status = os.stat(path)
            found[path] = (status.st_dev, status.st_ino)
        except OSError:
            if os.path.isdir(os.path.dirname(path)):  # else it is only there
                gone.add(path)
    held = opened(set(found.values()))
    return gone | {path for path, file in found.items() if file in held}


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


@cache
def _key(interpreter: str) -> str:
    ours = interpreter == os.path.normpath(sys.executable)
    versions = _our_versions() if ours else versions_beside(os.fsencode(interpreter), _PACKAGES)
    parts = [interpreter, versions.get("python", "")]
    parts += [f"{name} {versions.get(name, 'none')}" for name in _PACKAGES]
    if (cuda := _torch_cuda(interpreter, ours=ours)) is not None:
        parts.append(f"cuda {cuda}")
    return hashlib.sha256("\0".join([*parts, cpu_model()]).encode("utf-8", "surrogateescape")).hexdigest()[
        :16
    ]


def _our_versions() -> dict[str, str]:
    """Our own interpreter's packages can be asked for wherever they are."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _torch_cuda(interpreter: str, *, ours: bool) -> str | None:
    """The CUDA or ROCm that the interpreter's torch was built with, as its version.py has it."""
    if ours:
        try:
            files = [Path(str(metadata.distribution("torch").locate_file("torch/version.py")))]
        except metadata.PackageNotFoundError:
            return None
    else:
        files = sorted(Path(interpreter).parent.parent.glob("lib/python3.*/site-packages/torch/version.py"))
    for file in files:
        with contextlib.suppress(OSError):
            found = _CUDA.search(file.read_text(encoding="utf-8", errors="replace"))
            return found and found[1]
    return None
