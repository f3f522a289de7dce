"""Tells what a run needs of one host, changes nothing there: the other end of probing.py.

Like the agent it is sent over stdin, behind the agent's own text, whose rules for ports,
addresses and cgroups it uses. Standard library of Python 3.8, Linux.

Its stdin is JSON lines. The first is the request::

    {"python": "...", "env": {...}, "packages": [...], "cwd": "...", "witness": {"path": "...", "text": "..."}
     | null, "cache": "...", "ops": "...", "ops_cpu": "1a2b3c4d", "smi": ["nvidia-smi", ...],
     "names": ["node1", ...], "meet": {"peers": ["b"], "addr": "..." | null, "port": 29500 | null} | null}

A second may be ``{"addr": "...", "port": n}``: try to reach the host of rank 0. It answers
with ``hello``, ``facts`` and ``reached``, and ends with its stdin.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

from dslaunch.launch import agent

TIMEOUT_S = 20.0
# What the launcher's side reads devices, memory and CPU from, as it does on its own host.
FILES = (
    "proc/meminfo", "proc/self/cgroup", "proc/driver/nvidia/version",
    "proc/driver/nvidia/gpus/*/information", "sys/class/kfd/kfd/topology/nodes/*/properties",
)  # fmt: skip
DEVICE_FILES = ("dev/nvidia[0-9]*", "dev/kfd", "dev/dxg")
MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
VISIBLE = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Run by the ranks' Python: only it knows which packages it finds. torch itself is not imported.
ASK_PYTHON = """
import json, os, re, sys, sysconfig
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
cuda = None
try:
    text = open(metadata.distribution("torch").locate_file("torch/version.py")).read()
    cuda = re.search(r"^(?:cuda|hip)\\b[^=]*= *'([^']+)'", text, re.M)
except (metadata.PackageNotFoundError, OSError):
    pass
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(json.dumps({"version": sys.version.split()[0], "packages": {n: version(n) for n in sys.argv[1:]},
                  "torch_cuda": cuda and cuda[1], "has_headers": headers}))
"""


def facts(request: dict[str, Any], root: str = "/") -> dict[str, Any]:
    """Everything but the way to host 0. What cannot be found out is None."""
    env = {**os.environ, **request["env"]}
    ops = os.path.expanduser(request["ops"])
    if request["ops_cpu"] not in (None, agent.cpu_key()):
        ops += "-" + agent.cpu_key()
    return {
        "node": os.uname().nodename,
        **agent.look_around(request["cache"], ops, root),
        "glibc": platform.libc_ver()[1] or None,
        "cpu": agent.cpu_model(root).splitlines()[-1].partition("model name=")[2],
        "cores": agent.usable_cores(root),
        "interpreter": ask_python(request["python"], request["packages"], env),
        "tools": {name: tool_version(name, request["python"], env) for name in ("c++", "ninja", "nvcc")},
        "files": read_files(root),
        "device_files": below(root, DEVICE_FILES),
        "smi": output_of(request["smi"], env),
        "visible": {name: env[name] for name in VISIBLE if name in env},
        "ops": ops,
        "has_cwd": os.path.isdir(agent.to_bytes(request["cwd"])),
        "witness": agent.witness_problem(request["witness"]),
        "addresses": {name: addresses(name) for name in request["names"]},
        "own_addresses": addresses(os.uname().nodename),
    }  # fmt: skip


def ask_python(python: str, packages: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Version and packages of the ranks' interpreter, or ``problem``."""
    try:
        done = subprocess.run([python, "-c", ASK_PYTHON, *packages], env={**env, "PYTHONNOUSERSITE": "1"},
                              capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)  # fmt: skip
        return {"problem": None, **json.loads(done.stdout)}
    except FileNotFoundError:
        return {"problem": "no program " + python}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"problem": f"cannot run {python}: {getattr(error, 'strerror', None) or 'no answer'}"}
    except ValueError:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return {"problem": f"{python} does not work: {lines[-1] if lines else 'it printed nothing'}"}


def tool_version(name: str, python: str, env: dict[str, str]) -> str | None:
    """The version of a build tool, "" where it is there and does not say; None where it is not there.

    DeepSpeed looks for nvcc under CUDA_HOME, and our worker for ninja beside the interpreter.
    """
    path = env.get("PATH", os.defpath)
    word = name
    if name == "c++":
        word = (env.get("CXX", "").split() or ["c++"])[0]
    elif name == "nvcc":
        home = env.get("CUDA_HOME") or env.get("CUDA_PATH") or "/usr/local/cuda"
        path = os.path.join(home, "bin") + os.pathsep + path
    else:
        path += os.pathsep + os.path.dirname(python)
    found = shutil.which(word, path=path)
    if found is None:
        return None
    text = output_of([found, "--version"], env) or ""
    match = re.search(r"release (\d+\.\d+)", text) or re.search(r"\b(\d+\.\d+(?:\.\d+)*)\b", text)
    return match.group(1) if match else ""


def output_of(argv: list[str], env: dict[str, str]) -> str | None:
    try:
        done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def read_files(root: str) -> dict[str, str]:
    """Path -> text."""
    info = os.path.join(root, "proc/cpuinfo")
    found = {info: first_block(info)}
    paths = below(root, FILES)
    for folder in agent.cgroups(root, "memory"):
        paths += [os.path.join(folder, name) for name in MEMORY_LIMITS]
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                found[path] = stream.read()
        except OSError:
            pass
    return found


def below(root: str, patterns: tuple[str, ...]) -> list[str]:
    return [path for pattern in patterns for path in sorted(glob.glob(os.path.join(root, pattern)))]


def first_block(path: str) -> str:
    """What cpuinfo says of the first core."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().partition("\n\n")[0]
    except OSError:
        return ""


def addresses(name: str) -> list[str] | None:
    """What a name leads to on this host; None where it leads nowhere."""
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def meet(wanted: dict[str, Any] | None) -> tuple[dict[str, Any], agent.Lease | None]:
    """Listen as the agent of host 0 does; where, or why not."""
    if wanted is None:
        return {"addr": None, "port": None, "problem": None, "hint": None}, None
    try:
        lease = agent.Lease(wanted["port"], leased=False)
        addr = wanted["addr"] or (agent.own_address(wanted["peers"]) if wanted["peers"] else "127.0.0.1")
        lease.listen(":" in addr)
    except agent.Refusal as refusal:
        return {"addr": None, "port": None, "problem": refusal.message, "hint": refusal.hint}, None
    return {"addr": addr, "port": lease.port, "problem": None, "hint": None}, lease


def send(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def main() -> None:
    stdin = open(0, "rb", 0, closefd=False)  # noqa: SIM115
    request = json.loads(stdin.readline())
    sys.stdout.write("\n")  # ends what a login script may have left unfinished there
    send("hello", time=time.time())
    try:
        found = facts(request)
    except Exception as error:  # a bug of ours, or a very strange host: one line, not a traceback
        sys.exit(f"dslaunch doctor: {type(error).__name__}: {error}")
    place, lease = meet(request["meet"])
    send("facts", facts=found, meet=place)
    line = stdin.readline()
    if line:
        where = json.loads(line)
        problem = agent.reach_problem(where["addr"], where["port"])
        send("reached", problem=problem, interface=agent.interface_to(where["addr"]))
    while stdin.readline():  # host 0 listens until all others have tried
        pass
    if lease is not None:
        lease.stop_listening()


if __name__ == "__main__":
    main()
