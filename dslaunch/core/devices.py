"""Devices: what each can compute in, and which ones this machine has.

The table lists what hardware does well, not what software lets pass: torch
emulates bf16 on a V100 and says that it is supported. Sources: the vendors'
architecture papers (tensor core types by compute capability), DeepSpeed 0.19.8
``accelerator/*``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dslaunch.core.errors import ConfigError

# "slow": torch emulates it, or the hardware gains nothing by it. "unknown": a device not in the table.
Support = Literal["yes", "slow", "no", "unknown"]


@dataclass(frozen=True)
class Device:
    """A kind of accelerator (or the CPU). ``arch``: compute capability, gfx name or the like.

    ``memory_gib``: what a program can use of it; None for a CPU and where it is not known.
    """

    name: str
    arch: str
    fp16: Support
    bf16: Support
    memory_gib: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.arch})" if self.arch else self.name


@dataclass(frozen=True)
class Accelerator:
    """One device of this machine, with the id that makes it visible to a process."""

    id: str
    device: Device


@dataclass(frozen=True)
class Inventory:
    """What was found on one machine. ``ram_gib``: None where it was not asked for."""

    accelerators: tuple[Accelerator, ...]
    cpu: Device
    ram_gib: float | None = None


_NVIDIA = {
    "sm_60": "p100",
    "sm_61": "p40 p4 gtx1050 gtx1060 gtx1070 gtx1080 gtx1080ti titanxp titanx",
    "sm_70": "v100 v100s titanv gv100",
    "sm_75": "t4 gtx1650 gtx1660 rtx2060 rtx2070 rtx2080 rtx2080ti titanrtx rtx4000 rtx5000 rtx6000 rtx8000",
    "sm_80": "a100 a100x a800 a30",
    "sm_86": "a2 a10 a10g a16 a40 a2000 a4000 a4500 a5000 a5500 a6000"
    " rtx3050 rtx3060 rtx3060ti rtx3060laptop rtx3070 rtx3080 rtx3080ti rtx3080laptop rtx3080tilaptop"
    " rtx3090",
    "sm_89": "l2 l4 l20 l40 l40s rtx4060 rtx4060ti rtx4070 rtx4070laptop rtx4080 rtx4080laptop rtx4090"
    " rtx4090laptop rtx4000ada rtx5000ada rtx6000ada",
    "sm_90": "h20 h100 h200 h800 gh200",
    "sm_100": "b100 b200 gb200",
    "sm_103": "b300 gb300",
    "sm_120": "rtx5060 rtx5060ti rtx5070 rtx5070ti rtx5070laptop rtx5080 rtx5090 rtx5090laptop rtxpro6000",
}
_OTHERS: list[tuple[str, Support, Support, str]] = [
    ("gfx906", "yes", "no", "mi50 mi60"),
    ("gfx908", "yes", "slow", "mi100"),
    ("gfx90a", "yes", "yes", "mi200 mi210 mi250 mi250x"),
    ("gfx942", "yes", "yes", "mi300 mi300x mi300a mi308x mi325x"),
    ("gfx950", "yes", "yes", "mi350 mi350x mi355x"),
    ("ascend910a", "yes", "no", "ascend910a ascend910"),
    ("ascend910b", "yes", "yes", "ascend910b ascend910c"),
    ("gaudi2", "yes", "yes", "gaudi2 hl225"),
    ("gaudi3", "yes", "yes", "gaudi3 hl325"),
    ("pvc", "yes", "yes", "pvc max1100 max1550"),
]
# DeepSpeed names what is not "cuda", as AMD GPUs are (DS_ACCELERATOR; accelerator/real_accelerator.py).
_ACCELERATORS = {"pvc": "xpu", "ascend910a": "npu", "ascend910b": "npu", "gaudi2": "hpu", "gaudi3": "hpu"}
# Nominal GB by name; where a device comes in several sizes the smallest first. Of a module of two
# dies (mi250, max1550) what one device of the system has.
_HBM_GB = (
    "p100=16 v100=16/32 v100s=32 titanv=12 gv100=32 a100=40/80 a100x=80 a800=40/80 a30=24 h20=96/141 "
    "h100=80/94 h200=141 h800=80 gh200=96/144 b100=180 b200=180 gb200=186 b300=270 gb300=270 "
    "mi50=16/32 mi60=32 mi100=32 mi200=64 mi210=64 mi250=64 mi250x=64 mi300=192 mi300x=192 mi300a=128 "
    "mi308x=192 mi325x=256 mi350=288 mi350x=288 mi355x=288 ascend910=32 ascend910a=32 ascend910b=64 "
    "ascend910c=64 gaudi2=96 hl225=96 gaudi3=128 hl325=128 max1100=48 max1550=64"
)
_GDDR_GB = (
    "gtx1070=8 gtx1080=8 gtx1080ti=11 titanxp=12 titanx=12 rtx2060=6 rtx2070=8 rtx2080=8 rtx2080ti=11 "
    "titanrtx=24 rtx4000=8 rtx5000=16 rtx6000=24 rtx8000=48 a2000=6/12 a4000=16 a4500=20 a5000=24 a5500=24 "
    "a6000=48 rtx3050=8 rtx3060=12 rtx3060ti=8 rtx3060laptop=6 rtx3070=8 rtx3080=10/12 rtx3080ti=12 "
    "rtx3080laptop=8/16 rtx3080tilaptop=16 rtx3090=24 rtx4060=8 rtx4060ti=8/16 rtx4070=12 rtx4070laptop=8 "
    "rtx4080=16 "
    "rtx4080laptop=12 rtx4090=24 rtx4090laptop=16 rtx4000ada=20 rtx5000ada=32 rtx6000ada=48 rtx5060=8 "
    "rtx5060ti=8/16 rtx5070=12 rtx5070ti=16 rtx5070laptop=8 rtx5080=16 rtx5090=32 rtx5090laptop=24 "
    "rtxpro6000=96"
)
_GDDR_ECC_GB = "p40=24 p4=8 t4=16 a2=16 a10=24 a10g=24 a16=16 a40=48 l2=24 l4=24 l20=48 l40=48 l40s=48"
# Nominal size -> GiB that a program gets: the driver keeps some, and ECC on GDDR takes a sixteenth.
USABLE_SHARE = 0.985
_USABLE = ((_HBM_GB, USABLE_SHARE), (_GDDR_GB, USABLE_SHARE), (_GDDR_ECC_GB, 0.92))
_SIZE = re.compile(r"(?<![a-z\d])(\d+)\s*gi?b?\b")  # not the end of a name: a10g
_MEMORY = re.compile(r"[\s_-]+\d+\s*gi?b?\b|\bmig\b.*$|\bhbm\d\w*")
_VENDOR = re.compile(
    r"nvidia|amd|intel|huawei|habana|tesla|geforce|quadro|instinct|radeon|graphics|datacenter|gpu|\(r\)"
)
_SUFFIX = re.compile(
    r"(sxm\d?|pcie|nvl|dgxs|fhhl|oam|vf|ti|super|laptop|maxq|generation|edition|server|workstation"
    r"|blackwell|d|(?<=h20)3e|(?<=mi250x)mi250|(?<=ascend910b)\d[a-z]?)$"
)

CPU_NAME = "cpu"


def lookup_device(text: str) -> Device:
    """The device of a name such as ``a100``, ``V100-32GB`` or ``NVIDIA A100-SXM4-80GB``.

    Also ``cpu`` (a CPU of which nothing is known, so without bf16 and fp16
    instructions) and ``sm_80``. Raises ConfigError with the nearest names where
    it is unknown.
    """
    if (found := _find(text)) is not None:
        return found
    key, by_name = _plain(text), _by_name()
    import difflib

    near = _with_unit(text) or difflib.get_close_matches(key, [*by_name, CPU_NAME], n=3, cutoff=0.5)
    known = ", ".join(near) if near else "a100, h100, v100, mi300x, cpu"
    raise ConfigError(f"unknown device {text!r}", hint=f"write a name such as {known}, or sm_80 and the like")


def named_device(name: str, arch: str = "") -> Device:
    """The device of a name; where the table has none, one of that name and what its ``arch`` computes in."""
    if (found := _find(name)) is not None and found.name != CPU_NAME:
        return found
    like = _find(arch) if arch else None
    return _unknown(name) if like is None else replace(like, name=name)


def accelerator_of(names: Iterable[str]) -> str:
    """What DeepSpeed calls devices of these names: ``cuda``, also where they are not known, ``xpu``, ..."""
    kinds = {_ACCELERATORS.get(named_device(name).arch, "cuda") for name in names}
    return kinds.pop() if len(kinds) == 1 else "cuda"


def memory_sizes(text: str) -> tuple[int, ...]:
    """The sizes in GB that a device of this name may have: one, where the name says it (``a100-80g``)."""
    return (said,) if (said := said_size(text)) else made_sizes(text)


def said_size(text: str) -> int | None:
    """The GB that a name says: those of the slice for MIG. Of a GH200 they are those of its CPU, unless
    it is made with so many: ``NVIDIA GH200 480GB`` has 96."""
    said = _SIZE.findall(text.lower())
    if not said or ("gh200" in text.lower() and int(said[-1]) not in _nominal()["gh200"][0]):
        return None
    return int(said[-1])


def made_sizes(text: str) -> tuple[int, ...]:
    """The sizes in GB that the device of this name is made in; none where they are not known."""
    device = _find(text)
    return _nominal().get(device.name, ((), 1.0))[0] if device else ()


def probe_inventory(environ: Mapping[str, str], *, root: Path = Path("/")) -> Inventory:
    """The accelerators and the CPU of this machine, read from /proc and /sys; no driver is loaded.

    ``DS_ACCELERATOR=cpu`` hides accelerators. CUDA_VISIBLE_DEVICES restricts and
    orders them; for AMD ROCR_VISIBLE_DEVICES does, and among what that leaves
    HIP_VISIBLE_DEVICES or else CUDA_VISIBLE_DEVICES. Ids are as in the last of them
    that is set, which is also the variable that launch.agent writes them to. A
    GPU that is not in the table supports "unknown".
    """
    cpu = _probe_cpu(root)
    if environ.get("DS_ACCELERATOR") == "cpu":
        return Inventory((), cpu)
    if devices := _probe_nvidia(root):
        return Inventory(_visible(devices, environ.get("CUDA_VISIBLE_DEVICES")), cpu)
    found = _visible(_probe_amd(root), environ.get("ROCR_VISIBLE_DEVICES"))
    within = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    if within is not None:
        found = _visible([accelerator.device for accelerator in found], within)
    return Inventory(found, cpu)


def may_have_gpu(root: Path = Path("/")) -> bool:
    """Whether this machine has a GPU's device file, also where :func:`probe_inventory` cannot list it.

    WSL has no /proc/driver/nvidia, and some containers hide it.
    """
    return any((root / "dev").glob("nvidia[0-9]*")) or any(
        (root / "dev" / n).exists() for n in ("dxg", "kfd")
    )


def _find(text: str) -> Device | None:
    key, by_name = _plain(text), _by_name()
    if key == CPU_NAME:
        return Device(CPU_NAME, "", "no", "slow")
    if match := re.fullmatch(r"sm(\d{2,3})[af]?", key):
        return _with_memory(_nvidia(f"sm_{match[1]}", f"sm_{match[1]}"), text)
    key = key.replace("rtxa", "a", 1) if key.startswith("rtxa") else key  # "RTX A6000"
    while key not in by_name and (shorter := _SUFFIX.sub("", key)) != key:
        key = shorter
    return _with_memory(by_name[key], text) if key in by_name else None


def _with_unit(text: str) -> list[str]:
    """``a100-80g`` for ``a100-80``; all sizes that there are for one that is not made."""
    match = re.fullmatch(r"(.*\w)[\s_-]+(\d+)", text.strip())
    if match is None:
        return []
    name, asked, sizes = match[1], int(match[2]), memory_sizes(match[1])
    return [f"{name}-{size}g" for size in ([asked] if asked in sizes else sizes)]


def _with_memory(device: Device, text: str) -> Device:
    """The size that ``text`` says, else the smallest in which the device is made."""
    sizes, usable = _nominal().get(device.name, ((), USABLE_SHARE))
    if said := said_size(text):
        sizes = (said,)
    return replace(device, memory_gib=round(sizes[0] * usable, 2)) if sizes else device


def _nominal() -> dict[str, tuple[tuple[int, ...], float]]:
    """name -> (sizes in GB, usable share)."""
    found = {}
    for table, usable in _USABLE:
        for entry in table.split():
            name, _, sizes = entry.partition("=")
            found[name] = (tuple(int(size) for size in sizes.split("/")), usable)
    return found


def _plain(text: str) -> str:
    return _VENDOR.sub("", re.sub(r"[\s_\-/]+", "", _MEMORY.sub("", text.lower())))


def _by_name() -> dict[str, Device]:
    devices = {name: _nvidia(name, arch) for arch, names in _NVIDIA.items() for name in names.split()}
    for arch, fp16, bf16, names in _OTHERS:
        devices |= {name: Device(name, arch, fp16, bf16) for name in (arch, *names.split())}
    return devices


def _nvidia(name: str, arch: str) -> Device:
    """Tensor cores have fp16 since compute capability 7.0 and bf16 since 8.0."""
    capability = int(arch.removeprefix("sm_"))
    return Device(name, arch, "yes" if capability >= 70 else "slow", "yes" if capability >= 80 else "no")


def _unknown(name: str) -> Device:
    return Device(name, "", "unknown", "unknown")


def _probe_cpu(root: Path) -> Device:
    """bf16 and fp16 are "yes" only with instructions for them; otherwise torch emulates."""
    info = _read_cpu_info(root)
    flags = set(info.get("flags", info.get("Features", "")).split())
    bf16: Support = "yes" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "slow"
    fp16: Support = "yes" if flags & {"avx512_fp16", "amx_fp16"} else "no"
    return Device(CPU_NAME, "", fp16, bf16)


def _read_cpu_info(root: Path) -> dict[str, str]:
    """What /proc/cpuinfo says of the first core, which speaks for all; empty where it cannot be read."""
    found: dict[str, str] = {}
    try:
        with (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                found[name.strip()] = value.strip()
    except OSError:
        pass
    return found


def _probe_nvidia(root: Path) -> list[Device]:
    devices = []
    for info in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        text = info.read_text(errors="replace")
        model = re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)
        minor = re.search(r"^Device Minor:\s*(\d+)\s*$", text, re.MULTILINE)
        # A container without GPUs still sees the host's list, but not the device files.
        if model and minor and (root / f"dev/nvidia{minor[1]}").exists():
            devices.append(named_device(model[1]))
    return devices


def _probe_amd(root: Path) -> list[Device]:
    devices = []
    if not (root / "dev/kfd").exists():
        return []
    for file in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        match = re.search(r"^gfx_target_version (\d+)$", file.read_text(errors="replace"), re.MULTILINE)
        if not match or match[1] == "0":  # 0: the CPU of a node
            continue
        version = int(match[1])
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        devices.append(named_device(arch))
    return devices


def _visible(devices: list[Device], visible: str | None) -> tuple[Accelerator, ...]:
    everything = tuple(Accelerator(str(i), device) for i, device in enumerate(devices))
    if visible is None:
        return everything
    chosen = []
    for item in (part.strip() for part in visible.split(",")):
        if not item or item == "-1":
            break  # CUDA ignores everything from the first invalid entry on
        if item.isdigit():
            if int(item) >= len(everything):
                break
            chosen.append(everything[int(item)])
        elif devices:  # a GPU or MIG UUID: which model it is /proc does not tell, so all must agree
            weakest = min(devices, key=lambda d: (d.bf16 == "yes", d.fp16 == "yes"))
            chosen.append(Accelerator(item, weakest))
    return tuple(chosen)
