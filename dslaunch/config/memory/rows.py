"""Rows of tokens that are trained beside an adapter: of which layers, and how many of each.

The ranks say it by the model itself (train/new_tokens.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from dslaunch.config.memory.adapter import adapter_tensors, tied_head
from dslaunch.config.memory.tensors import ModelFacts, Tensor
from dslaunch.config.spec import AdapterSpec
from dslaunch.core.plan import AdapterPlan

Adapter = AdapterPlan | AdapterSpec
DELTA = "token_adapter.trainable_tokens_delta"
HEADS = ("lm_head", "embed_out")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")


def trained_with(facts: ModelFacts, adapter: Adapter, num_new_tokens: int) -> tuple[Tensor, ...]:
    """All that is trained with ``adapter``. Raises ConfigError as ``adapter_tensors`` does."""
    found = adapter_tensors(
        facts,
        r=adapter.r,
        target_modules=adapter.target_modules,
        dora=adapter.type == "dora",
        modules_to_save=adapter.modules_to_save,
    )
    return (*row_tensors(facts, adapter, num_new_tokens), *found)


def row_tensors(facts: ModelFacts, adapter: Adapter, num_new_tokens: int) -> tuple[Tensor, ...]:
    """What is trained of them, named as peft does but for the adapter's own name."""
    rows = row_layers(facts, adapter, num_new_tokens)
    return tuple(Tensor(f"{layer}.{DELTA}", (count, facts.dims.hidden)) for layer, count in rows.items())


def row_layers(facts: ModelFacts, adapter: Adapter, num_new_tokens: int) -> dict[str, int]:
    """Layer -> rows. New tokens have one in the head as well, unless it is one with the embedding.

    Of layers that ``modules_to_save`` trains whole, nothing.
    """
    embedding = embedding_name(facts)
    wanted = {embedding: len(adapter.trainable_token_indices) + num_new_tokens}
    if not facts.tied or is_named(embedding, adapter.modules_to_save):
        wanted |= dict.fromkeys(head_names(facts), num_new_tokens)
    saved = adapter.modules_to_save
    return {layer: count for layer, count in wanted.items() if count and not is_named(layer, saved)}


def embedding_of(facts: ModelFacts) -> Tensor | None:
    """The weight of the input embedding; None where no tensor has a name that is known for one."""
    named = (t for t in facts.tensors if t.name.split(".")[-2:] in [[name, "weight"] for name in _EMBEDDINGS])
    return next(named, None)


def embedding_name(facts: ModelFacts) -> str:
    tensor = embedding_of(facts)
    return "model.embed_tokens" if tensor is None else tensor.name.rpartition(".")[0]


def head_names(facts: ModelFacts) -> tuple[str, ...]:
    """The output head, also where it has no tensor of its own."""
    modules = (tensor.name.rpartition(".")[0] for tensor in facts.tensors)
    return tuple(dict.fromkeys(name for name in modules if name in HEADS)) or tied_head(facts)


def is_named(module: str, names: Sequence[str]) -> bool:
    """Whether one of ``names`` means ``module``, as peft reads them."""
    return any(module == name or module.endswith(f".{name}") for name in names)
