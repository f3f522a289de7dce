"""The weights that a window was given to, beside it: trained parameters and buffers in their own dtype.

No optimizer state: nothing is trained on from here. At ZeRO stage 3 each rank writes its share,
below that rank 0 writes for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dslaunch.core.errors import ConfigError
from dslaunch.train.checkpoint.trained import held_values


def weight_bytes(module: torch.nn.Module) -> int:
    """What this rank's file will take; -1 where a parameter is not in memory (NVMe)."""
    total = 0
    for _, held in _kept(module):
        if held is None:
            return -1
        total += held.numel() * held.element_size()
    return total


def write_weights(folder: Path, rank: int, module: torch.nn.Module) -> None:
    """Write this rank's weights into a window's folder. Raises OSError."""
    tensors = {name: held.detach().cpu().clone() for name, held in _kept(module) if held is not None}
    save_file(tensors, folder / f"weights-{rank}.safetensors")


def load_weights(folder: Path, rank: int, module: torch.nn.Module) -> None:
    """Put the saved weights into ``module``, which is the same model, sharded in the same way.

    Raises ConfigError where the file is missing or of another model.
    """
    path = folder / f"weights-{rank}.safetensors"
    try:
        saved = load_file(path)
    except Exception as error:  # safetensors has errors of its own, and a missing file is as bad
        raise ConfigError(f"the weights of the window cannot be read: {path}: {error}") from None
    _drop_gathered(module)
    with torch.no_grad():
        for name, held in _kept(module):
            found = saved.pop(name, None)
            if held is None or found is None or found.shape != held.shape:
                raise ConfigError(f"{path} is of another model: {name} is not the same there")
            held.copy_(found)
    if saved:
        raise ConfigError(f"{path} is of another model: it holds {next(iter(saved))}")


def _kept(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, held_values(parameter)
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in saved:
            yield f"buffer:{name}", buffer


def _drop_gathered(module: torch.nn.Module) -> None:
    """At stage 3 small parameters stay whole beside their shares; the next pass gathers them anew."""
    for parameter in module.parameters():
        if getattr(getattr(parameter, "ds_status", None), "name", "") == "AVAILABLE":
            parameter.partition(param_list=[parameter], has_been_updated=False)  # type: ignore[attr-defined]
