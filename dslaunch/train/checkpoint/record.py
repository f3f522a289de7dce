"""What a checkpoint keeps of its run: to check a resume, and to export without the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import AdapterPlan, ModelPlan, Precision, from_json, to_json


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The order of the training data depends on these and on nothing else."""

    fingerprint: str
    num_units: int
    packing: bool
    shuffle: bool
    seed: int
    train_batch_size: int
    total_steps: int


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The ``extra`` of a run's checkpoints."""

    model: ModelPlan
    adapter: AdapterPlan | None
    precision: Precision
    data: DataRecord
    fp32_modules: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :func:`read_record` is the inverse."""
        return to_json(self)


def read_record(extra: Mapping[str, Any], where: str) -> RunRecord:
    """The record in a manifest's ``extra``. Raises ConfigError, naming the key, where it is another."""
    return from_json(RunRecord, dict(extra), where)


def check_same_data(saved: DataRecord, present: DataRecord) -> None:
    """Raises ConfigError naming what of the data differs from the checkpoint's."""
    then, now = asdict(saved), asdict(present)
    differing = [f"{key} {then[key]} then, {now[key]} now" for key in now if then[key] != now[key]]
    if differing:
        raise ConfigError(
            f"the training data is not what the checkpoint was trained on: {', '.join(differing)}",
            hint="resume with the same data, template and batch size, or start a new run",
        )
