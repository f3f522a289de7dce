"""A local launch never starts ranks where they do not belong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import Host, Topology, is_this_machine, local_topology
from dslaunch.launch.local import check_devices, check_hosts


@pytest.mark.parametrize("name", ["localhost", os.uname().nodename, "127.0.0.1"])
def test_this_machine(name: str) -> None:
    assert is_this_machine(name)
    check_hosts(Topology(hosts=(Host(name=name, slots=("0",)),)))


@pytest.mark.parametrize("name", ["192.0.2.1", "worker-1.invalid", "a" * 300, "\udcff"])
def test_another_machine(name: str) -> None:
    assert not is_this_machine(name)
    with pytest.raises(ConfigError, match="nothing was started"):
        check_hosts(Topology(hosts=(Host(name=name, slots=("0",)),)))


def test_several_hosts_are_not_this_machine() -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        check_hosts(Topology(hosts=(*local_topology(1).hosts, *local_topology(1).hosts)))


def gpus(root: Path, count: int) -> None:
    (root / "dev").mkdir()
    for minor in range(count):
        folder = root / f"proc/driver/nvidia/gpus/0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: NVIDIA H100\nDevice Minor: {minor}\n")
        (root / f"dev/nvidia{minor}").touch()


def on_slots(*slots: str, **more: object) -> LaunchPlan:
    topology = Topology(hosts=(Host(name="localhost", slots=slots),))
    return LaunchPlan(argv=("true",), topology=topology, run_dir="/r", cwd="/", device_type="cuda", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slots", "environ"),
    [
        (("0", "1"), {}),
        (("0", "1"), {"DS_ACCELERATOR": "cpu"}),  # which the ranks do not see
        (("0",), {"CUDA_VISIBLE_DEVICES": "1"}),  # a position
        (("1",), {"CUDA_VISIBLE_DEVICES": "1"}),  # an id
        (("GPU-7",), {}),
    ],
)
def test_gpus_that_are_here(tmp_path: Path, slots: tuple[str, ...], environ: dict[str, str]) -> None:
    gpus(tmp_path, 2)
    check_devices(on_slots(*slots), environ, root=tmp_path)


@pytest.mark.parametrize(
    ("slots", "there", "words"),
    [
        (("0", "2"), 2, "GPU 2, but this machine shows 2 .0, 1.; nothing was started"),
        (("0",), 0, "GPU 0, but this machine shows none; nothing was started"),
        (("GPU-7",), 0, "GPU GPU-7, but this machine shows none"),
    ],
)
def test_gpus_that_are_elsewhere(tmp_path: Path, slots: tuple[str, ...], there: int, words: str) -> None:
    gpus(tmp_path, there)
    with pytest.raises(EnvironmentNotReady, match=words):
        check_devices(on_slots(*slots), {}, root=tmp_path)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("--gpu", "leave --gpu out, or give --gpu cpu"),
        ("run.yaml:7", "leave cluster.gpu (run.yaml:7) out, or give --gpu cpu"),
        ("derived", "machine: give --gpu cpu"),
        (None, "machine: give --gpu cpu"),
    ],
)
def test_the_hint_names_what_asked_for_gpus(tmp_path: Path, source: str | None, advice: str) -> None:
    with pytest.raises(EnvironmentNotReady) as caught:
        check_devices(on_slots("0"), {}, source=source, root=tmp_path)
    assert (caught.value.hint or "").endswith(advice)
    many = on_slots(*map(str, range(1 + (cores := os.cpu_count() or 1))))
    with pytest.raises(EnvironmentNotReady) as caught:
        check_devices(many, {}, source=source, root=tmp_path)
    fewer = f"{advice} --num-gpus-per-node {cores} ({cores + 1} ranks would share {cores} cores)"
    assert (caught.value.hint or "").endswith(fewer)


def test_a_place_that_a_filter_left_is_no_id(tmp_path: Path) -> None:
    gpus(tmp_path, 2)
    topology = Topology(hosts=(Host(name="localhost", slots=("1",), all_slots=("0", "1")),))
    plan = replace(on_slots("1"), topology=topology)
    with pytest.raises(EnvironmentNotReady, match="for GPU 1, but this machine shows 1 "):
        check_devices(plan, {"CUDA_VISIBLE_DEVICES": "1"}, root=tmp_path)


def test_a_machine_that_cannot_list_its_gpus_is_let_try(tmp_path: Path) -> None:
    gpus(tmp_path, 0)
    (tmp_path / "dev/dxg").touch()
    check_devices(on_slots("0"), {}, root=tmp_path)


def test_hidden_gpus_are_not_here(tmp_path: Path) -> None:
    gpus(tmp_path, 2)
    with pytest.raises(EnvironmentNotReady, match="GPU 0, but this machine shows none"):
        check_devices(on_slots("0"), {"CUDA_VISIBLE_DEVICES": ""}, root=tmp_path)
