"""Models whose weights are quantised on disk already: what their config.json says, as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import QuantizationPlan


def plan_on_disk(block: Mapping[str, Any]) -> QuantizationPlan:
    """``quantization_config`` of a config.json. Raises ConfigError for what bitsandbytes did not write."""
    by_flags = "bitsandbytes" if block.get("load_in_4bit") or block.get("load_in_8bit") else None
    method = block.get("quant_method", by_flags)  # bitsandbytes alone once wrote no name
    if method != "bitsandbytes":
        raise ConfigError(
            f"the model's weights are quantised by {method or 'what is not named'}; adapters are trained on"
            " bitsandbytes' alone",
            hint="take the model that is not quantised, and model.quantization_config: {load_in_4bit: true}",
        )
    _check_types(block)
    skip = tuple(block.get("llm_int8_skip_modules") or ())
    if block.get("load_in_8bit"):
        threshold = float(block.get("llm_int8_threshold", 6.0))
        return QuantizationPlan(load_in_8bit=True, llm_int8_threshold=threshold, llm_int8_skip_modules=skip)
    return QuantizationPlan(
        load_in_4bit=True,
        bnb_4bit_quant_type=block.get("bnb_4bit_quant_type", "fp4"),
        bnb_4bit_use_double_quant=bool(block.get("bnb_4bit_use_double_quant", False)),
        bnb_4bit_quant_storage=block.get("bnb_4bit_quant_storage", "uint8"),
        llm_int8_skip_modules=skip,
    )


def _check_types(block: Mapping[str, Any]) -> None:
    skip, threshold = block.get("llm_int8_skip_modules"), block.get("llm_int8_threshold", 6.0)
    storage = block.get("bnb_4bit_quant_storage", "uint8")
    for key, value, right in (
        ("llm_int8_skip_modules", skip, isinstance(skip or [], list)),
        ("llm_int8_threshold", threshold, isinstance(threshold, (int, float))),
        ("bnb_4bit_quant_storage", storage, storage in ("uint8", "bfloat16", "float16", "float32")),
    ):
        if not right:
            raise ConfigError(f"quantization_config.{key} {value!r} is none that bitsandbytes writes")


def undeclared(there: QuantizationPlan, where: str) -> ConfigError:
    """What to say where the run file says nothing of a model's quantisation: never a silent choice."""
    bits = "load_in_8bit" if there.load_in_8bit else "load_in_4bit"
    return ConfigError(
        f"{where}: the model's weights are quantised already ({there}), and model.quantization_config does"
        " not say so",
        hint=f"add model.quantization_config: {{{bits}: true}}",
    )
