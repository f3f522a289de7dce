"""Real ssh hosts on one machine: an sshd on each of the machines of a network, with keys of its own."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tests.testbed.network import NETNS, Network, run, try_to

SSHD = """\
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
CLIENT = """\
Host *
  IdentityFile /etc/ssh/id
  IdentitiesOnly yes
  StrictHostKeyChecking yes
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /etc/ssh/known_hosts
"""


class Testbed(Network):
    """Hosts node1, node2, ... that let the hub in, and each other."""

    __test__ = False
    infrastructure = ("sshd",)
    init = """\
mount -t tmpfs -o size=1g shm /dev/shm
mount -t tmpfs run /run && mkdir -p /run/sshd && chmod 755 /run/sshd
hostname "$1"
exec /usr/sbin/sshd -D -e -f /etc/ssh/sshd_config
"""

    def __init__(self, num_hosts: int, folder: Path) -> None:
        super().__init__([f"node{i}" for i in range(1, num_hosts + 1)], folder)
        for name in ("id", *self.names):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))

    def bashrc(self, name: str, text: str) -> None:
        """What bash runs on the host at each ssh command."""
        self.change_etc(name, {"bash.bashrc": text})

    def change_etc(self, name: str, files: Mapping[str, str | None], *, wait: bool = True) -> None:
        """Other files in a host's /etc, where this machine has such ones; None: those again.

        The host is started anew. ``wait``: until it lets one in.
        """
        for path, text in files.items():
            target = NETNS / self._netns(name) / path
            if text is None:
                target.unlink()
            else:
                target.parent.mkdir(exist_ok=True)
                target.write_text(text)
        self.power_off(name)  # files are put over /etc when a host starts
        self.boot(name)
        if wait:
            self.wait_until_up(name)

    def wait_until_up(self, name: str) -> None:
        """Until its sshd says its name. A whole login takes thirty times as long."""
        deadline = time.monotonic() + 30
        script = f"exec 3<>/dev/tcp/{self.address(name)}/22 && read -t 3 -u 3 line && [[ $line == SSH-* ]]"
        command = [*self.hub(), "bash", "-c", script]
        while (done := try_to(*command)).returncode != 0:
            assert time.monotonic() < deadline, f"{name}: {done.stderr}\n{self.log(name)}"
            time.sleep(0.05)

    def write_etc(self, name: str, etc: Path) -> None:
        """Keys, and whom to know by them."""
        (etc / "ssh").mkdir()
        public = {
            n: " ".join((self.folder / f"{n}.pub").read_text().split()[:2]) for n in ("id", *self.names)
        }
        known = [f"{n},{self.address(n)},{self.address6(n)} {public[n]}" for n in self.names]
        (etc / "ssh/known_hosts").write_text("\n".join(known) + "\n")
        (etc / "ssh/ssh_config").write_text(CLIENT)
        (etc / "ssh/sshd_config").write_text(SSHD)
        (etc / "ssh/authorized_keys").write_text(public["id"] + "\n")
        for source, target in (("id", "id"), (name, "host_key")):
            if (self.folder / source).exists():
                shutil.copy(self.folder / source, etc / "ssh" / target)


def passwd(shell: str) -> str:
    """This machine's accounts, with another login shell for root."""
    return re.sub(r"(?m)^(root:.*:)[^:\n]*$", rf"\g<1>{shell}", Path("/etc/passwd").read_text())
