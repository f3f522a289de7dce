"""A real container on this machine: Debian's podman or docker, of a root that shows this machine's /usr.

Everything it needs or leaves is below one folder. It has the host's network and no limits of its own, so
that it also starts where a machine is itself a container.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from typing_extensions import Self

from tests.support.machine import CANNOT_RUN

_RUN = (
    "run", "--detach", "--network=host", "--security-opt=seccomp=unconfined",
    "--ulimit=nofile=1024:1024", "--ulimit=nproc=9000:9000", "--volume=/usr:/usr:ro",
)  # fmt: skip
_TOOLS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # dockerd finds runc there
_PODMAN_CONF = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{0}/tmp"
"""
_PODMAN_STORAGE = '[storage]\ndriver = "vfs"\ngraphroot = "{0}/graph"\nrunroot = "{0}/state"\n'


class Container:
    """A container ``box`` that shows ``shared`` under its own path. ``env``: by which the runtime finds it.

    A context manager. Skips the test, loudly, where none can be made.
    """

    def __init__(self, runtime: str, folder: Path, shared: Path) -> None:
        self.runtime, self.folder, self.shared = runtime, folder, shared
        self.root = folder / "root"
        self.env: dict[str, str] = {}
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._make_root()
            image = self._start_podman() if self.runtime == "podman" else self._start_docker()
            self.do(*_RUN, "--name=box", f"--volume={self.shared}:{self.shared}", *image, "sleep", "600")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._try("rm", "--force", "--time=0" if self.runtime == "podman" else "--volumes", "box")
        if self._daemon is not None:
            self._daemon.terminate()
            try:
                self._daemon.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._daemon.pid, signal.SIGKILL)
                self._daemon.wait()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (mounted := line.split()[1]).startswith(f"{self.folder}/"):  # docker leaves one
                subprocess.run(["umount", mounted], check=False)

    def do(self, *words: str) -> str:
        """What a command of the runtime prints."""
        done = self._try(*words)
        if done.returncode != 0:
            pytest.skip(f"{CANNOT_RUN}{self.runtime}: {done.stderr.strip()[-300:]}")
        return done.stdout

    def _try(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **self.env}
        command = [self.runtime, *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    def _make_root(self) -> None:
        for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run", "root"):
            (self.root / name).mkdir(parents=True)
        (self.root / "etc/alternatives").mkdir()
        (self.root / "etc/alternatives/c++").symlink_to("/usr/bin/g++")
        for name in ("bin", "lib", "lib64", "sbin"):
            (self.root / name).symlink_to(f"usr/{name}")

    def _start_podman(self) -> list[str]:
        (self.folder / "containers.conf").write_text(_PODMAN_CONF.format(self.folder))
        (self.folder / "storage.conf").write_text(_PODMAN_STORAGE.format(self.folder))
        self.env = {
            "CONTAINERS_CONF": f"{self.folder}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.folder}/storage.conf",
        }
        return ["--rootfs", str(self.root)]

    def _start_docker(self) -> list[str]:
        self.env = {"DOCKER_HOST": f"unix://{self.folder}/socket"}
        daemon = shutil.which("dockerd", path=_TOOLS) or "dockerd"
        words = ["--storage-driver=vfs", "--iptables=false", "--ip6tables=false", "--bridge=none"]
        paths = {"data-root": "graph", "exec-root": "state", "pidfile": "pid"}
        words += [f"--{option}={self.folder}/{name}" for option, name in paths.items()]
        with (self.folder / "daemon.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                [daemon, *words, f"--host={self.env['DOCKER_HOST']}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PATH": _TOOLS},
            )  # fmt: skip
        deadline = time.monotonic() + 30
        while self._try("version").returncode != 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        archive = self.folder / "root.tar"
        subprocess.run(["tar", "-C", str(self.root), "-cf", str(archive), "."], check=True, timeout=30)
        return [self.do("import", str(archive)).strip()]
