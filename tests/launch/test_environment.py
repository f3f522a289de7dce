"""What each rank finds in its environment."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.hostfile import parse_hostfile, select_hosts
from dslaunch.core.packages import COMPARED
from dslaunch.core.plan import LaunchPlan, from_json, to_json
from dslaunch.core.topology import Host, Topology, local_topology
from dslaunch.launch import agent
from dslaunch.launch.agent import Refusal, check_gpus, models_of_gpus, visible_devices
from dslaunch.launch.jit_cache import torch_extensions_dir
from dslaunch.launch.orders import build_orders, check_launch, encode_orders
from tests.launch.conftest import Launch
from tests.launch.launching import python

SHOW = "import json; open(f'env-{rank}', 'w').write(json.dumps(dict(os.environ)))"


def seen(directory: Path, rank: int) -> dict[str, str]:
    environ: dict[str, str] = json.loads((directory / f"env-{rank}").read_text())
    return environ


def plan(**more: Any) -> LaunchPlan:
    fields: dict[str, Any] = {
        "argv": ("true",), "topology": local_topology(2), "run_dir": "/runs/x", "cwd": "/", **more,
    }  # fmt: skip
    return LaunchPlan(**fields)


def test_numbers_of_each_rank(launch: Launch, tmp_path: Path) -> None:
    launched = launch(python(SHOW), num_ranks=3)
    assert launched.wait()[0] == 0
    port = str(launched.events("launch_start")[0]["master_port"])
    for rank in range(3):
        environ = seen(tmp_path, rank)
        assert {name: environ[name] for name in (
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
        )} == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
            "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        assert environ["DS_ACCELERATOR"] == "cpu"
        assert environ["PYTHONNOUSERSITE"] == "1"
        assert environ["DSLAUNCH_RUN_DIR"] == str(launched.run_dir)


def test_no_option_is_injected(launch: Launch) -> None:
    # A script with a strict parser dies of a --local_rank that it does not know.
    code = "import argparse; argparse.ArgumentParser().parse_args(); assert 'LOCAL_RANK' in os.environ"
    assert launch([sys.executable, *python(code)[2:]]).wait()[0] == 0


def test_threads_are_shared_out_unless_set(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    one_core = (
        "import os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    assert launch(python(SHOW), num_ranks=2, prefix=[sys.executable, "-c", one_core]).wait()[0] == 0
    assert seen(tmp_path, 1)["OMP_NUM_THREADS"] == "1"
    assert launch(python(SHOW), "--env", "OMP_NUM_THREADS=7", run_dir="set").wait()[0] == 0
    assert seen(tmp_path, 1)["OMP_NUM_THREADS"] == "7"


def test_the_users_choices_beat_our_defaults(launch: Launch, tmp_path: Path) -> None:
    options = ("--env", "PYTHONNOUSERSITE=", "--env", "TORCH_EXTENSIONS_DIR=/mine")
    assert launch(python(SHOW), *options, num_ranks=1).wait()[0] == 0
    environ = seen(tmp_path, 0)
    assert environ["PYTHONNOUSERSITE"] == ""
    assert environ["TORCH_EXTENSIONS_DIR"] == "/mine"


@pytest.mark.parametrize("inherited", [{}, {"DS_ACCELERATOR": "cpu"}, {"DS_ACCELERATOR": "xpu"}])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_deepspeed_is_told_the_planned_device_whatever_is_set(kind: str, inherited: dict[str, str]) -> None:
    orders = build_orders(plan(device_type=kind), 0, environ=inherited)
    assert orders["env"]["DS_ACCELERATOR"] == kind


@pytest.mark.parametrize("more", [{"env": {"DS_ACCELERATOR": "cpu"}}, {"secret_env": ("DS_ACCELERATOR",)}])
def test_another_device_than_the_planned_one_cannot_be_given(more: dict[str, Any]) -> None:
    environ = {"DS_ACCELERATOR": "cpu"}
    check_launch(plan(device_type="cpu", **more), environ)
    check_launch(plan(device_type="cuda"), environ)  # only inherited: overridden
    with pytest.raises(ConfigError, match="DS_ACCELERATOR is 'cpu', but the plan is for cuda"):
        check_launch(plan(device_type="cuda", **more), environ)


def test_gpu_ids_count_by_pci_address() -> None:
    def order(environ: dict[str, str], **more: Any) -> str | None:
        orders = build_orders(plan(**more), 0, environ=environ)
        value: str | None = orders["env"].get("CUDA_DEVICE_ORDER")
        return value

    assert order({}, device_type="cuda") == "PCI_BUS_ID"
    assert order({}, device_type="cpu") is None
    assert order({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, device_type="cuda") is None  # inherited as it is
    assert order({}, device_type="cuda", env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == "FASTEST_FIRST"


def test_numbers_where_slots_differ_per_host() -> None:
    topology = Topology(hosts=(Host(name="a", slots=("0", "1")), Host(name="b", slots=("3",))))
    ranks = [
        rank["env"]
        for node in range(2)
        for rank in build_orders(plan(topology=topology), node, environ={})["ranks"]
    ]
    assert [[env[k] for k in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")] for env in ranks] == [
        ["0", "0", "2", "0"],
        ["1", "1", "2", "0"],
        ["2", "0", "1", "1"],
    ]


def test_orders_are_one_line_of_ascii_and_carry_every_byte() -> None:
    argv = ("x", "\udcff\n\u4e16", "")
    line = encode_orders(build_orders(plan(argv=argv), 0, environ={}))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert tuple(json.loads(line)["argv"]) == argv


def test_a_secret_is_passed_by_value_but_only_its_name_is_planned() -> None:
    orders = build_orders(plan(secret_env=("HF_TOKEN",)), 0, environ={"HF_TOKEN": "s3cret"})
    assert orders["env"]["HF_TOKEN"] == "s3cret"
    with pytest.raises(EnvironmentNotReady, match="HF_TOKEN is to be passed"):
        check_launch(plan(secret_env=("HF_TOKEN",)), {})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_our_variables_cannot_be_given(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_launch(plan(env={name: "1"}), {})


@pytest.mark.parametrize(
    ("slots", "all_slots", "inherited", "expected"),
    [
        ("0,1", "0,1", None, "0,1"),
        ("0,1", "0,1", b"4,5,6", "4,5"),  # places in what the scheduler gave
        ("4,6", "4,6", b"4,5,6", "4,6"),  # its own ids
        ("1", "0,1", b"GPU-a,GPU-b", "GPU-b"),
        ("GPU-b", "GPU-a,GPU-b", b"GPU-a, GPU-b", "GPU-b"),
        ("MIG-x", "MIG-x", None, "MIG-x"),
        # A slot of two is the same device whether or not the other is used.
        ("0", "0,1", b"1,2", "1"),
        ("1", "0,1", b"1,2", "2"),
        ("0,1", "0,1", b"1,2", "1,2"),
        ("1", "1,2", b"1,2", "1"),
        ("2", "1,2", b"1,2", "2"),
        ("1", "1", b"2,1", "1"),
        ("1", "0,1", b"1,0", "1"),
        ("1,0", "1,0", b"2,3", "3,2"),
    ],
)
def test_visible_devices(slots: str, all_slots: str, inherited: bytes | None, expected: str) -> None:
    assert visible_devices(slots.split(","), all_slots.split(","), inherited) == expected


def test_two_slots_are_never_one_device() -> None:
    numbers = [str(i) for i in range(4)]
    for given in itertools.permutations(numbers, 2):
        for count in range(1, 5):
            for listed in itertools.combinations(numbers, count):
                found = [agent.devices_of([slot], listed, given)[slot] for slot in listed]
                known = [device for device in found if device is not None]
                assert len(known) == len(set(known)), (listed, given, found)
                assert dict(zip(listed, found, strict=True)) == agent.devices_of(listed, listed, given)


def test_a_filter_does_not_change_what_the_slots_are() -> None:
    hosts = parse_hostfile("n slots=2\nm slots=1,2\n", "hosts")
    for include, expected in (
        ("n:1", {"slots": ["1"], "of": ["0", "1"], "variable": None}),
        ("m:2", {"slots": ["2"], "of": ["1", "2"], "variable": None}),
    ):
        topology = Topology(hosts=select_hosts(hosts, include=include))
        read_back = from_json(LaunchPlan, to_json(plan(device_type="cuda", topology=topology)))
        assert build_orders(read_back, 0, environ={})["visible_devices"] == expected


@pytest.mark.parametrize(
    ("slots", "all_slots", "inherited", "words"),
    [
        ("2", "2", b"4,5", "slot 2 of 2 is not among the 2 devices visible here (4,5)"),
        ("4", "0,1,2,3,4", b"4,5", "slot 4 of 0,1,2,3,4 is not"),  # a place: slot 0 is device 4
        ("0", "0", b"", "the 0 devices"),
        ("0", "0", b"-1", "the 0 devices"),
        ("GPU-x", "GPU-x", b"0", "slot GPU-x"),
    ],
)
def test_devices_that_are_not_ours_are_refused(
    slots: str, all_slots: str, inherited: bytes, words: str
) -> None:
    with pytest.raises(Refusal, match=re.escape(words)):
        visible_devices(slots.split(","), all_slots.split(","), inherited)


def test_ops_are_kept_apart_per_interpreter() -> None:
    environ = {"DSLAUNCH_CACHE": "/cache", "PATH": os.environ["PATH"]}
    ours = torch_extensions_dir(sys.executable, environ, "/")
    assert ours.parent == Path("/cache/torch_extensions")
    assert ours == torch_extensions_dir(sys.executable, environ, "/tmp")
    assert ours != torch_extensions_dir("/usr/bin/other-python", environ, "/")


def gpu_host(root: Path, num_gpus: int, *, listed: bool = True, files: Sequence[str] = ()) -> str:
    """A machine made of files, with as many GPUs; ``files``: device files besides."""
    (root / "dev").mkdir(parents=True)
    for index in range(num_gpus):
        (root / f"dev/nvidia{index}").touch()
        if listed:
            folder = root / f"proc/driver/nvidia/gpus/0000:0{index}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(
                f"Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 9\nDevice Minor: \t {index}\n"
            )
    for name in files:
        (root / "dev" / name).touch()
    return str(root)


def environment(root: Path, files: dict[str, str]) -> bytes:
    """A Python of files; its program."""
    for name, text in {"bin/python": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return os.fsencode(root / "bin/python")


LIB = "lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("files", "versions"),
    [
        ({f"{LIB}/torch-2.9.0+cu128.dist-info/METADATA": ""}, {"python": "3.11", "torch": "2.9.0+cu128"}),
        (  # venv; what is installed editable has metadata too
            {"pyvenv.cfg": "version = 3.11.4\n", f"{LIB}/flash_attn-2.8.3.dist-info/RECORD": ""},
            {"python": "3.11.4", "flash-attn": "2.8.3"},
        ),
        (  # conda: its own record of Python, and packages that setup.py has installed
            {"conda-meta/python-3.11.9-h955ad1f_0.json": "", f"{LIB}/torch-2.5.1-py3.11.egg-info/x": "",
             f"{LIB}/peft-0.21.2.egg-info": "", f"{LIB}/torchvision-0.20.dist-info/RECORD": ""},
            {"python": "3.11.9", "torch": "2.5.1", "peft": "0.21.2"},
        ),
        # Ubuntu's, as in NVIDIA's images; Fedora's; two Pythons, of which it is not known which one runs
        ({"lib/python3.12/dist-packages/torch-2.8.dist-info/x": ""}, {"python": "3.12", "torch": "2.8"}),
        ({"lib64/python3.9/site-packages/torch-2.8.dist-info/x": ""}, {"python": "3.9", "torch": "2.8"}),
        ({"lib/python3.9/os.py": "", "lib/python3.11/os.py": ""}, {}),
        ({f"{LIB}/~orch-2.9.0.dist-info/RECORD": "", f"{LIB}/torch/version.py": ""}, {"python": "3.11"}),
    ],
)  # fmt: skip
def test_versions_by_the_names_of_metadata(
    tmp_path: Path, files: dict[str, str], versions: dict[str, str]
) -> None:
    assert agent.versions_beside(environment(tmp_path, files), COMPARED) == versions


def test_versions_from_where_python_looks_besides(tmp_path: Path) -> None:
    """PYTHONPATH comes first; then a venv's own, also an old editable one; then those of its base."""
    source = {"deepspeed.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.9+dev\n"}
    environment(tmp_path / "source", source)
    below = {f"{LIB}/{name}-1.0.dist-info/RECORD": "" for name in ("torch", "peft", "deepspeed")}
    environment(tmp_path / "below", below)
    environment(tmp_path / "module", {"torch-3.0.dist-info/RECORD": ""})
    files = {
        "pyvenv.cfg": f"home = {tmp_path}/below/bin\ninclude-system-site-packages = true\nversion = 3.11.4\n",
        f"{LIB}/deepspeed.egg-link": f"{tmp_path}/source\n.",
    }
    program = environment(tmp_path / "venv", files)
    found = agent.versions_beside(program, COMPARED, os.fsencode(f"{tmp_path}/no:{tmp_path}/module"))
    assert found == {"python": "3.11.4", "torch": "3.0", "deepspeed": "0.19.9+dev", "peft": "1.0"}


