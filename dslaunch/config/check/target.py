"""What a config is checked for: who reads it, on how many ranks, on which devices, by which DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dslaunch.config.schema import VERSION

if TYPE_CHECKING:
    from dslaunch.core.devices import Device

Reader = Literal["raw", "hf-trainer", "accelerate"]


@dataclass(frozen=True)
class Target:
    """What the config is for. ``world_size`` None: unknown; ``devices`` None: unknown.

    ``lenient``: a key that DeepSpeed ignores because it does not have it is a warning, no error.
    """

    reader: Reader = "raw"
    world_size: int | None = None
    devices: Sequence[Device] | None = None
    version: str = VERSION
    lenient: bool = False
