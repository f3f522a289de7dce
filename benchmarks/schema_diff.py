"""What an installed DeepSpeed reads from its config, and how the package's key table differs from it.

    python benchmarks/schema_diff.py

Run it in an environment with the DeepSpeed version of interest (the table is of the
version it names at its top). Prints one line a difference; exit code 1 where there is any.

Two sources, both of the installed version: the fields of the pydantic models, and for the
sections that are read key by key the keys (with the defaults) that a recording dictionary
was asked for while the real ``DeepSpeedConfig`` parsed it.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

NO_DEFAULT = "-"

# Section -> module and model that reads it.
MODELS = {
    "zero_optimization": ("runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": (
        "runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "zero_optimization.leaf_module": ("runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
    "zero_optimization.zenflow": ("runtime.zenflow.zenflow_config", "ZenFlowConfig"),
    "fp16": ("runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "hybrid_engine": ("runtime.config", "HybridEngineConfig"),
    "compile": ("compile.config", "CompileConfig"),
    "tensor_parallel": ("runtime.tensor_parallel.config", "TPTrainingConfig"),
    "tensor_parallel.tp": ("runtime.tensor_parallel.config", "TPConfig"),
    "timers.throughput": ("utils.config", "DeepSpeedThroughputTimerConfig"),
    "comms_logger": ("comm.config", "CommsLoggerConfig"),
    "weight_quantization": ("inference.config", "WeightQuantConfig"),
    "tensorboard": ("monitor.config", "TensorBoardConfig"),
    "wandb": ("monitor.config", "WandbConfig"),
    "csv_monitor": ("monitor.config", "CSVConfig"),
    "comet": ("monitor.config", "CometConfig"),
}
# Set by DeepSpeed itself while it runs; not for users.
NOT_FOR_USERS = {
    "zero_optimization.zenflow.steps_per_epoch",
    "tensor_parallel.tp.mpu",
    "tensor_parallel.tp.tp_group",
}
# Read elsewhere than in DeepSpeedConfig, or only under conditions.
NOT_ASKED = {
    "sequence_parallel_size": None,
    "pipeline.use_reentrant": None,
    "data_efficiency.data_sampling.dynamic_batching.metrics_path": None,
}
# Sections read key by key, with the sub-sections that must be there to be read.
SECTIONS = (
    "optimizer", "scheduler", "activation_checkpointing", "aio", "checkpoint", "checkpoint.parallel_write",
    "checkpoint.writer", "data_types", "flops_profiler", "autotuning", "autotuning.model_info",
    "torch_autocast", "timers", "expert_parallel",
    "data_efficiency", "data_efficiency.data_sampling", "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_sampling.dynamic_batching", "data_efficiency.data_routing",
    "data_efficiency.data_routing.random_ltd",
)  # fmt: skip


@dataclass
class Found:
    """One key as the installed DeepSpeed has it."""

    default: str
    bounds: str = ""
    names: tuple[str, ...] = ()
    deprecated: bool = False


class Recording(dict[str, Any]):
    """A mapping that remembers what it was asked for."""

    def __init__(self, path: str, seen: dict[str, Found], values: dict[str, Any]) -> None:
        super().__init__(values)
        self.path, self.seen = path, seen
        self.written: dict[str, Any] = {}

    def _note(self, key: object, default: Any = NO_DEFAULT) -> None:
        name = f"{self.path}.{key}" if self.path else str(key)
        text = default if default is NO_DEFAULT else shown(default)
        if name not in self.seen or self.seen[name].default == NO_DEFAULT:
            self.seen[name] = Found(text)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key) if super().__contains__(key) else self.written[key]

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def copy(self) -> Recording:
        return self

    def __copy__(self) -> Recording:
        return self

    def pop(self, key: str, *default: Any) -> Any:
        return super().get(key, *default)

    def __setitem__(self, key: str, value: Any) -> None:
        """DeepSpeed writes defaults into what it was given; they are kept apart, so that it asks on."""
        self.written[key] = value


def shown(value: Any) -> str:
    """A default as the table writes it."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if value == sys.maxsize:
        return "sys.maxsize"
    if isinstance(value, (int, float)):
        return str(int(value)) if value == int(value) else str(value)
    if isinstance(value, (list, dict, tuple)):
        return "[...]" if value else "{}" if isinstance(value, dict) else "[]"
    return "{}" if hasattr(type(value), "model_fields") else str(value) or '""'


