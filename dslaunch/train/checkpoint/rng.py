"""The random number generators of one rank, in files of its own.

DeepSpeed stores a client's state once for all ranks at stages 0-2, so it cannot hold
what differs from rank to rank. Tensors go to safetensors, the rest to JSON: nothing
is unpickled when they are read back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FOLDER = "rng"


def save_rng(checkpoint: Path, rank: int) -> None:
    """Write the states of torch (CPU and this rank's device), Python and numpy."""
    folder = checkpoint / FOLDER
    folder.mkdir(exist_ok=True)
    save_file(torch_states(), folder / f"rank-{rank}.safetensors")
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    state = {
        "python": [version, list(internal), gauss_next],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(state), encoding="utf-8")


def load_rng(checkpoint: Path, rank: int) -> None:
    """Restore what :func:`save_rng` wrote for this rank."""
    folder = checkpoint / FOLDER
    tensors = load_file(folder / f"rank-{rank}.safetensors")
    state: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
    set_torch_states(tensors)
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def torch_states() -> dict[str, torch.Tensor]:
    """The states of torch's generators: ``torch``, and ``device`` where that is another. No wait for it."""
    states = {"torch": torch.get_rng_state()}
    device_state = _device_rng_state()
    if device_state is not None:
        states["device"] = device_state
    return states


def set_torch_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore what :func:`torch_states` gave."""
    torch.set_rng_state(states["torch"])
    if "device" in states:
        _set_device_rng_state(states["device"])


def _device_rng_state() -> torch.Tensor | None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return None
    state: torch.Tensor = accelerator.get_rng_state()
    return state.cpu()


def _set_device_rng_state(state: torch.Tensor) -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().set_rng_state(state)
