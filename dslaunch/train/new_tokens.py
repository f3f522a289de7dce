"""Tokens that the run adds: in the tokenizer, in embedding and head, and as rows that are trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dslaunch.core.errors import ConfigError
from dslaunch.core.module_patterns import head_beside_rows
from dslaunch.core.plan import AdapterPlan

KEY = "model.new_tokens"


def add_new_tokens(tokenizer: Any, names: Sequence[str]) -> None:
    """Add ``names`` as special tokens: never split, and left out of decoded text like others of their kind.

    Raises ConfigError for one that the tokenizer has already.
    """
    from tokenizers import AddedToken

    there = tokenizer.get_vocab()
    for name in names:
        if name in there:
            raise ConfigError(
                f"{KEY}: the tokenizer has {name!r} already, with id {there[name]}",
                hint=f"leave it out; adapter.trainable_token_indices: [{there[name]}] trains its row",
            )
    tokens = [AddedToken(name, special=True, normalized=False) for name in names]
    tokenizer.add_tokens(tokens, special_tokens=True)


def ids_of(tokenizer: Any, names: Sequence[str]) -> tuple[int, ...]:
    """The ids of tokens that :func:`add_new_tokens` has added."""
    vocabulary = tokenizer.get_vocab()
    return tuple(vocabulary[name] for name in names)


def grow_vocabulary(model: Any, tokenizer: Any, names: Sequence[str]) -> str:
    """Give each new token a row in embedding and head, the mean of all rows before; a line for the user.

    From the mean, a new token is as likely as the average one and disturbs no other. Where the model has
    rows to spare (padding), they are taken; else embedding, head and config.vocab_size grow. Collective at
    ZeRO-3, where DeepSpeed partitions what has grown when the engine is made.
    """
    first, ids = len(tokenizer) - len(names), ids_of(tokenizer, names)
    rows = _shape(model.get_input_embeddings().weight)[0]
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for weight in _vocabulary_weights(model):
        with _gathered([weight], modifier_rank=0), torch.no_grad():
            mean = weight[: min(first, rows)].float().mean(dim=0)
            weight[list(ids)] = mean.to(weight.dtype)
    grown = f"{rows} rows became {len(tokenizer)}" if len(tokenizer) > rows else f"the model has {rows} rows"
    said = f"1 new token, id {ids[0]}, begins"
    if len(ids) > 1:
        said = f"{len(ids)} new tokens, ids {ids[0]} to {ids[-1]}, begin"
    return f"{said} at the mean of the others ({grown})"


def unused_tokens(dataset: Any, tokenizer: Any, names: Sequence[str]) -> list[str]:
    """A line about new tokens that no sample of the training data has; reads it until all were seen."""
    missing = dict(zip(ids_of(tokenizer, names), names, strict=True))
    for index in range(len(dataset)):
        if not missing:
            return []
        ids = dataset[index].input_ids
        for token in [token for token in missing if token in ids]:
            del missing[token]
    if not missing:
        return []
    return [f"{KEY}: not once in the training data: {', '.join(map(repr, missing.values()))}"]


def rows_to_train(model: Any, adapter: AdapterPlan, new_ids: Sequence[int]) -> dict[str, list[int]]:
    """peft's ``trainable_token_indices``: layer -> rows; of new tokens in the head as well.

    Of layers that ``modules_to_save`` trains whole, nothing; a head that is one with the embedding is
    peft's own to follow. Raises ConfigError where a row is not there or its layer has an adapter.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    wanted = {_name_of(model, embedding): {*adapter.trainable_token_indices, *new_ids}}
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    parted = _is_among(_name_of(model, embedding), adapter.modules_to_save)
    if head is not None and new_ids and (not tied or parted):
        wanted[_name_of(model, head)] = set(new_ids)
    rows = _shape(embedding.weight)[0]
    for index in adapter.trainable_token_indices:
        if index >= rows:
            raise ConfigError(
                f"adapter.trainable_token_indices: {index} is no row of the embedding, which has {rows}",
                hint=f"ids go from 0 to {rows - 1}",
            )
    if head is not None and head.weight is embedding.weight and not parted and any(wanted.values()):
        _check_not_saved(_name_of(model, head), _name_of(model, embedding), adapter)
    found = {}
    for name, ids in wanted.items():
        if not ids or _is_among(name, adapter.modules_to_save):
            continue
        if _is_among(name, adapter.target_modules):
            raise ConfigError(
                f"adapter.target_modules: {name} has rows to train, and cannot have an adapter as well",
                hint=f"move {name} to adapter.modules_to_save, which trains all of its rows",
            )
        found[name.rsplit(".", 1)[-1]] = sorted(ids)
    return found


def _check_not_saved(head: str, embedding: str, adapter: AdapterPlan) -> None:
    if _is_among(head, adapter.modules_to_save):
        raise head_beside_rows(head, embedding)


@contextlib.contextmanager
def rows_readable(model: Any, rows: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """In here peft can copy rows of embedding and head, also where ZeRO-3 has them partitioned.

    Collective then. Its own way to them is for CUDA alone (peft 0.21, trainable_tokens/layer.py).
    """
    from peft.tuners.trainable_tokens import layer

    if not rows:
        yield
        return
    asks = layer.check_deepspeed_zero3_enabled
    with _gathered(_vocabulary_weights(model), modifier_rank=None):
        layer.check_deepspeed_zero3_enabled = lambda: False
        try:
            yield
        finally:
            layer.check_deepspeed_zero3_enabled = asks


def _vocabulary_weights(model: Any) -> list[torch.nn.Parameter]:
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return list({id(m.weight): m.weight for m in modules if m is not None}.values())


def _gathered(weights: Sequence[torch.nn.Parameter], *, modifier_rank: int | None) -> Any:
    if not any(hasattr(weight, "ds_id") for weight in weights):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(weights), modifier_rank=modifier_rank)


def _shape(weight: Any) -> torch.Size:
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


def _name_of(model: Any, module: torch.nn.Module) -> str:
    return next(name for name, each in model.named_modules() if each is module)


def _is_among(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)