def test_a_venv_on_debians_python_sees_what_that_sees() -> None:
    settings = "home = /usr/bin\ninclude-system-site-packages = true\n"
    assert agent.tops_of_packages("/opt/venv", settings) == ["/opt/venv", "/usr/local", "/usr"]
    assert agent.tops_of_packages("/opt/venv", settings.replace("true", "false")) == ["/opt/venv"]


def test_versions_of_this_environment() -> None:
    """The same that the interpreter tells."""
    installed = {name: version(name) for name in COMPARED if find_spec(name.replace("-", "_"))}
    found = agent.versions_beside(os.fsencode(sys.executable), COMPARED)
    assert found == {"python": sys.version.split()[0], **installed}
    assert agent.versions_beside(b"/bin/sh", COMPARED) == {}


def test_gpus_that_a_host_has(tmp_path: Path) -> None:
    root = gpu_host(tmp_path, 4)
    assert models_of_gpus(root) == ["NVIDIA A100-SXM4-80GB"] * 4
    check_gpus(["0", "3"], root)
    check_gpus(["GPU-1a2b", "MIG-3c4d"], root)  # which those are only the driver knows
    (tmp_path / "dev/nvidia3").unlink()  # not given to this container
    with pytest.raises(Refusal, match=r"the plan is for GPU 3, and this host has 3 \(0,1,2\)"):
        check_gpus(["0", "3"], root)