def model_keys() -> dict[str, Found]:
    """Every field of every model, under the name that the JSON uses."""
    found: dict[str, Found] = {}
    for section, (module, name) in MODELS.items():
        model = getattr(importlib.import_module(f"deepspeed.{module}"), name)
        for field_name, info in model.model_fields.items():
            key = info.alias or field_name
            names = (field_name,) if info.alias else ()
            default = info.default_factory() if info.default_factory is not None else info.default
            bounds = ",".join(sorted(_bounds(info)))
            extra = info.json_schema_extra or {}
            path = f"{section}.{key}"
            if path not in NOT_FOR_USERS:
                found[path] = Found(shown(default), bounds, names, bool(extra.get("deprecated")))
    return found


def _bounds(info: Any) -> Iterator[str]:
    metadata = list(info.metadata)
    for argument in get_args(info.annotation):
        metadata += list(getattr(argument, "metadata", ()))
    for item in metadata:
        for word, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if getattr(item, word, None) is not None:
                yield f"{sign}{shown(getattr(item, word))}"


class _DataParallel:
    """What DeepSpeed asks for the number of ranks."""

    def get_data_parallel_world_size(self) -> int:
        return 1


def asked_keys() -> dict[str, Found]:
    """Every key that DeepSpeedConfig asks its mappings for, with the default it gives."""
    import deepspeed.comm
    from deepspeed.runtime.config import DeepSpeedConfig, get_pipeline_config

    seen: dict[str, Found] = {}
    written: dict[str, dict[str, Any]] = {
        "optimizer": {"type": "Adam", "params": {}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "torch_autocast": {"dtype": "bfloat16"},
        "data_efficiency.data_sampling.dynamic_batching": {"enabled": True, "max_tokens": 1},
    }
    tree = {section: Recording(section, seen, written.get(section, {"_": 0})) for section in SECTIONS}
    top = Recording("", seen, {"train_batch_size": 1})
    for section, block in tree.items():
        parent, _, name = section.rpartition(".")
        dict.__setitem__(tree[parent] if parent else top, name, block)
    rank = deepspeed.comm.get_rank
    deepspeed.comm.get_rank = lambda *args, **kwargs: 0
    try:
        DeepSpeedConfig(top, mpu=_DataParallel())
    finally:
        deepspeed.comm.get_rank = rank
    for name in get_pipeline_config({}):
        seen[f"pipeline.{name}"] = Found(NO_DEFAULT)  # its defaults stand in the engine's code
    return seen


def removed_keys() -> set[str]:
    """What DeepSpeed refuses by name; empty for versions that have no such list."""
    from deepspeed.runtime import config

    top = getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})
    zero = getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {})
    return {*top, *(f"zero_optimization.{name}" for name in zero)}


def differences() -> list[str]:
    """How the table and the installed DeepSpeed differ, one line each; empty where they agree."""
    from dslaunch.config.schema import key_table

    table, removed = key_table(), removed_keys()
    found = {**asked_keys(), **model_keys()}
    for path in removed:
        found.setdefault(path, Found(NO_DEFAULT))
    lines = [f"{path}: not in the table" for path in found if path not in table]
    gone = {path for path, row in table.items() if row.removed and row.type != "removed"}
    unknown = [path for path in table if path not in found | NOT_ASKED and path not in gone]
    lines += [f"{path}: in the table alone" for path in unknown]
    for path, row in table.items():
        if (row.type == "removed") != (path in removed):
            lines.append(
                f"{path}: {'removed' if path in removed else 'not removed'} in DeepSpeed, not so in the table"
            )
        elif path in found and row.type != "removed":
            lines += [f"{path}: {text}" for text in _row_differences(row, found[path])]
    strict = {path for path, row in table.items() if row.type == "strict"}
    modelled = {path for path in MODELS if path in table} | {"bfloat16"}
    lines += [f"{path}: one forbids unknown keys, the other does not" for path in sorted(strict ^ modelled)]
    return lines


def _row_differences(row: Any, found: Found) -> Iterator[str]:
    if found.default != NO_DEFAULT and not row.is_section and row.default != found.default:
        yield f"default {found.default} in DeepSpeed, {row.default or 'none'} in the table"
    bounds = {bound for bound in row.range if bound[0] in "<>"}
    theirs = set(filter(None, found.bounds.split(",")))
    if not theirs <= bounds:
        yield f"bounds {found.bounds} in DeepSpeed, {','.join(sorted(bounds)) or 'none'} in the table"
    if found.names != ((row.also,) if row.also else ()):
        yield f"other names {found.names} in DeepSpeed, {row.also or 'none'} in the table"
    if found.deprecated != row.deprecated and row.path != "bfloat16":
        yield f"deprecated is {found.deprecated} in DeepSpeed"


def main() -> int:
    import deepspeed

    from dslaunch.config.schema import VERSION

    lines = differences()
    print(f"installed: DeepSpeed {deepspeed.__version__}; the table: {VERSION}", file=sys.stderr)
    print("\n".join(lines) or "no difference")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
