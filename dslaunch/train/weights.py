"""The trained weights of a checkpoint as one fp32 state dict, from any ZeRO stage."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dslaunch.core.checkpoint_manifest import (
    Manifest,
    candidates,
    find_fault,
    latest_checkpoint,
    read_manifest,
)
from dslaunch.core.errors import ConfigError
from dslaunch.core.run_dir import RunDir, checkpoint_step, checkpoint_steps
from dslaunch.train.checkpoint.pickles import check_pickle
from dslaunch.train.engine import torch_state


@dataclass(frozen=True)
class TrainedWeights:
    """``tensors``: name in the training module -> fp32 tensor, trained parameters only (all of them)."""

    checkpoint: Path
    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the last one of a run directory.

    Raises ConfigError where it is neither.
    """
    if checkpoint_step(path.resolve()) is not None and path.is_dir():
        return path.resolve()
    root = RunDir(path).checkpoints if RunDir(path).checkpoints.is_dir() else path
    found = latest_checkpoint(root)
    if found is not None:
        return found.resolve()
    if candidates(root):
        raise ConfigError(f"no complete checkpoint in {root}")
    raise ConfigError(
        f"{path} is neither a checkpoint (step-N) nor a run directory with checkpoints",
        hint="give RUN_DIR, or RUN_DIR/checkpoints/step-N",
    )


def load_trained_weights(checkpoint: Path) -> TrainedWeights:
    """Read and verify the trained weights: the optimizer's fp32 masters where it has them.

    Raises ConfigError where the checkpoint is damaged, holds foreign pickled
    objects, or a trained parameter is missing, empty, not finite or of another shape.
    """
    manifest = read_manifest(checkpoint)
    fault = find_fault(checkpoint, manifest, manifest.files)
    if fault is not None:
        others = len(checkpoint_steps(checkpoint.parent)) > 1
        hint = "export another one" if others else "put an intact copy of it back"
        raise ConfigError(f"checkpoint {checkpoint} is damaged: {fault}", hint=hint)
    for name in manifest.files:
        if name.endswith(".pt"):
            check_pickle(checkpoint / name)
    if manifest.engine == "torch":
        state = load_file(checkpoint / torch_state.MODEL)
    else:
        state = _read_stage_0(checkpoint) if manifest.zero_stage == 0 else _read_zero(checkpoint)
    tensors = {name: state[name] for name in manifest.trainable if name in state}
    check_tensors(tensors, manifest.trainable, str(checkpoint))
    return TrainedWeights(checkpoint, manifest, {n: t.float() for n, t in tensors.items()})


def check_tensors(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Exactly the ``expected`` names, each with its shape, not empty, all finite. Raises ConfigError."""
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} does not belong to the model"
        raise ConfigError(f"{where}: {what} ({len(missing)} missing, {len(unknown)} unknown)")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape) or tensor.numel() == 0:
            raise ConfigError(f"{where}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{where}: {name} holds nan or inf", hint="export an earlier checkpoint")


def _read_stage_0(checkpoint: Path) -> dict[str, torch.Tensor]:
    # 16-bit never runs at stage 0 here, so the module's own weights are the fp32 masters.
    path = checkpoint / "mp_rank_00_model_states.pt"
    state = torch.load(path, map_location="cpu", weights_only=False)  # looked through by check_pickle
    module: dict[str, torch.Tensor] = state["module"]
    return module


def _read_zero(checkpoint: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # DeepSpeed prints a dozen lines about shards; none of them is news to the user.
    with contextlib.redirect_stdout(io.StringIO()):
        state: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint.parent), tag=checkpoint.name
        )
    return state
