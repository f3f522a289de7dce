"""`launch --print-as`: what is printed, written and said, without starting it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import Host, Topology
from dslaunch.launch.print_as import Printed, print_for_deepspeed, print_for_torchrun
from tests.cli.launching import dslaunch, error_of

BIN = Path(sys.executable).parent
ENVIRON = {"PATH": "/usr/bin", "HOME": "/h", "DSLAUNCH_CACHE": "/c", "TORCH_EXTENSIONS_DIR": "/ops"}
TWO = (Host(name="198.51.100.1", slots=("0", "1")), Host(name="198.51.100.2", slots=("0", "1")))


def plan(*argv: str, hosts: tuple[Host, ...] = TWO, **more: Any) -> LaunchPlan:
    fields: dict[str, Any] = {"run_dir": "/r", "cwd": "/w", "via": "ssh", "device_type": "cuda", **more}
    return LaunchPlan(argv=argv or ("prog",), topology=Topology(hosts=hosts), **fields)


def words(printed: Printed) -> list[str]:
    ((_, command),) = printed.commands
    return list(command.argv)


def texts(printed: Printed) -> dict[str, str]:
    return {str(file.path): file.text for file in printed.files}


def test_the_whole_deepspeed_command() -> None:
    printed = print_for_deepspeed(plan(sys.executable, "-m", "a.b", "--x", "1 2", master_port=1234), ENVIRON)
    assert words(printed) == [
        f"{BIN}/deepspeed", "--hostfile", "/r/deepspeed-hostfile", "--master_addr", "198.51.100.1",
        "--master_port", "1234", "--no_local_rank", "--module", "a.b", "--x", "1 2",
    ]  # fmt: skip
    ((host, command),) = printed.commands
    assert (host, command.env, command.cwd) == (
        os.uname().nodename, {"DS_ENV_FILE": "/r/deepspeed-env"}, "/w",
    )  # fmt: skip
    assert texts(printed) == {
        "/r/deepspeed-hostfile": "198.51.100.1 slots=2\n198.51.100.2 slots=2\n",
        "/r/deepspeed-env": "PATH=/usr/bin\nDSLAUNCH_CACHE=/c\nTORCH_EXTENSIONS_DIR=/ops\n"
        "PYTHONNOUSERSITE=1\nPYTHONUNBUFFERED=1\nDSLAUNCH_RUN_DIR=/r\nDS_ACCELERATOR=cuda\nCUDA_DEVICE_ORDER=PCI_BUS_ID\n",
    }
    assert [file.is_private for file in printed.files] == [False, True]


def test_the_whole_torchrun_lines_of_unequal_hosts() -> None:
    hosts = (Host(name="198.51.100.1", slots=("0", "1")), Host(name="198.51.100.2", slots=("3",)))
    printed = print_for_torchrun(plan(sys.executable, "train.py", "x y", hosts=hosts), ENVIRON)
    same = ["--master-addr=198.51.100.1", "--master-port=29500", "train.py", "x y"]
    assert [(host, list(command.argv)) for host, command in printed.commands] == [
        ("198.51.100.1", [f"{BIN}/torchrun", "--nnodes=2", "--nproc-per-node=2", "--node-rank=0", *same]),
        ("198.51.100.2", [f"{BIN}/torchrun", "--nnodes=2", "--nproc-per-node=1", "--node-rank=1", *same]),
    ]
    devices = [command.env.get("CUDA_VISIBLE_DEVICES") for _, command in printed.commands]
    assert devices == [None, "3"]


@pytest.mark.parametrize(
    ("argv", "deepspeed", "torchrun"),
    [
        ([sys.executable, "-u", "t.py"], ["--no_python", sys.executable, "-u", "t.py"], "--no-python"),
        (["/usr/bin/env", "x"], ["--no_python", "/usr/bin/env", "x"], "--no-python"),
        ([sys.executable, "my t.py"], ["--no_local_rank", "'my t.py'"], "--master-port=29500"),
    ],
)
def test_programs_scripts_and_interpreters(argv: list[str], deepspeed: list[str], torchrun: str) -> None:
    assert words(print_for_deepspeed(plan(*argv), ENVIRON))[-len(deepspeed) :] == deepspeed
    command = print_for_torchrun(plan(*argv), ENVIRON).commands[0][1]
    rest = argv if torchrun == "--no-python" else argv[1:]
    assert list(command.argv[-len(rest) - 1 :]) == [torchrun, *rest]


def test_one_host_that_is_this_machine_needs_no_ssh() -> None:
    here = plan("prog", "100%n $x", hosts=(Host(name="localhost", slots=("0", "1")),), via="local")
    printed = print_for_deepspeed(here, ENVIRON)
    assert words(printed)[-4:] == ["--no_ssh_check", "--no_python", "prog", "100%n $x"]
    assert printed.commands[0][1].env["DSLAUNCH_RUN_DIR"] == "/r"
    assert "/r/deepspeed-env" not in texts(printed)


def test_one_host_elsewhere_is_reached_all_the_same() -> None:
    printed = print_for_deepspeed(plan(hosts=TWO[1:]), ENVIRON)
    assert "--force_multi" in words(printed)


def test_chosen_slots_ports_and_what_gets_lost() -> None:
    hosts = (Host(name="a", slots=("2", "3"), port=2200), Host(name="b", slots=("0",), user="u", port=2200))
    asked = plan(
        "prog", hosts=hosts, max_restarts=2, cwd="/my dir", secret_env=("KEY",), master_addr="10.0.0.9"
    )
    printed = print_for_deepspeed(asked, {**ENVIRON, "HF_TOKEN": "s3cret", "NCCL_X": "a\nb", "PATH": "/none"})
    line = " ".join(words(printed))
    assert " --include a:2,3@b --ssh_port 2200 --master_addr 10.0.0.9 --master_port 29500 " in line
    assert texts(printed)["/r/deepspeed-hostfile"] == "a slots=4\nb slots=1\n"
    said = "\n".join(printed.notes)
    for part in (
        "max_restarts 2: DeepSpeed does not resume", "set User u in ~/.ssh/config", "NCCL_X: DeepSpeed",
        "apt-get install pdsh", "working directory /my dir will not do", "OMP_NUM_THREADS: set it",
        "KEY is not written down: add a line KEY=... to /r/deepspeed-env", "HF_TOKEN is not written down",
    ):  # fmt: skip
        assert part in said
    assert "s3cret" not in said + line + "".join(texts(printed).values())


def test_a_first_host_that_cannot_be_looked_up() -> None:
    hosts = (Host(name="alias.invalid", slots=("0",)), TWO[1])
    assert "--master_addr" not in words(print_for_deepspeed(plan(hosts=hosts), ENVIRON))  # it asks by ssh
    printed = print_for_torchrun(plan(hosts=hosts), ENVIRON)
    assert "--master-addr=alias.invalid" in printed.commands[0][1].argv
    assert any(note.startswith("alias.invalid is not known here") for note in printed.notes)


def test_torchrun_takes_no_address_with_an_interface() -> None:
    with pytest.raises(ConfigError, match="interface's name: fe80::1%eth0; nothing was written") as raised:
        print_for_torchrun(plan(master_addr="fe80::1%eth0"), ENVIRON)
    assert str(raised.value.hint).startswith("give --master-addr a name of the first host")
    with pytest.raises(ValueError, match="must be a dot-separated list of labels"):  # what it says itself
        parse_rendezvous_endpoint("fe80::1%eth0:29500", -1)
    printed = print_for_torchrun(plan(master_addr="2001:db8::1"), ENVIRON)
    assert "--master-addr=2001:db8::1" in printed.commands[0][1].argv


def test_the_command_writes_a_run_directory_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("198.51.100.1 slots=1\n198.51.100.2 slots=1\n")
    options = ("--hostfile", "hosts", "--gpu", "cpu", "--run-dir", "r", "--print-as", "deepspeed")
    dry = dslaunch(*options, "--dry-run", command=("--", "touch", "x y"), cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "r").exists()
    for _ in range(2):  # nothing was started, so the directory is free
        done = dslaunch(*options, command=("--", "touch", "x y"), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == dry.stdout
        assert done.stdout.endswith(" --no_local_rank --no_python touch 'x y'\n")
    assert (tmp_path / "r/deepspeed-env").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in (tmp_path / "r").iterdir()} == {
        ".lock", "plan.json", "hostfile", "launch.sh", "logs", "checkpoints",
        "deepspeed-env", "deepspeed-hostfile",
    }  # fmt: skip
    as_json = dslaunch(*options[:-1], "torchrun", "--json", command=("--", "true"), cwd=tmp_path)
    report = json.loads(as_json.stdout)
    assert (report["schema_version"], report["print_as"]) == (1, "torchrun")
    assert [line["host"] for line in report["commands"]] == ["198.51.100.1", "198.51.100.2"]
    assert not (tmp_path / "r/deepspeed-env").exists()


def test_hosts_without_names_cannot_be_printed(tmp_path: Path) -> None:
    options = ("--num-nodes", "2", "--num-gpus-per-node", "1", "--gpu", "cpu", "--print-as", "deepspeed")
    done = dslaunch(*options, command=("--", "true"), cwd=tmp_path)
    assert "name the hosts with --hostfile" in error_of(done)
    assert list(tmp_path.iterdir()) == []
