"""Checkpoints that are whole or not there.

``checkpoints/step-N/`` holds DeepSpeed's shards, ``rng/rank-K.*`` and ``manifest.json``
(sizes, SHA-256); ``checkpoints/latest`` names the newest one and is replaced atomically.
"""

from dslaunch.train.checkpoint.load import load_checkpoint
from dslaunch.train.checkpoint.manifest import Manifest, latest_checkpoint, read_manifest
from dslaunch.train.checkpoint.save import save_checkpoint

__all__ = ["Manifest", "latest_checkpoint", "load_checkpoint", "read_manifest", "save_checkpoint"]
