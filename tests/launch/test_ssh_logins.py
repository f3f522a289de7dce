"""Hosts as they are: other login shells, noise, jump hosts, IPv6, an account without a shell."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dslaunch.launch.ssh import quoted
from tests.launch.launching import Launched, python
from tests.testbed.hosts import CLIENT, SSHD, Testbed, passwd
from tests.testbed.network import run, try_to

pytestmark = pytest.mark.needs("root", "sshd", "namespaces")

HOSTILE = [
    "a b",
    "",
    "$HOME",
    "it's",
    "100%n",
    "two\nlines",
    "-x",
    '{"k": "v"}',
    "\\n",
    "!x",
    "*",
    "~",
    "`id`",
]
SHOW = "import json; print(json.dumps([sys.argv[1:], os.environ['SAID'], os.environ['MASTER_ADDR']]))"
NOISE = "echo welcome; echo '{\"event\": 1}'; echo careful >/dev/stderr; printf 'no newline'"
Over = Callable[..., Launched]


@pytest.fixture
def over(bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Over]:
    """``over(hosts, code, *words)`` runs Python code on the hosts of a hostfile's text."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def start(hosts: str, code: str = SHOW, *words: str) -> Launched:
            (tmp_path / "hosts").write_text(hosts)
            flags = ["--hostfile", "hosts", "--gpu", "cpu", "--env", f"SAID={''.join(HOSTILE)}"]
            launched = Launched(flags, python(code, *words), run_dir=tmp_path / "run", prefix=bed.hub())
            return stack.enter_context(launched)

        yield start
    assert [bed.programs(name) for name in bed.names] == [[], [], []]


def said(rank: int) -> list[object]:
    value: list[object] = json.loads(Path(f"run/logs/rank-{rank}.log").read_text())
    return value


@pytest.mark.needs("csh", "fish")
def test_noisy_logins_of_other_shells_and_another_port(bed: Testbed, over: Over) -> None:
    changes = {
        "node1": {"passwd": passwd("/usr/bin/tcsh"), "csh.cshrc": "echo welcome; echo -n unfinished\n"},
        "node2": {"passwd": passwd("/usr/bin/fish"), "fish/config.fish": NOISE + "\n"},
        "node3": {"bash.bashrc": NOISE, "ssh/banner": "Authorized use only!\n{}\n"},
    }
    for name, files in changes.items():
        more = "Banner /etc/ssh/banner\n" if "ssh/banner" in files else "Port 2222\n"
        bed.change_etc(name, {**files, "ssh/sshd_config": SSHD + more})
    show = SHOW + "\nopen(f'port-{rank}', 'w').write(os.environ['SSH_CONNECTION'].split()[-1])"
    code, out, err = over("node1 slots=1\nnode2:2222 slots=1\nnode3 slots=1\n", show, *HOSTILE).wait()
    for name, files in changes.items():
        bed.change_etc(name, {**dict.fromkeys(files), "ssh/sshd_config": SSHD})
    assert code == 0, err
    for rank in range(3):
        assert said(rank) == [HOSTILE, "".join(HOSTILE), bed.address("node1")]
    assert [Path(f"port-{rank}").read_text() for rank in range(3)] == ["22", "2222", "22"]
    assert json.loads(out)[0] == HOSTILE
    assert "welcome" not in out + err


def test_a_host_behind_another(bed: Testbed, over: Over) -> None:
    bed.forbid("hub", bed.address("node3"))
    config = Path(f"/etc/netns/{bed.id}-hub/ssh/ssh_config")
    config.write_text(f"Host inner\n  HostName node3\n  HostKeyAlias node3\n  ProxyJump node2\n{CLIENT}")
    try:
        code, _, err = over("node1 slots=1\ninner slots=1\n", SHOW, *HOSTILE).wait()
        direct = try_to(*bed.hub(), "ssh", "-o", "BatchMode=yes", "node3", "true")
    finally:
        config.write_text(CLIENT)
        bed.allow("hub", bed.address("node3"))
    assert code == 0, err
    assert [said(rank)[0] for rank in range(2)] == [HOSTILE, HOSTILE]
    assert direct.returncode == 255  # there was no way around


def test_hosts_by_ipv6_address(bed: Testbed, over: Over) -> None:
    """The ranks' meeting point too is an IPv6 address, and one reaches the other there."""
    meet = (
        "import json, socket\n"
        "at = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "if rank == 0:\n"
        "    server = socket.create_server(at, family=socket.AF_INET6)\n"
        "    server.settimeout(20)\n"
        "    server.accept()\n"
        "else:\n"
        "    for _ in range(100):\n"
        "        try:\n"
        "            socket.create_connection(at)\n"
        "            break\n"
        "        except OSError: time.sleep(0.1)\n"
        "print(json.dumps([os.environ['GLOO_SOCKET_IFNAME'], at[0]]))\n"
    )
    first, second = bed.address6("node1"), bed.address6("node2")
    code, _, err = over(f"[{first}]:22 slots=1\nroot@[{second}] slots=1\n", meet).wait()
    assert code == 0, err
    assert [said(rank) for rank in range(2)] == [["eth0", first], ["eth0", first]]
    assert socket.inet_pton(socket.AF_INET6, first)


@pytest.mark.parametrize("shell", [["sh"], ["bash"], ["csh", "-f"], ["fish"]])
@pytest.mark.needs("csh", "fish")
def test_words_in_quotes_are_one_thing_to_every_shell(shell: list[str]) -> None:
    for word in ("a'b", "a\\b", "a\\'b", "\\", "'", "$x `y` \\n", "!a 'b", "a b\\", "*?[a]", "{a,b}", "%n ~"):
        command = [*shell, "-c", f"printf %s {quoted(word)}"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == word


def test_interfaces_that_have_other_names_on_each_host(bed: Testbed, over: Over) -> None:
    rename = ("down", "name", "eno1"), ("up",)
    for words in rename:
        run("ip", "-n", f"{bed.id}-node2", "link", "set", "eth0" if "name" in words else "eno1", *words)
    try:
        show = "import json; print(json.dumps([os.environ[n + '_SOCKET_IFNAME'] for n in ('GLOO', 'NCCL')]))"
        code, _, err = over("node1 slots=1\nnode2 slots=1\n", show).wait()
    finally:
        run("ip", "-n", f"{bed.id}-node2", "link", "set", "eno1", "down", "name", "eth0")
        run("ip", "-n", f"{bed.id}-node2", "link", "set", "eth0", "up")
    assert code == 0, err
    assert [said(rank) for rank in range(2)] == [["eth0", "eth0"], ["eno1", "eno1"]]


@pytest.mark.parametrize(
    ("shell", "says"),
    [("/usr/sbin/nologin", "This account is currently not available."), ("/no/shell", "Permission denied")],
)
def test_an_account_without_a_shell(bed: Testbed, over: Over, shell: str, says: str) -> None:
    """Whatever a site has ssh say of itself before."""
    config = f"{SSHD}Banner /etc/ssh/banner\n"
    site = {"ssh/banner": "Authorized use only.\n", "ssh/sshd_config": config}
    bed.change_etc("node2", {"passwd": passwd(shell), **site}, wait=False)
    try:
        code, _, err = over("node1 slots=1\nnode2 slots=1\n", "touch('started')").wait()
    finally:
        bed.change_etc("node2", {"passwd": None, "ssh/banner": None, "ssh/sshd_config": SSHD})
    assert "Authorized use only." in err
    assert code == 3
    assert "host node2: " in err
    assert says in err
    assert "--exclude node2" in err
    assert not Path("started").exists()
