"""The packages of the extra ``train``: which are missing, and what to say of one that is."""

from __future__ import annotations

import importlib.util
import sys

from dslaunch.core.errors import EnvironmentNotReady

# What `pip install .` leaves out and every rank needs, by the name that is imported (as in pyproject.toml).
TRAINING = (
    "torch", "deepspeed", "transformers", "peft", "datasets", "pyarrow", "numpy", "safetensors",
    "accelerate", "gguf", "ninja", "setuptools", "psutil", "tensorboard", "bitsandbytes",
)  # fmt: skip
# What no rank of DeepSpeed can do without, what our trainer needs besides, and what hosts should have alike.
DEEPSPEED = ("torch", "deepspeed")
TRAINER = ("transformers", "peft", "datasets", "accelerate", "safetensors")
COMPARED = (*DEEPSPEED, *TRAINER, "bitsandbytes", "flash-attn")
HOW_TO_INSTALL = "in your clone of dslaunch, in that environment: pip install '.[train]' -c constraints.txt"
# Of these a run can do without: curves are left out, ninja may be the system's, gguf is for .gguf files.
_CAN_DO_WITHOUT = ("tensorboard", "ninja", "gguf", "bitsandbytes")


def missing_packages() -> tuple[str, ...]:
    """What a rank needs and this interpreter has not got. Imports none of it."""
    needed = (name for name in TRAINING if name not in _CAN_DO_WITHOUT)
    return tuple(name for name in needed if importlib.util.find_spec(name) is None)


def packages_missing(names: tuple[str, ...], *, but: str = "") -> EnvironmentNotReady:
    """The error to raise where ``names`` are not installed; ``but``: what was not done therefore."""
    verb = "is" if len(names) == 1 else "are"
    return EnvironmentNotReady(
        f"{', '.join(names)} {verb} not installed for {sys.executable}{but}",
        hint=HOW_TO_INSTALL,
    )


def explain_missing_module(error: ModuleNotFoundError) -> EnvironmentNotReady | None:
    """The error to show for an import that failed; None where it is a module of our own."""
    name = error.name or ""
    top = name.partition(".")[0]
    if top in ("", "dslaunch"):
        return None
    if top in TRAINING and name == top:
        return packages_missing(tuple(dict.fromkeys((top, *missing_packages()))))
    return EnvironmentNotReady(
        f"the Python module {name} is not installed for {sys.executable}",
        hint=f"install the package that has it (most often: pip install {top})"
        if name == top
        else f"the installed {top} is of another version; constraints.txt of dslaunch names one that works",
    )
