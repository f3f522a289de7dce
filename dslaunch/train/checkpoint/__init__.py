"""Checkpoints that are whole or not there.

``checkpoints/step-N/`` holds DeepSpeed's shards, ``rng/rank-K.*`` and ``manifest.json``
(sizes, SHA-256); ``checkpoints/latest`` names the newest one and is replaced atomically.
"""

from dslaunch.core.checkpoint_manifest import Manifest, latest_checkpoint, read_manifest
from dslaunch.train.checkpoint.load import find_whole_checkpoint, load_checkpoint, restore_checkpoint
from dslaunch.train.checkpoint.save import save_checkpoint

__all__ = [
    "Manifest",
    "find_whole_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "read_manifest",
    "restore_checkpoint",
    "save_checkpoint",
]
