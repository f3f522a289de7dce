"""auto precision for the weakest device, with its reason; what was asked for is checked."""

from __future__ import annotations

import pytest

from dslaunch.config.host_devices import DeviceGroup, groups_of_names
from dslaunch.config.precision import communication_data_type, dtypes, resolve_precision
from dslaunch.core.devices import Device, lookup_device
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import Precision

BF16_CPU = Device("cpu", "", "no", "yes")
FP16_CPU = Device("cpu", "", "yes", "yes")


@pytest.mark.parametrize(
    ("names", "value", "in_reason"),
    [
        (["a100"], "bf16", "a100"),
        (["a100", "h100", "l4"], "bf16", "every device"),
        (["a100", "v100"], "fp16", "v100 (sm_70)"),
        (["t4"], "fp16", "t4"),
        (["rtx2080"], "fp16", "rtx2080"),
        (["TITAN X"], "fp32", "titanx (sm_61)"),
        (["a100", "p100"], "fp32", "p100"),
        (["mi100"], "fp16", "mi100"),
        (["mi250x"], "bf16", "mi250x"),
        (["ascend910a"], "fp16", "ascend910a"),
        (["cpu"], "fp32", "neither AVX512-BF16 nor AMX-BF16"),
    ],
)
def test_auto(names: list[str], value: str, in_reason: str) -> None:
    chosen = resolve_precision("auto", groups_of_names(names))
    assert chosen.value == value
    assert in_reason in chosen.reason


def test_auto_on_a_cpu_with_bf16_instructions() -> None:
    assert resolve_precision("auto", [DeviceGroup(BF16_CPU)]).value == "bf16"


def test_the_reason_names_the_hosts_that_decide() -> None:
    groups = [
        DeviceGroup(lookup_device("a100"), "node-[1-4]"),
        DeviceGroup(lookup_device("v100"), "node-5, node-6"),
    ]
    assert resolve_precision("auto", groups).reason == (
        "v100 (sm_70) of node-5, node-6 does not compute in bf16; every device does in fp16:"
        " a100 (sm_80) of node-[1-4], v100 (sm_70) of node-5, node-6"
    )
    assert "bf16 on v100 (sm_70) of node-5, node-6 is emulated" in resolve_precision("bf16", groups).notes[0]


def test_auto_without_devices_asks_for_them() -> None:
    with pytest.raises(ConfigError, match="not known here") as caught:
        resolve_precision("auto", None)
    assert "--gpu" in (caught.value.hint or "")


def test_auto_with_a_device_that_is_not_in_the_table() -> None:
    with pytest.raises(ConfigError, match="Xyzzy is not in the device table"):
        resolve_precision("auto", [DeviceGroup(Device("Xyzzy", "", "unknown", "unknown"))])
    assert resolve_precision("bf16", [DeviceGroup(Device("Xyzzy", "", "unknown", "unknown"))]).notes == ()


@pytest.mark.parametrize(
    ("devices", "hint"),
    [
        ([lookup_device("cpu")], "fp32"),
        ([BF16_CPU], "bf16"),
        ([BF16_CPU, lookup_device("cpu")], "fp32"),  # the weakest decides
    ],
)
def test_fp16_on_a_cpu_without_instructions_is_refused(devices: list[Device], hint: str) -> None:
    groups = [DeviceGroup(device) for device in devices]
    with pytest.raises(ConfigError, match="neither AVX512-FP16 nor AMX-FP16") as caught:
        resolve_precision("fp16", groups)
    assert f"precision {hint}" in (caught.value.hint or "")
    assert "allow_emulated_fp16: true" in (caught.value.hint or "")
    chosen = resolve_precision("fp16", groups, allow_emulated_fp16=True)
    assert (chosen.value, "emulated" in chosen.reason) == ("fp16", True)
    assert chosen.notes == ("fp16 is emulated on this CPU: right, but slow; for tests and debugging only",)


def test_fp16_on_a_cpu_that_has_it() -> None:
    assert resolve_precision("fp16", [DeviceGroup(FP16_CPU)]).value == "fp16"


@pytest.mark.parametrize(
    ("asked", "names", "in_note"),
    [
        ("bf16", ["v100"], "bf16 on v100 (sm_70) is emulated"),
        ("bf16", ["a100", "t4", "t4"], "bf16 on t4"),
        ("fp16", ["p100"], "DS_ALLOW_DEPRECATED_FP16"),
        ("bf16", ["cpu"], "bf16 on cpu is emulated"),
    ],
)
def test_what_was_asked_for_is_kept_with_a_warning(asked: str, names: list[str], in_note: str) -> None:
    chosen = resolve_precision(asked, groups_of_names(names))
    assert chosen.value == asked
    assert len(chosen.notes) == 1
    assert in_note in chosen.notes[0]


@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp32"])
def test_what_was_asked_for_needs_no_devices(asked: str) -> None:
    assert resolve_precision(asked, None).value == asked


@pytest.mark.parametrize(
    ("precision", "names", "expected"),
    [
        ("bf16", ["mi300x"], "fp32"),
        ("bf16", ["mi250x", "mi300x"], "fp32"),
        ("fp16", ["mi100"], None),
        ("fp32", ["mi300x"], None),
        ("bf16", ["h100"], None),
    ],
)
def test_bf16_gradients_are_summed_in_fp32_on_amd(
    precision: Precision, names: list[str], expected: str | None
) -> None:
    assert communication_data_type(precision, [lookup_device(name) for name in names]) == expected
    assert communication_data_type(precision, None) is None


def test_every_type_follows_from_the_one_precision() -> None:
    assert dtypes("fp16", {}, "qlora")["bnb_4bit_quant_storage"] == "uint8"
    assert dtypes("fp16", {"zero_optimization": {"stage": 3}}, "qlora") == {
        "model": "fp16",
        "adapter": "fp16",
        "bnb_4bit_compute_dtype": "fp16",
        "bnb_4bit_quant_storage": "fp16",
        "master_weights": "fp32",
        "gradient_accumulation": "fp16",
        "communication": "fp16",
    }
    config = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    assert dtypes("bf16", config, "full") == {
        "model": "bf16",
        "master_weights": "fp32",
        "gradient_accumulation": "fp32",
        "communication": "fp32",
    }
