"""Machines within this machine: each in network, pid, name and mount namespaces of its own.

The file system is shared, as over NFS. A control host, ``hub``, reaches them all by name
over a bridge. Needs root. Nothing outside the namespaces is changed but files under
/etc/netns/<our names>, which `ip netns exec` puts over /etc inside.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from typing_extensions import Self

NETNS = Path("/etc/netns")
HUB_ADDRESS = "10.99.0.1"
# What root's own login shell does may be slow, and what it locks is not for a host that loses power (pyenv).
_LOGINS = """\
for file in ~root/.bashrc ~root/.profile ~root/.bash_profile ~root/.bash_login; do
    [ ! -e "$file" ] || mount --bind /dev/null "$file"
done
"""
_TOOLS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# GPUs that can be looked at: what NVIDIA's driver writes, and devices of no use. $@: their models.
_GPUS = """\
set -e
dev=/mnt
mount -t tmpfs dev "$dev"
for name in null zero full random urandom tty; do
    touch "$dev/$name"
    mount --bind "/dev/$name" "$dev/$name"
done
for name in shm pts; do mkdir "$dev/$name"; mount --bind "/dev/$name" "$dev/$name"; done
ln -s /proc/self/fd "$dev/fd"
mount -t tmpfs driver /proc/driver
minor=0
for model; do
    touch "$dev/nvidia$minor"
    folder=/proc/driver/nvidia/gpus/0000:0$minor:00.0
    mkdir -p "$folder"
    printf 'Model: \\t\\t %s\\nDevice Minor: \\t %s\\n' "$model" "$minor" > "$folder/information"
    minor=$((minor + 1))
