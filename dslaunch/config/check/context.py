"""What every rule of the checker works on: the target, the document and the list of findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dslaunch.config.check.target import Reader, Target
from dslaunch.config.hjson_reader import Document
from dslaunch.config.schema import find_key
from dslaunch.core.finding import Edit, Finding, KeyPath, Severity, key_text

PARENT = "zero_optimization"
FP32 = ("fp32", "float32", "float", "torch.float32")

# Keys whose "auto" each trainer replaces by its own value (transformers 5.24
# integrations/deepspeed.py, accelerate accelerator.py and utils/dataclasses.py).
_FILLED_BY_ALL = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "fp16.enabled",
        "bf16.enabled",
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    ]
)
FILLED: Mapping[Reader, frozenset[str]] = {
    "raw": frozenset(),
    "hf-trainer": _FILLED_BY_ALL | {"optimizer.params.betas", "optimizer.params.eps"},
    "accelerate": _FILLED_BY_ALL
    | {
        "zero_optimization.stage",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.nvme_path",
    },
}


@dataclass
class Checker:
    """Collects findings about one config and gives rules typed access to it."""

    document: Document
    target: Target
    findings: list[Finding] = field(default_factory=list)
    bad: set[KeyPath] = field(default_factory=set)
    guesses: int = 0  # how many unknown keys were compared with all known ones, which takes time

    def report(
        self,
        code: str,
        severity: Severity,
        path: KeyPath,
        message: str,
        hint: str | None = None,
        *,
        fix: str | None = None,
        edits: tuple[Edit, ...] = (),
    ) -> None:
        """Add a finding at ``path``; ``message`` follows the key. Errors mark the value as not to be used."""
        line, column = self.document.place(path) or (None, None)
        key = key_text(path)
        if severity == "error":
            self.bad.add(path)
        text = f"{key}: {message}" if key else message
        self.findings.append(Finding(code, severity, key, text, line, column, hint, fix, edits))

    def report_to_remove(
        self,
        code: str,
        severity: Severity,
        path: KeyPath,
        message: str,
        hint: str,
        *,
        fix: str = "remove it",
    ) -> None:
        """A finding that is mended by removing the key; ``fix`` says so in its words."""
        self.report(code, severity, path, message, hint, fix=fix, edits=(Edit("delete", path),))

    @property
    def config(self) -> dict[str, Any]:
        value: dict[str, Any] = self.document.value
        return value

    def has(self, *path: str) -> bool:
        """Whether the key is written, whatever its value."""
        return self._find(path) is not _MISSING

    def get(self, *path: str) -> Any:
        """The value as written, by any of its names; None where it is missing, null, ``auto`` or wrong."""
        value = self._find(path)
        if value is _MISSING or value == "auto" or path in self.bad:
            return None
        return value

    def value(self, *path: str) -> Any:
        """The value that DeepSpeed uses: as written, else the table's default."""
        found = self.get(*path)
        return default_value(".".join(path)) if found is None else found

    def on(self, *path: str) -> bool:
        """Whether a switch is written as true, or as the number 1, which DeepSpeed takes for true."""
        value = self.get(*path)
        return value is True or (isinstance(value, int) and value == 1)

    def number(self, *path: str) -> float | int | None:
        """A number as DeepSpeed uses it; None where there is none."""
        value = self.value(*path)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def block(self, *path: str) -> dict[str, Any]:
        """A section as written; empty where it is missing or no mapping."""
        value = self._find(path)
        return value if isinstance(value, dict) else {}

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None where it is not a valid one (``auto``, a word)."""
        written = self._find((PARENT,))
        if isinstance(written, bool):
            return int(written)
        stage = self._find((PARENT, "stage"))
        if stage is _MISSING:
            return 0
        if isinstance(stage, str) and stage.strip() in ("0", "1", "2", "3"):
            return int(stage)  # a finding of its own, and DeepSpeed runs that stage
        return stage if isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3 else None

    @property
    def precision(self) -> str | None:
        """fp16, bf16 or fp32 as enabled; None where ``auto`` or a wrong value leaves it open."""
        for name, section in (("fp16", "fp16"), ("bf16", self.bf16_section)):
            enabled = self._find((section, "enabled"))
            if enabled is True or enabled == 1:
                return name
            if enabled is not _MISSING and not isinstance(enabled, (bool, int)):
                return None
        return "fp32"

    @property
    def bf16_section(self) -> str:
        """``bf16``, or its old name where only that is written."""
        return "bfloat16" if "bfloat16" in self.config and "bf16" not in self.config else "bf16"

    @property
    def has_own_accumulator(self) -> bool:
        """Whether DeepSpeed takes its BF16_Optimizer, which adds gradients up in fp32."""
        return (
            self.precision == "bf16"
            and self.stage == 1
            and self.get("data_types", "grad_accum_dtype") in FP32
            and self.offload("offload_optimizer") == "none"
        )

    @property
    def on_cpu(self) -> bool:
        """Whether the target says that there are CPUs and nothing else."""
        devices = self.target.devices
        return bool(devices) and all(device.name == "cpu" for device in devices or ())

    def offload(self, name: str) -> str:
        """The device of ``offload_optimizer`` or ``offload_param``; old switches count as cpu."""
        old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[name]
        device = self.block(PARENT, name).get("device", "none")
        if device in ("cpu", "nvme"):
            return str(device)
        return "cpu" if self.on(PARENT, old) else "none"

    def _find(self, path: Sequence[str]) -> Any:
        value: Any = self.document.value
        for depth, part in enumerate(path):
            if not isinstance(value, dict):
                return _MISSING
            if part not in value:
                key = find_key(".".join(path[: depth + 1]))
                part = key.also if key is not None and key.also in value else part
            if part not in value:
                return _MISSING
            value = value[part]
        return value


class _Missing:
    pass


_MISSING = _Missing()


def default_value(path: str) -> Any:
    """The table's default as a value; None where there is none."""
    key = find_key(path)
    if key is None or key.default in ("", "null"):
        return None
    words: dict[str, Any] = {"true": True, "false": False, "sys.maxsize": 2**63 - 1, "{}": {}, "[]": []}
    if key.default in words:
        return words[key.default]
    if key.type in ("int", "number") and key.default != "auto":
        return float(key.default) if "." in key.default else int(key.default)
    return key.default
