"""A config as the real DeepSpeedConfig reads it, without a process group."""

from __future__ import annotations

from typing import Any

import pytest


class DataParallel:
    """What DeepSpeed asks for the data-parallel world size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def get_data_parallel_world_size(self) -> int:
        return self.world_size


def read_by_deepspeed(config: Any, world_size: int) -> Any:
    """The DeepSpeedConfig of ``config`` at this world size; raises what DeepSpeed raises."""
    import deepspeed.comm
    from deepspeed.runtime.config import DeepSpeedConfig

    with pytest.MonkeyPatch.context() as patch:
        # Without a process group it takes a world of 1; there is none in a test, only its rank.
        patch.setattr(deepspeed.comm, "get_rank", lambda: 0)
        return DeepSpeedConfig(config, mpu=DataParallel(world_size))