done
mount --rbind "$dev" /dev
"""


class Network:
    """``names`` are the machines; :meth:`hub` gives the words that run a command on the control host.

    ``folder`` is of this network alone. Use it as a context manager: leaving it takes all away.
    A subclass says what a machine runs.
    """

    init: ClassVar[str]  # a shell script: pid 1 of a machine, whose name is its $1
    infrastructure: ClassVar[tuple[str, ...]] = ()  # words in the command lines of what belongs to a machine

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self.id = f"dsl{os.getpid() % 100000}"
        self.names = list(names)
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        self._hub = self._netns("hub")

    def prepare(self) -> None:
        """Before the first machine starts."""

    def write_etc(self, name: str, etc: Path) -> None:
        """What a machine (or the hub) has in /etc besides its hosts file."""

    def wait_until_up(self, name: str) -> None:
        """Return when the machine does what it is for."""

    def hub(self) -> list[str]:
        """What to put in front of a command to run it on the control host."""
        inner = 'hostname hub; exec "$@"'
        return ["ip", "netns", "exec", self._hub, "unshare", "--uts", "sh", "-c", inner, "sh"]

    def address(self, name: str) -> str:
        """The address of a machine on the bridge."""
        return f"10.99.0.{2 + self.names.index(name)}"

    def address6(self, name: str) -> str:
        """Its IPv6 address."""
        return f"fd99::{2 + self.names.index(name)}"

    def __enter__(self) -> Self:
        try:
            run("ip", "netns", "add", self._hub)
            self._write_etc("hub")
            run("ip", "-n", self._hub, "link", "add", "br0", "type", "bridge")
            for words in (
                f"addr add {HUB_ADDRESS}/24 dev br0", "addr add fd99::1/64 dev br0 nodad",
                "link set br0 up", "link set lo up",
            ):  # fmt: skip
                run("ip", "-n", self._hub, *words.split())
            self.prepare()
            for name in self.names:
                self._add(name)
            for name in self.names:
                self.wait_until_up(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.power_off(name)
        for name in ("hub", *self.names):
            for pid in self._pids(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try_to("ip", "netns", "del", self._netns(name))
            shutil.rmtree(NETNS / self._netns(name), ignore_errors=True)
        with suppress(OSError):
            NETNS.rmdir()

    # --- what befalls machines ------------------------------------------------------------------

    def boot(self, name: str) -> None:
        """Start a machine that is off."""
        script = self.folder / "init"
        script.write_text(_LOGINS + self.init)
        unshare = ["unshare", "--pid", "--uts", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._machines[name] = subprocess.Popen(
                ["ip", "netns", "exec", self._netns(name), *unshare, "sh", str(script), name],
                env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def power_off(self, name: str) -> None:
        """Every process of the machine dies at once."""
        process = self._machines.pop(name, None)
        if process is not None:
            process.kill()  # unshare --kill-child takes pid 1 of the machine with it, and that all others
            process.wait()

    def cut(self, name: str) -> None:
        """Pull the machine's cable out of the switch."""
        run("ip", "-n", self._hub, "link", "set", f"v-{name}", "down")

    def plug(self, name: str) -> None:
        """Put it back."""
        run("ip", "-n", self._hub, "link", "set", f"v-{name}", "up")

    def show_gpus(self, name: str, *models: str) -> None:
        """Let the machine seem to have these GPUs until it is off."""
        pid = str(self._pids(name)[0])
        run("nsenter", "--target", pid, "--mount", "--pid", "sh", "-c", _GPUS, "sh", *models)

    def bind(self, name: str, source: Path, target: Path) -> None:
        """Put a file over another on one machine until it is off: what is installed there differs."""
        pid = str(self._pids(name)[0])
        run("nsenter", "--target", pid, "--mount", "mount", "--bind", str(source), str(target))

    def forbid(self, name: str, address: str) -> None:
        """Let the machine reach every address but this one, until :meth:`allow`."""
        run("ip", "-n", self._netns(name), "route", "add", "prohibit", address)

    def allow(self, name: str, address: str) -> None:
        """Take that back."""
        run("ip", "-n", self._netns(name), "route", "del", "prohibit", address)

    def programs(self, name: str) -> list[str]:
        """What runs on a machine besides what makes it one, by command line."""
        return list(self._programs(name).values())

    def pids(self, name: str) -> list[int]:
        """The same, by process id as this machine sees it."""
        return list(self._programs(name))

    def end_programs(self, name: str) -> None:
        """KILL all that."""
        for pid in self._programs(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log(self, name: str) -> str:
        """The end of what a machine's own programs said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    # --- making ---------------------------------------------------------------------------------

    def _add(self, name: str) -> None:
        namespace = self._netns(name)
        run("ip", "netns", "add", namespace)
        self._write_etc(name)
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        ends = ["v-" + name, "type", "veth", "peer", "name", "eth0", "netns", namespace]
        run("ip", "-n", self._hub, "link", "add", *ends)
        run("ip", "-n", self._hub, "link", "set", "v-" + name, "master", "br0", "up")
        run("ip", "-n", namespace, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        run("ip", "-n", namespace, "addr", "add", f"{self.address6(name)}/64", "dev", "eth0", "nodad")
        run("ip", "-n", namespace, "link", "set", "eth0", "up")
        self.boot(name)

    def _write_etc(self, name: str) -> None:
        etc = NETNS / self._netns(name)
        etc.mkdir(parents=True)
        hosts = {"127.0.0.1": "localhost", HUB_ADDRESS: "hub"} | {self.address(n): n for n in self.names}
        # As Debian does: a machine's own name leads to a loopback address there.
        own = f"127.0.1.1 {name}\n" if name != "hub" else ""
        lines = [f"{address} {host}" for address, host in hosts.items() if host != name]
        (etc / "hosts").write_text(own + "\n".join(lines) + "\n")
        (etc / "resolv.conf").write_text("")
        self.write_etc(name, etc)

    def _netns(self, name: str) -> str:
        return f"{self.id}-{name}"

    def _programs(self, name: str) -> dict[int, str]:
        found = {}
        for pid in self._pids(name):
            with suppress(OSError):
                words = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                )
                state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                ours = words.startswith("unshare") or any(word in words for word in self.infrastructure)
                if words and state not in "ZX" and not ours:
                    found[pid] = words.strip()
        return found

    def _pids(self, name: str) -> list[int]:
        found = try_to("ip", "netns", "pids", self._netns(name)).stdout.split()
        return [int(pid) for pid in found]


def environment() -> dict[str, str]:
    """Ours, with the programs of the system's administrator in PATH."""
    return {**os.environ, "PATH": _TOOLS}


def try_to(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command; its code is the caller's affair."""
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)


def run(*command: str) -> str:
    """Its stdout. Fails the test where the command does."""
    done = try_to(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
