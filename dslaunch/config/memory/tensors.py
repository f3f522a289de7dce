"""The parameters of a model as names and shapes, and the sizes that its activations depend on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dslaunch.core.plan import QuantizationPlan


@dataclass(frozen=True)
class Tensor:
    """One parameter. ``shape`` is as torch has it at run time (a Linear's is [out, in])."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a decoder. ``intermediate`` is that of all MLPs a token passes through in one layer.

    ``gated``: the MLP multiplies two projections (SwiGLU) in place of one activation. ``family`` is the
    model_type, empty where it is not known. ``experts_per_token``: 0 without a mixture of experts.
    ``positions``: how long the model's context is, None where that is not said.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = True
    qk_norm: bool = False
    family: str = ""
    experts_per_token: int = 0
    positions: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ModelFacts:
    """Parameters in the order of ``model.parameters()``, tied ones once.

    ``file_dtype`` (torch's name) and ``file_bytes`` are of the weights on disk; None and 0
    where only a config.json is there. ``source`` says where the parameters come from;
    ``note`` what a user should know about them. ``on_disk``: how the weights on disk are quantised.
    """

    tensors: tuple[Tensor, ...]
    dims: Dimensions
    source: str
    file_dtype: str | None = None
    file_bytes: int = 0
    note: str | None = None
    on_disk: QuantizationPlan | None = None

    @property
    def numel(self) -> int:
        return total(self.tensors)

    @property
    def tied(self) -> bool:
        """Whether embedding and output head are one weight."""
        return not any(tensor.name in ("lm_head.weight", "embed_out.weight") for tensor in self.tensors)


def total(tensors: Iterable[Tensor]) -> int:
    """Elements of all tensors together."""
    return sum(tensor.numel for tensor in tensors)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts ``layers.10`` after ``layers.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
