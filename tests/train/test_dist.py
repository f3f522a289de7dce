"""Joining the ranks: what the environment must hold, and a master that is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.train.dist import find_device, read_rank_environment
from tests.support.python import run_python
from tests.support.ranks import check_ranks, free_port, run_ranks

GOOD = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def set_environment(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name in GOOD:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_reads_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, GOOD)
    assert read_rank_environment() == (1, 2, 0)


def test_names_everything_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {"RANK": "0", "WORLD_SIZE": ""})
    with pytest.raises(EnvironmentNotReady, match="LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        read_rank_environment()


@pytest.mark.parametrize("value", ["one", "-1", "1.5", " 1"])
def test_a_rank_that_is_no_number(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    set_environment(monkeypatch, {**GOOD, "RANK": value})
    with pytest.raises(ConfigError, match="RANK is"):
        read_rank_environment()


JOIN = """
import sys
from dslaunch.core.errors import DslaunchError
from dslaunch.train.dist import init_world
try:
    init_world(timeout_s=3)
except DslaunchError as error:
    print(error.format())
    sys.exit(error.exit_code)
"""


def test_a_master_that_is_not_there_is_one_sentence(ops_dir: Path) -> None:
    """Port 1 of this machine: nobody listens, and rank 1 says so instead of a traceback."""
    done = run_python("-c", JOIN, env=GOOD)
    assert done.returncode == 3, done.stderr
    assert "rank 1 could not join 2 ranks at 127.0.0.1:1" in done.stdout


def test_a_rank_that_never_comes_is_counted(ops_dir: Path) -> None:
    """Rank 0 of two, alone."""
    done = run_python("-c", JOIN, env={**GOOD, "RANK": "0", "MASTER_PORT": str(free_port())})
    assert done.returncode == 3, done.stderr
    assert "rank 0 could not join 2 ranks at 127.0.0.1:" in done.stdout
    assert "1/2 clients joined" in done.stdout


COUNT_DEVICES = """
import os
from dslaunch.train.dist import tell_deepspeed_the_local_size
if os.environ.pop("CURE"):
    tell_deepspeed_the_local_size()
from deepspeed.accelerator import get_accelerator
print(get_accelerator().device_count())
"""


def count_devices(tmp_path: Path, *, cure: str) -> tuple[str, bool]:
    """What DeepSpeed counts on a CPU under torchrun's variables, and whether it started numactl for it."""
    witness = tmp_path / "numactl-ran"
    numactl = tmp_path / "numactl"
    numactl.write_text(f"#!/bin/sh\n: > '{witness}'\nexit 1\n")
    numactl.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = run_python("-c", COUNT_DEVICES, env={"CURE": cure, "LOCAL_WORLD_SIZE": "2", "PATH": path})
    return done.stdout.strip().rpartition("\n")[2], witness.exists()


def test_upstream_starts_numactl_to_count_devices(tmp_path: Path) -> None:
    assert count_devices(tmp_path, cure="")[1]


def test_no_numactl_once_the_local_size_is_told(tmp_path: Path) -> None:
    assert count_devices(tmp_path, cure="yes") == ("2", False)


def buffers_left(script: str) -> set[Path]:
    """The buffers in shared memory that two ranks running ``script`` leave behind; they are removed."""
    before = set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
    env = {"LOCAL_SIZE": "2"}  # as the deepspeed command sets it: all ranks on this host share memory
    check_ranks(run_ranks(["-W", "ignore", "-c", script], world_size=2, env=env, timeout_s=120))
    left = set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")) - before
    for path in left:
        path.unlink()
    return left


def test_upstream_leaves_its_buffers_in_shared_memory(ops_dir: Path) -> None:
    assert len(buffers_left("import deepspeed; deepspeed.init_distributed()")) == 2


def test_no_buffer_is_left_in_shared_memory(ops_dir: Path) -> None:
    script = """
import torch
from dslaunch.train.dist import init_world
init_world()
from deepspeed import comm
ones = torch.ones(4096)
comm.inference_all_reduce(ones)  # through the buffer, which no longer has a name
assert ones.sum() == 8192
"""
    assert buffers_left(script) == set()


def test_upstream_gives_its_groups_no_time_out_and_ours_is_kept(ops_dir: Path) -> None:
    script = """
import datetime, deepspeed, torch
from deepspeed import comm
def timeout_s(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
deepspeed.init_distributed(timeout=datetime.timedelta(seconds=7), auto_mpi_discovery=False)
bare = timeout_s(comm.new_group([0]))  # as deepspeed/utils/groups.py makes its own
from dslaunch.train.dist import init_world
init_world(timeout_s=7)
init_world()  # as the engine does: it changes nothing
print(timeout_s(torch.distributed.group.WORLD), bare, timeout_s(comm.new_group([0])))
"""
    env = {**GOOD, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    done = run_python("-c", script, env=env)
    assert done.stdout.splitlines()[-1] == "7.0 1800.0 7.0", done.stdout + done.stderr


@pytest.mark.parametrize(("local_rank", "visible", "wanted"), [(0, 1, 0), (3, 8, 3), (3, 1, 0)])
def test_a_rank_finds_its_device(local_rank: int, visible: int, wanted: int) -> None:
    assert find_device(local_rank, visible) == wanted


def test_a_rank_without_a_device_says_so() -> None:
    with pytest.raises(EnvironmentNotReady, match="local rank 3 has no device: 2 are visible to it"):
        find_device(3, 2)