@pytest.mark.parametrize(
    ("num", "listed", "files"), [(4, False, ()), (0, True, ("kfd",)), (0, True, ("dxg",))]
)
def test_gpus_that_are_there_and_not_listed(
    tmp_path: Path, num: int, listed: bool, files: Sequence[str]
) -> None:
    check_gpus(["7"], gpu_host(tmp_path, num, listed=listed, files=files))


def test_amd_gpus_by_their_architecture(tmp_path: Path) -> None:
    """Counted too; node 0 is the CPU."""
    root = gpu_host(tmp_path, 0, files=("kfd",))
    for node, arch in ((10, "90010"), (0, "0"), (2, "90402")):  # as a folder may list them
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"simd_count 4\ngfx_target_version {arch}\n")
    assert models_of_gpus(root) == ["gfx942", "gfx90a"]
    check_gpus(["0", "1"], root)
    with pytest.raises(Refusal, match=r"the plan is for GPU 2, and this host has 2 \(0,1\)"):
        check_gpus(["2"], root)


@pytest.mark.parametrize(
    ("devices", "accelerator", "variable"),
    [
        ((), "cuda", None),  # NVIDIA's or AMD's: the agent sees on the host which
        (("mi300x",), "cuda", None),
        (("max1550",), "xpu", "ZE_AFFINITY_MASK"),
        (("ascend910b",), "npu", "ASCEND_RT_VISIBLE_DEVICES"),
        (("gaudi2",), "hpu", "HABANA_VISIBLE_MODULES"),
    ],
)
def test_the_variable_of_each_vendor(
    devices: tuple[str, ...], accelerator: str, variable: str | None
) -> None:
    topology = Topology(hosts=(Host(name="n", slots=("2", "3")),))
    orders = build_orders(plan(device_type="cuda", devices=devices, topology=topology), 0, environ={})
    assert orders["env"]["DS_ACCELERATOR"] == accelerator
    assert ("CUDA_DEVICE_ORDER" in orders["env"]) == (accelerator == "cuda")
    assert orders["visible_devices"] == {"slots": ["2", "3"], "of": ["2", "3"], "variable": variable}


def test_devices_of_another_vendor(launch: Launch, tmp_path: Path) -> None:
    """No list of them is known, so those that are named are believed, within what is visible already."""
    options = ("--gpu", "max1550", "--env", "DS_ACCELERATOR=xpu")
    code, _, err = launch(python(SHOW), *options, env={"ZE_AFFINITY_MASK": "4,5"}).wait()
    assert code == 0, err
    assert seen(tmp_path, 1)["ZE_AFFINITY_MASK"] == "4,5"
    assert seen(tmp_path, 1)["DS_ACCELERATOR"] == "xpu"
    assert "CUDA_VISIBLE_DEVICES" not in seen(tmp_path, 1)


def test_a_host_without_gpus(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="the plan is for GPU GPU-1a, and this host has none"):
        check_gpus(["GPU-1a"], gpu_host(tmp_path, 0))
