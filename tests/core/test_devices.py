"""The device table, and what is found under /proc and /sys (real trees, made here)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.core import devices
from dslaunch.core.devices import lookup_device, may_have_gpu, memory_sizes, probe_inventory
from dslaunch.core.errors import ConfigError

KINDS = {
    ("slow", "no"): ["P100", "Tesla P40", "NVIDIA GeForce GTX 1080 Ti", "TITAN Xp", "sm_61"],
    ("yes", "no"): [
        "v100",
        "V100-32GB",
        "Tesla V100-SXM2-32GB",
        "T4",
        "NVIDIA GeForce RTX 2080 Ti",
        "Quadro RTX 6000",
        "sm_70",
        "sm_75",
        "ascend 910a",
    ],
    ("yes", "slow"): ["MI100", "gfx908"],
    ("yes", "yes"): [
        "a100",
        "a100-80g",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "A10G",
        "NVIDIA RTX A6000",
        "NVIDIA GeForce RTX 3090",
        "NVIDIA GeForce RTX 4090 D",
        "L4",
        "L40S",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA H100 80GB HBM3",
        "H100 NVL",
        "NVIDIA H200",
        "NVIDIA GH200 480GB",
        "B200",
        "rtx 5090",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "AMD Instinct MI250X",
        "mi300x",
        "gfx942",
        "Ascend-910B",
        "gaudi2",
        "sm_80",
        "sm90",
    ],
    ("no", "slow"): ["cpu", "CPU"],
}


@pytest.mark.parametrize(
    ("support", "name"), [(kind, name) for kind, names in KINDS.items() for name in names]
)
def test_what_a_device_computes_in(support: tuple[str, str], name: str) -> None:
    device = lookup_device(name)
    assert (device.fp16, device.bf16) == support


def test_every_name_of_the_table_finds_itself() -> None:
    for name in devices._by_name():
        assert lookup_device(name).name == name


@pytest.mark.parametrize(
    ("text", "sizes", "gib"),
    [
        ("a100-80g", (80,), 78.8),
        ("NVIDIA A100-SXM4-80GB", (80,), 78.8),
        ("a100", (40, 80), 39.4),
        ("V100-32GB", (32,), 31.52),
        ("h200", (141,), 138.88),
        ("L40S", (48,), 44.16),  # GDDR with ECC
        ("NVIDIA A10G", (24,), 22.08),  # no size of 10 GB
        ("NVIDIA GH200 480GB", (96, 144), 94.56),  # 480: what its CPU has
        ("NVIDIA GH200 144G HBM3e", (144,), 141.84),
        ("GTX 1080 Ti", (11,), 10.83),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (16,), 15.76),
        ("NVIDIA H20-3e", (96, 141), 94.56),
        ("Tesla V100-DGXS-32GB", (32,), 31.52),
        ("AMD Instinct MI250X / MI250", (64,), 63.04),
        ("Ascend910B3", (64,), 63.04),
        ("Intel(R) Data Center GPU Max 1550", (64,), 63.04),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (5,), 4.92),
        ("sm_80", (), None),
        ("sm_80 24g", (24,), 23.64),
        ("cpu", (), None),
    ],
)
def test_the_memory_of_a_device(text: str, sizes: tuple[int, ...], gib: float | None) -> None:
    assert memory_sizes(text) == sizes
    assert lookup_device(text).memory_gib == gib


def test_every_device_with_a_size_is_in_the_table_of_names() -> None:
    from dslaunch.core.devices import CPU_NAME, _by_name, _nominal

    assert set(_nominal()) <= {*_by_name(), CPU_NAME}


@pytest.mark.parametrize(
    ("text", "near"),
    [("a101", "a100"), ("h1000", "h100"), ("potato", "a100"), ("a100-80", "such as a100-80g, or"),
     ("V100 24", "such as V100-16g, V100-32g, or")],
)  # fmt: skip
def test_an_unknown_device_names_its_neighbours(text: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown device '{text}'") as caught:
        lookup_device(text)
    assert near in (caught.value.hint or "")


def cpu(root: Path, flags: str) -> None:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/cpuinfo").write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")


def gpu(root: Path, minor: int, model: str, *, device_file: bool = True) -> None:
    folder = root / f"proc/driver/nvidia/gpus/0000:0{minor}:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 12\nDevice Minor: \t {minor}\n")
    if device_file:
        (root / "dev").mkdir(exist_ok=True)
        (root / f"dev/nvidia{minor}").touch()


@pytest.mark.parametrize(
    ("flags", "fp16", "bf16"),
    [
        ("avx2 avx512f avx512_vnni", "no", "slow"),
        ("avx512_bf16", "no", "yes"),
        ("amx_bf16 amx_tile", "no", "yes"),
        ("avx512_fp16 avx512_bf16", "yes", "yes"),
        ("amx_fp16", "yes", "slow"),
    ],
)
def test_the_cpu_counts_by_its_instructions(tmp_path: Path, flags: str, fp16: str, bf16: str) -> None:
    cpu(tmp_path, flags)
    found = probe_inventory({}, root=tmp_path)
    assert (found.cpu.fp16, found.cpu.bf16, found.accelerators) == (fp16, bf16, ())


@pytest.mark.parametrize(
    ("device", "expected"), [("nvidia0", True), ("dxg", True), ("kfd", True), ("null", False)]
)
def test_signs_of_a_gpu(tmp_path: Path, device: str, expected: bool) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    assert may_have_gpu(tmp_path) is expected


def test_nvidia_gpus_are_found_without_a_driver_call(tmp_path: Path) -> None:
    gpu(tmp_path, 0, "NVIDIA A100-SXM4-80GB")
    gpu(tmp_path, 1, "Tesla V100-SXM2-32GB")
    found = probe_inventory({}, root=tmp_path).accelerators
    assert [(a.id, a.device.name) for a in found] == [("0", "a100"), ("1", "v100")]


def test_a_gpu_of_the_host_that_a_container_has_not_got_is_not_counted(tmp_path: Path) -> None:
    gpu(tmp_path, 0, "NVIDIA H100", device_file=False)
    assert probe_inventory({}, root=tmp_path).accelerators == ()


def test_an_unlisted_gpu_is_kept_as_unknown(tmp_path: Path) -> None:
    gpu(tmp_path, 0, "NVIDIA Xyzzy 9")
    device = probe_inventory({}, root=tmp_path).accelerators[0].device
    assert (device.name, device.fp16, device.bf16) == ("NVIDIA Xyzzy 9", "unknown", "unknown")


@pytest.mark.parametrize(
    ("environ", "ids"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,9,0"}, ["1"]),  # CUDA stops at the first one that is not there
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f1b,MIG-22"}, ["GPU-8f1b", "MIG-22"]),
        ({"DS_ACCELERATOR": "cpu"}, []),
        ({"DS_ACCELERATOR": "cuda"}, ["0", "1", "2"]),
    ],
)
def test_visible_devices_are_respected(tmp_path: Path, environ: dict[str, str], ids: list[str]) -> None:
    for minor in range(3):
        gpu(tmp_path, minor, "NVIDIA A100-SXM4-80GB")
    assert [a.id for a in probe_inventory(environ, root=tmp_path).accelerators] == ids


def amd(root: Path) -> None:
    (root / "dev").mkdir()
    (root / "dev/kfd").touch()
    for node, version in enumerate((0, 90402, 90010)):  # a CPU, an MI300, an MI200
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"simd_count 4\ngfx_target_version {version}\n")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, [("1", "gfx90a")]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [("1", "gfx90a"), ("0", "gfx942")]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [("1", "gfx90a")]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [("0", "gfx942")]),
        (
            {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"},
            [("0", "gfx90a")],
        ),  # the first of those left
    ],
)
def test_amds_variables_apply_one_after_the_other(
    tmp_path: Path, environ: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    amd(tmp_path)
    assert [(a.id, a.device.arch) for a in probe_inventory(environ, root=tmp_path).accelerators] == expected


def test_amd_gpus_are_found(tmp_path: Path) -> None:
    amd(tmp_path)
    found = probe_inventory({}, root=tmp_path).accelerators
    assert [a.device.arch for a in found] == ["gfx942", "gfx90a"]
    assert (
        probe_inventory({"HIP_VISIBLE_DEVICES": "1"}, root=tmp_path).accelerators[0].device.arch == "gfx90a"
    )
