"""What the run file's ``deepspeed:`` section is checked with, taken from the key table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.config.schema import Key, section_keys, top_level_keys

Types = Mapping[str, Any]

TOP_LEVEL_KEYS = top_level_keys()

_KINDS = {"bool": bool, "int": int, "number": float, "str": str, "choice": str}
# Sections that are looked into; of the others only `enabled` is.
_SECTIONS = ("zero_optimization", "flops_profiler", "activation_checkpointing")
_NOT_LOOKED_INTO = ("leaf_module", "zenflow")
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _current(section: str) -> Iterator[Key]:
    """The keys of a section under the names that the documentation of DeepSpeed gives them."""
    for name, key in section_keys(section).items():
        if name == key.name and key.type != "removed" and not key.deprecated:
            yield key


def _types(section: str) -> dict[str, Any]:
    """Key -> its type, ``dict`` for a section that is not looked into, or the types of a section."""
    found: dict[str, Any] = {}
    for key in _current(section):
        if key.is_section:
            found[key.name] = dict if key.name in _NOT_LOOKED_INTO else _types(key.path)
        elif key.type in _KINDS:
            found[key.name] = _KINDS[key.type]
    return found


ZERO_TYPES: Types = _types("zero_optimization")

# Only what is listed is checked; DeepSpeed takes `"false"` in most of these for true.
TOP_LEVEL_TYPES: Types = {
    **{
        key.name: _KINDS[key.type]
        for key in _current("")
        if key.type in ("bool", "int") and key.name not in _BATCH_SIZES
    },
    **{section: _types(section) for section in _SECTIONS},
}

# Old names that DeepSpeed still reads, with a warning -> what they are called now.
OLD_ZERO_KEYS = {
    "cpu_offload": "offload_optimizer: {device: cpu}",
    "cpu_offload_param": "offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "pin_memory of offload_optimizer and offload_param",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
