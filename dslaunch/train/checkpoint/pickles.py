"""What DeepSpeed pickles into a checkpoint, so that nothing else is ever unpickled."""

from __future__ import annotations

from pathlib import Path

import torch

from dslaunch.core.errors import ConfigError, one_line

# What DeepSpeed's own files refer to besides tensors and plain containers. Anything else in a
# checkpoint would run code of its choice when read, so it is refused by name.
_KNOWN_GLOBALS = frozenset(
    {
        "argparse.Namespace",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.utils.tensor_fragment.tensor_fragment",
        "deepspeed.runtime.utils.noop_context",
        "numpy.core.multiarray.scalar",  # as numpy 1 spells it
        "numpy._core.multiarray.scalar",  # as numpy 2 does
        "numpy.dtype",
    }
)


def check_pickle(path: Path) -> None:
    """Refuse a torch file that refers to anything but what DeepSpeed writes. Nothing is unpickled.

    Raises ConfigError, naming what the file refers to, or why it is no torch file.
    """
    try:
        names = set(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception as error:  # a broken zip, or no torch file at all
        raise ConfigError(f"{path} is not a torch file: {type(error).__name__}: {one_line(error)}") from error
    foreign = sorted(names - _KNOWN_GLOBALS)
    if foreign:
        raise ConfigError(
            f"{path} refers to {foreign[0]}, which a checkpoint of DeepSpeed does not; it was not read",
            hint="the file may run code when it is loaded: find out where it comes from",
        )
