"""What a run's checkpoints and its export take on disk, against what is free there."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.core.errors import ConfigError
from dslaunch.core.run_dir import RunDir

if TYPE_CHECKING:
    from dslaunch.core.plan import RunPlan


@dataclass(frozen=True)
class DiskSpace:
    """Bytes. ``checkpoints_at_once``: the most that stand there together, those that are there already
    included; None where it depends on how many steps the data gives. ``checkpoints_there``: those of before.
    ``export_bytes``: the adapter, or the whole model; ``merged_export_bytes``: with --merge.
    """

    checkpoint_bytes: int
    checkpoints_at_once: int | None
    checkpoints_there: int
    free_bytes: int
    export_bytes: int
    merged_export_bytes: int | None

    @property
    def needed_bytes(self) -> int:
        """What must be free at least."""
        to_come = (self.checkpoints_at_once or 1) - self.checkpoints_there
        return self.checkpoint_bytes * max(1, to_come)

    def to_json(self) -> dict[str, Any]:
        """The ``disk`` of ``plan --json``."""
        return asdict(self)


def disk_of_run(plan: RunPlan) -> DiskSpace | None:
    """None where the model is not on this machine or not of a known architecture."""
    from dslaunch.config.memory.host import checkpoint_bytes
    from dslaunch.config.memory.hub import cached_model
    from dslaunch.config.memory.model import load_model_facts
    from dslaunch.config.memory.of_run import setup_of_run
    from dslaunch.config.memory.tensors import total

    model = plan.model
    path = cached_model(model.path, model.revision, os.environ) if model.kind == "hub" else Path(model.path)
    try:
        if path is None:
            return None
        setup = setup_of_run(plan, load_model_facts(path))
    except ConfigError:  # `plan` says it, and so do the ranks
        return None
    run_dir = RunDir(Path(plan.launch.run_dir))
    wide = setup.fp32_trained if plan.adapter is None else setup.fp32_frozen
    whole = setup.model.numel * setup.bytes_each + 2 * total(wide)
    return DiskSpace(
        checkpoint_bytes=checkpoint_bytes(setup),
        checkpoints_at_once=_most_at_once(plan),
        checkpoints_there=len(run_dir.checkpoint_steps()),
        free_bytes=shutil.disk_usage(_existing(run_dir.path)).free,
        export_bytes=whole if plan.adapter is None else 4 * setup.numel,
        merged_export_bytes=whole if plan.adapter is not None else None,
    )


def disk_line(disk: DiskSpace) -> str:
    """What ``plan`` shows last and ``launch`` says first."""
    from dslaunch.cli.memory_table import gib

    one, export, free = (
        gib(size).strip() for size in (disk.checkpoint_bytes, disk.export_bytes, disk.free_bytes)
    )
    at_once = disk.checkpoints_at_once
    many = "one at the end" if at_once == 1 else f"up to {at_once} at once" if at_once else "all are kept"
    merged = f" ({gib(disk.merged_export_bytes).strip()} merged)" if disk.merged_export_bytes else ""
    return f"disk: {one} a checkpoint, {many}; {export} an export{merged}; {free} free"


def disk_warning(disk: DiskSpace) -> str | None:
    """Where the checkpoints will not fit, or may not."""
    from dslaunch.cli.memory_table import gib

    free, one = gib(disk.free_bytes).strip(), gib(disk.checkpoint_bytes).strip()
    if disk.needed_bytes <= disk.free_bytes:
        return None
    needed = gib(disk.needed_bytes).strip()
    advice = "another --run-dir"
    if (disk.checkpoints_at_once or 2) > 1:
        advice = f"output.save_total_limit, a larger output.save_steps or {advice}"
    return f"the checkpoints will not fit: {needed} ({one} each) are needed, {free} are free; set {advice}"


def _most_at_once(plan: RunPlan) -> int | None:
    """A new checkpoint is complete before an old one goes, and there is always one at the end."""
    output = plan.output
    if output.save_steps is None:
        return 1
    limit = None if output.save_total_limit is None else output.save_total_limit + 1
    if plan.max_steps is None:
        return limit
    saves = -(-plan.max_steps // output.save_steps)
    return saves if limit is None else min(saves, limit)


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())
