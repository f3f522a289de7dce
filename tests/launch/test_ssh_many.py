"""Eight real ssh hosts: unequal slots, one that is dead, one that is slow."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launching import Launched, python, wait_until
from tests.testbed.hosts import Testbed

pytestmark = pytest.mark.needs("root", "sshd", "namespaces")

SLOTS = (1, 3, 2, 1, 2, 1, 1, 2)
FIRST_RANKS = [sum(SLOTS[:node]) for node in range(8)]
# What a rank finds is printed when all are there: each has a rank of every host to tell it of.
SHOW = """
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK".split()
print(os.uname().nodename, *(os.environ[name] for name in names), flush=True)
touch(f"up-{rank}")
while len([n for n in os.listdir(".") if n.startswith("up-")]) < 13: time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with Testbed(8, tmp_path_factory.mktemp("testbed")) as hosts:
        hosts.bashrc("node6", "sleep 2")  # its login takes long
        yield hosts


def launch(bed: Testbed, folder: Path, code: str, *options: str) -> Launched:
    lines = [f"{name} slots={count}\n" for name, count in zip(bed.names, SLOTS, strict=True)]
    (folder / "hosts").write_text("".join(lines))
    return Launched(
        ["--hostfile", "hosts", "--gpu", "cpu", *options],
        python(code),
        run_dir=folder / "run",
        prefix=bed.hub(),
    )


def test_unequal_slots_and_a_slow_host(bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with launch(bed, tmp_path, SHOW) as launched:
        code, _, err = launched.wait()
    assert code == 0, err
    shown = [Path(f"run/logs/rank-{rank}.log").read_text().split() for rank in range(13)]
    assert shown == [
        [f"node{node + 1}", *map(str, (FIRST_RANKS[node] + local, local, 13, slots, node))]
        for node, slots in enumerate(SLOTS)
        for local in range(slots)
    ]


def test_a_dead_host_is_named_then_left_out_and_a_fault_ends_all(
    bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wait = "touch(f'up-{rank}'); time.sleep(300)"
    bed.power_off("node4")  # for good
    with launch(bed, tmp_path, wait) as launched:
        code, _, err = launched.wait()
    assert code == 3, err
    assert "host node4: the connection to node4 ended: ssh: connect to host node4 port 22" in err
    assert "--exclude node4" in err
    assert not list(tmp_path.glob("up-*"))
    with launch(bed, tmp_path, wait, "--exclude", "node4", "--resume") as launched:
        wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 12, "12 ranks are up")
        os.kill(launched.pid_of(11), signal.SIGSEGV)
        code, _, err = launched.wait()
    assert code == 139, err
    assert "rank 11 on node8 failed first: it was killed by signal 11 (SIGSEGV" in err
    assert "ranks 0-10 stopped by dslaunch (signal 15)" in err
    assert [bed.programs(name) for name in bed.names] == [[]] * 8
