"""model.quantization_config: what it resolves to, and what is refused at which line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.quantization import refusals
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.plan import QuantizationPlan, RunPlan
from tests.config.build import gpus, resolved

RUN = """\
model:
  path: org/model
  quantization_config: {%s}
adapter: {type: %s}
data: {train: org/data}
train_batch_size: 8
zero_optimization: {stage: %s}
"""


def plan(section: str, adapter: str = "lora", stage: int = 2, *more: str, **facts: Any) -> RunPlan:
    return resolved(RUN % (section, adapter, stage), *more, **{"inventory": gpus("a100"), **facts})[0]


def refused(section: str, adapter: str = "lora", stage: int = 2, *more: str, **facts: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan(section, adapter, stage, *more, **facts)
    error = caught.value
    return [each.message for each in (error.problems if isinstance(error, ConfigErrors) else [error])]


@pytest.mark.parametrize(
    ("stage", "precision", "storage"),
    [(2, "bf16", "uint8"), (3, "bf16", "bfloat16"), (3, "fp16", "float16"), (3, "fp32", "float32")],
)
def test_defaults_are_qloras_own(stage: int, precision: str, storage: str) -> None:
    found = plan("load_in_4bit: true", "lora", stage, f"precision={precision}").model.quantization_config
    assert found == QuantizationPlan(load_in_4bit=True, bnb_4bit_quant_storage=storage)  # type: ignore[arg-type]
    assert (found.bnb_4bit_quant_type, found.bnb_4bit_use_double_quant) == ("nf4", True)


def test_8_bit_has_a_threshold() -> None:
    found = plan("load_in_8bit: true, llm_int8_threshold: 5, llm_int8_skip_modules: fc").model
    assert found.quantization_config == QuantizationPlan(
        load_in_8bit=True, llm_int8_threshold=5.0, llm_int8_skip_modules=("fc",)
    )


@pytest.mark.parametrize(
    ("section", "adapter", "stage", "message"),
    [
        ("bnb_4bit_quant_type: nf4", "lora", 2, "run.yaml:3: model.quantization_config: of load_in_4bit and"),
        ("load_in_4bit: true, load_in_8bit: true", "lora", 2, "run.yaml:3: model.quantization_config: of"),
        ("load_in_8bit: true, bnb_4bit_quant_type: nf4", "lora", 2, "run.yaml:3: model.quantization"),
        ("load_in_4bit: true, llm_int8_threshold: 1", "lora", 2, "run.yaml:3: model.quantization_config.llm"),
        ("load_in_8bit: true", "lora", 3, "run.yaml:7: zero_optimization.stage 3 with 8-bit weights"),
        ("load_in_4bit: true", "dora", 3, "run.yaml:7: zero_optimization.stage 3 with adapter.type dora"),
        (
            "load_in_4bit: true, bnb_4bit_quant_storage: float16", "lora", 2,
            "run.yaml:3: model.quantization_config.bnb_4bit_quant_storage float16 with precision bf16",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    section: str, adapter: str, stage: int, message: str
) -> None:
    (said,) = refused(section, adapter, stage)
    assert said.startswith(message)


def test_dora_on_8_bit_is_refused_on_cpus_alone() -> None:
    assert plan("load_in_8bit: true", "dora").adapter is not None
    (said,) = refused("load_in_8bit: true", "dora", 2, "cluster.gpu=cpu")
    assert said.startswith("run.yaml:4: adapter.type dora on 8-bit weights on a CPU")


def test_quantised_weights_are_not_trained_themselves() -> None:
    (said,) = refused("load_in_4bit: true", "lora", 2, "adapter=null")
    assert said == (
        "run.yaml:3: model.quantization_config: 4-bit weights cannot be trained themselves, and there is no"
        " adapter section"
    )


ON_DISK = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}


def test_what_is_on_disk_counts() -> None:
    found = plan("load_in_4bit: true", "lora", 3, model_quantization=ON_DISK).model.quantization_config
    assert found == QuantizationPlan(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False
    )
    (said,) = refused("load_in_4bit: true, bnb_4bit_quant_type: nf4", model_quantization=ON_DISK)
    assert said.endswith("bnb_4bit_quant_type nf4: the model's weights are quantised already, with fp4")
    gptq = {"quant_method": "gptq"}
    (said,) = refused("load_in_4bit: true", model_quantization=gptq)
    assert "the model's weights are quantised by gptq" in said


def test_a_model_that_is_quantised_on_disk_is_never_taken_for_a_plain_one() -> None:
    text = "model: org/model\nadapter: {type: lora}\ndata: {train: org/data}\ntrain_batch_size: 8\n"
    with pytest.raises(ConfigError) as caught:
        resolved(text, inventory=gpus("a100"), model_quantization=ON_DISK)
    (error,) = caught.value.problems if isinstance(caught.value, ConfigErrors) else [caught.value]
    assert error.message.startswith("run.yaml:1: model.path: the model's weights are quantised already (fp4)")
    assert error.hint == "add model.quantization_config: {load_in_4bit: true}"


def test_nothing_else_is_refused() -> None:
    """Each cell that test_quantization.py of train runs is let through."""
    for bits in ({"load_in_4bit": True}, {"load_in_8bit": True}):
        for adapter in ("lora", "dora"):
            for stage in range(4):
                for device in ("cpu", "cuda"):
                    found = list(
                        refusals(
                            QuantizationPlan(**bits), adapter, zero_stage=stage, precision="bf16",
                            device_type=device,
                        )
                    )  # fmt: skip
                    at_3 = stage == 3 and (adapter == "dora" or "load_in_8bit" in bits)
                    on_cpu = adapter == "dora" and "load_in_8bit" in bits and device == "cpu"
                    assert len(found) == at_3 + on_cpu, (bits, adapter, stage, device)


def table() -> list[str]:
    """The table of docs/adapters.md, as refusals() has it."""
    lines = [
        "| `adapter.type` | weights | stage 0 | stage 1 | stage 2 | stage 3 |",
        "|---|---|---|---|---|---|",
    ]
    numbers = {"peft reads": 1, "a whole copy": 2, "peft loses": 3, "trained themselves": 4}
    for weights in (None, QuantizationPlan(load_in_4bit=True), QuantizationPlan(load_in_8bit=True)):
        for adapter in ("lora", "dora"):
            cells = []
            for stage in range(4):
                why: dict[str, str] = {}
                for device in ("cuda", "cpu") if weights else ():
                    asked = {"zero_stage": stage, "precision": "bf16", "device_type": device}
                    found = list(refusals(weights, adapter, **asked))  # type: ignore[arg-type]
                    if found:
                        why[device] = next(f"({n})" for text, n in numbers.items() if text in found[0].why)
                verdict = "refused " if "cuda" in why else "on GPUs " if why else "runs"
                cells.append(verdict + next(iter(why.values()), ""))
            name = "lora (rsLoRA too)" if adapter == "lora" else adapter
            bits = "as they are" if weights is None else "4 bit" if weights.load_in_4bit else "8 bit"
            lines.append(f"| {name} | {bits} | {' | '.join(cells)} |")
    refused = list(refusals(weights, None, zero_stage=0, precision="bf16", device_type="cuda"))  # type: ignore[arg-type]
    number = next(n for text, n in numbers.items() if text in refused[0].why)
    cells = [f"refused ({number})"] * 4
    return [*lines, f"| none: the whole model | 4 or 8 bit | {' | '.join(cells)} |"]


def test_the_table_of_the_documentation_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "adapters.md"
    assert "\n".join(table()) in page.read_text(encoding="utf-8"), "\n".join(table())
