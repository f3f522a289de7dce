"""Real ssh hosts on one machine: each in network, pid, name and mount namespaces of its own, with an sshd.

The file system is shared, as over NFS. A control host, ``hub``, reaches them all by name
over a bridge. Needs root. Nothing outside the namespaces is changed but files under
/etc/netns/<our names>, which `ip netns exec` puts over /etc inside.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_TOOLS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_NETNS = Path("/etc/netns")

_INIT = """\
mount -t tmpfs -o size=1g shm /dev/shm
mount -t tmpfs run /run && mkdir -p /run/sshd && chmod 755 /run/sshd
hostname "$1"
exec /usr/sbin/sshd -D -e -f /etc/ssh/sshd_config
"""
_SSHD = """\
Port 22
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PidFile none
MaxStartups 500
"""
_CLIENT = """\
Host *
  IdentityFile /etc/ssh/id
  IdentitiesOnly yes
  StrictHostKeyChecking yes
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /etc/ssh/known_hosts
"""


class Testbed:
    """``names`` are the hosts; :meth:`hub` gives the words that run a command on the control host.

    ``folder`` is of this testbed alone. Use it as a context manager: leaving it takes all away.
    """

    __test__ = False

    def __init__(self, num_hosts: int, folder: Path) -> None:
        self.folder = folder
        self._id = f"dsl{os.getpid() % 100000}"
        self.names = [f"node{i}" for i in range(1, num_hosts + 1)]
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._hub = self._netns("hub")

    def hub(self) -> list[str]:
        """What to put in front of a command to run it on the control host."""
        inner = 'hostname hub; exec "$@"'
        return ["ip", "netns", "exec", self._hub, "unshare", "--uts", "sh", "-c", inner, "sh"]

    def address(self, name: str) -> str:
        """The address of a host on the bridge."""
        return f"10.99.0.{2 + self.names.index(name)}"

    def __enter__(self) -> Testbed:
        try:
            self._make_keys()
            _run("ip", "netns", "add", self._hub)
            self._write_etc("hub")
            for words in ("addr add 10.99.0.1/24 dev br0", "link set br0 up", "link set lo up"):
                if words.startswith("addr"):
                    _run("ip", "-n", self._hub, "link", "add", "br0", "type", "bridge")
                _run("ip", "-n", self._hub, *words.split())
            for name in self.names:
                self._add_host(name)
            for name in self.names:
                self.wait_for_ssh(name)
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
            subprocess.run(
                ["ip", "netns", "del", self._netns(name)], env=_env(), capture_output=True, check=False
            )
            shutil.rmtree(_NETNS / self._netns(name), ignore_errors=True)
        with suppress(OSError):
            _NETNS.rmdir()

    # --- what befalls hosts ---------------------------------------------------------------------

    def boot(self, name: str) -> None:
        """Start a host that is off."""
        script = self.folder / "init"
        script.write_text(_INIT)
        unshare = ["unshare", "--pid", "--uts", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._hosts[name] = subprocess.Popen(
                ["ip", "netns", "exec", self._netns(name), *unshare, "sh", str(script), name],
                env=_env(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def power_off(self, name: str) -> None:
        """Every process of the host dies at once."""
        process = self._hosts.pop(name, None)
        if process is not None:
            process.kill()  # unshare --kill-child takes pid 1 of the host with it, and that all others
            process.wait()

    def cut(self, name: str) -> None:
        """Pull the host's cable out of the switch."""
        _run("ip", "-n", self._hub, "link", "set", f"v-{name}", "down")

    def plug(self, name: str) -> None:
        """Put it back."""
        _run("ip", "-n", self._hub, "link", "set", f"v-{name}", "up")

    def bashrc(self, name: str, text: str) -> None:
        """What bash runs on the host at each ssh command."""
        (_NETNS / self._netns(name) / "bash.bashrc").write_text(text)
        self.power_off(name)  # files are put over /etc when a host starts
        self.boot(name)
        self.wait_for_ssh(name)

    def bind(self, name: str, source: Path, target: Path) -> None:
        """Put a file over another on one host, until it is powered off: what is installed there differs."""
        pid = str(self._pids(name)[0])
        _run("nsenter", "--target", pid, "--mount", "mount", "--bind", str(source), str(target))

    def forbid(self, name: str, address: str) -> None:
        """Let the host reach every address but this one, until :meth:`allow`."""
        _run("ip", "-n", self._netns(name), "route", "add", "prohibit", address)

    def allow(self, name: str, address: str) -> None:
        """Take that back."""
        _run("ip", "-n", self._netns(name), "route", "del", "prohibit", address)

    def programs(self, name: str) -> list[str]:
        """What runs on a host besides its sshd, by command line."""
        return list(self._programs(name).values())

    def pids(self, name: str) -> list[int]:
        """The same, by process id as this machine sees it."""
        return list(self._programs(name))

    def end_programs(self, name: str) -> None:
        """KILL all that runs on a host besides its sshd."""
        for pid in self._programs(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_for_ssh(self, name: str) -> None:
        """Until the host lets one in."""
        deadline = time.monotonic() + 30
        command = [*self.hub(), "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", name, "true"]
        while (done := _try(command)).returncode != 0:
            assert time.monotonic() < deadline, f"{name}: {done.stderr}\n{self._log(name)}"
            time.sleep(0.05)

    # --- making ---------------------------------------------------------------------------------

    def _add_host(self, name: str) -> None:
        namespace = self._netns(name)
        _run("ip", "netns", "add", namespace)
        self._write_etc(name)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        ends = ["v-" + name, "type", "veth", "peer", "name", "eth0", "netns", namespace]
        _run("ip", "-n", self._hub, "link", "add", *ends)
        _run("ip", "-n", self._hub, "link", "set", "v-" + name, "master", "br0", "up")
        _run("ip", "-n", namespace, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        self.boot(name)

    def _make_keys(self) -> None:
        for name in ("id", *self.names):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))

    def _write_etc(self, name: str) -> None:
        etc = _NETNS / self._netns(name)
        (etc / "ssh").mkdir(parents=True)
        hosts = {"127.0.0.1": "localhost", "10.99.0.1": "hub"} | {self.address(n): n for n in self.names}
        # As Debian does: a host's own name leads to a loopback address there.
        own = f"127.0.1.1 {name}\n" if name != "hub" else ""
        lines = [f"{address} {host}" for address, host in hosts.items() if host != name]
        (etc / "hosts").write_text(own + "\n".join(lines) + "\n")
        (etc / "resolv.conf").write_text("")
        public = {
            n: " ".join((self.folder / f"{n}.pub").read_text().split()[:2]) for n in ("id", *self.names)
        }
        known = [f"{n},{self.address(n)} {public[n]}" for n in self.names]
        (etc / "ssh/known_hosts").write_text("\n".join(known) + "\n")
        (etc / "ssh/ssh_config").write_text(_CLIENT)
        (etc / "ssh/sshd_config").write_text(_SSHD)
        (etc / "ssh/authorized_keys").write_text(public["id"] + "\n")
        for source, target in (("id", "id"), (name, "host_key")):
            if (self.folder / source).exists():
                shutil.copy(self.folder / source, etc / "ssh" / target)

    def _netns(self, name: str) -> str:
        return f"{self._id}-{name}"

    def _programs(self, name: str) -> dict[int, str]:
        found = {}
        for pid in self._pids(name):
            with suppress(OSError):
                words = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                )
                state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if words and state not in "ZX" and "sshd" not in words and not words.startswith("unshare"):
                    found[pid] = words.strip()
        return found

    def _pids(self, name: str) -> list[int]:
        found = _try(["ip", "netns", "pids", self._netns(name)]).stdout.split()
        return [int(pid) for pid in found]

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]


def _env() -> dict[str, str]:
    return {**os.environ, "PATH": _TOOLS}


def _try(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=_env(), capture_output=True, text=True, timeout=60, check=False)


def _run(*command: str) -> None:
    done = _try(command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
