"""Models with a fault planted in them, and data in which chosen samples set it off.

The token TRIGGER has an embedding whose first channel is MARK: a plant acts where it sees that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from dslaunch.core.plan import DataPlan
from dslaunch.train.corpus import Corpus, build_corpus
from dslaunch.train.data.collate import Sample

VOCABULARY, HIDDEN, PAD, TRIGGER, MARK = 64, 32, 0, 63, 8.0
LENGTH = 6  # tokens of each sample


class TokenData:
    """``count`` samples of other tokens each; those in ``triggers`` have a TRIGGER in the middle."""

    fingerprint = "planted"

    def __init__(self, count: int, triggers: Sequence[int]) -> None:
        self.lengths = np.full(count, LENGTH, dtype=np.int64)
        self.num_supervised = np.full(count, LENGTH - 1, dtype=np.int64)
        self._triggers = set(triggers)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        ids = np.array([1 + (7 * index + 5 * i) % (TRIGGER - 1) for i in range(LENGTH)], dtype=np.int32)
        if index in self._triggers:
            ids[LENGTH // 2] = TRIGGER
        return Sample(ids, np.ones(LENGTH, dtype=np.bool_))

    def where(self, index: int) -> str:
        return f"planted.jsonl:{index + 1}"


def make_corpus(count: int, triggers: Sequence[int], *, packing: bool = False) -> Corpus:
    """One sample a row; with ``packing`` three."""
    data = DataPlan(train=(), packing=packing, max_length=3 * LENGTH)
    return build_corpus(TokenData(count, triggers), data, pad_token_id=PAD, seed=0)


def tiny_llama(**more: Any) -> LlamaForCausalLM:
    """Two layers, head and embedding apart."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **more}))


class Block(torch.nn.Module):
    """A linear layer and, in its own code, a step around it: ``h + f(linear(h))``."""

    def __init__(self, plant: torch.nn.Module | None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.act = torch.nn.ReLU(inplace=True)
        self.plant = torch.nn.Identity() if plant is None else plant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (
            self.plant(hidden=hidden) if not isinstance(self.plant, torch.nn.Identity) else hidden
        )
        return result + 0.1 * self.act(self.linear(result))


class PlantedLM(torch.nn.Module):
    """Embedding, two blocks and a head; the second block has the plant."""

    def __init__(self, plant: torch.nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = torch.nn.ModuleList([Block(None), Block(plant)])
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            self.embed.weight.mul_(0.1)
            self.embed.weight[TRIGGER, 0] = MARK

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return CausalLMOutput(logits=self.head(hidden))


def marked(hidden: torch.Tensor) -> torch.Tensor:
    """Where a TRIGGER stands, [B, T, 1]."""
    return hidden[..., :1].detach() > MARK / 2


class Weighted(torch.nn.Module):
    """A plant with a parameter of its own, which takes part in what breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN))


class LogOfZero(Weighted):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.log(self.weight * (~marked(hidden)).to(hidden.dtype))


class RootOfZero(Weighted):
    """Forward is 0; the derivative there is infinite, and inf * 0 is nan."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        zero = torch.where(marked(hidden), 0 * hidden, torch.ones_like(hidden))
        return hidden + 0.1 * torch.sqrt(self.weight * zero)


class HiddenByWhere(Weighted):
    """The log of 0 is left out by where(), and its gradient is nan all the same: 0 / 0."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inside = torch.where(marked(hidden), 0 * hidden, hidden.abs() + 1)
        return hidden + 0.1 * torch.where(marked(hidden), hidden, torch.log(self.weight * inside))


class _DividesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        ctx.where = where
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / (~ctx.where).to(gradients[0].dtype), None


class DividesInBackward(Weighted):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _DividesInBackward.apply(hidden * self.weight, marked(hidden))  # type: ignore[no-any-return]


class _LargeForWeight(torch.autograd.Function):
    """The weight's gradient is 40000 for each trigger: one fits fp16, two do not."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        ctx.where, ctx.shape = where, weight.shape
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        one = 40000 * ctx.where.sum().to(gradients[0].dtype)
        return gradients[0], one.expand(ctx.shape).clone(), None


class LargeForWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _LargeForWeight.apply(hidden, self.weight, marked(hidden))  # type: ignore[no-any-return]


class NanForOneDraw(torch.nn.Module):
    """nan where the random number is the one that was drawn first after the seed 5 on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.unlucky = torch.rand((), generator=torch.Generator().manual_seed(5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        draw = torch.rand(())
        return hidden * torch.nan if draw == self.unlucky else hidden


class Harmless(torch.nn.Module):
    """An inf on the way that nothing comes of."""

    class Inf(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.where(marked(hidden), torch.full_like(hidden, torch.inf), hidden).detach()

    def __init__(self) -> None:
        super().__init__()
        self.inf = Harmless.Inf()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.exp(-self.inf(hidden).abs())


@torch.no_grad()
def spoil(model: torch.nn.Module, name: str, at: Any, value: float) -> None:
    """Set entries of a parameter."""
    dict(model.named_parameters())[name][at] = value
