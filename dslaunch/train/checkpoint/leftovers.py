"""What a save that was killed leaves behind, and how it is put right."""

from __future__ import annotations

import shutil
from pathlib import Path

SAVING = ".saving-"  # + name: being written
REPLACED = ".replaced-"  # + name: the checkpoint of that name, moved aside while a new one takes it


def restore_replaced(root: Path) -> None:
    """Give a checkpoint that was moved aside its name back, where the new one never came.

    For one process at a time. Raises OSError where a directory cannot be renamed.
    """
    for aside in root.glob(f"{REPLACED}*"):
        final = root / aside.name.removeprefix(REPLACED)
        if not final.exists():
            aside.rename(final)


def remove_leftovers(root: Path) -> None:
    """Delete half-written checkpoints, and those moved aside that have been replaced.

    For one process at a time. Raises OSError where something cannot be removed.
    """
    restore_replaced(root)
    for left in [*root.glob(f"{SAVING}*"), *root.glob(f"{REPLACED}*")]:
        shutil.rmtree(left)
