"""What a run asks of modules of its model that they cannot do, told from names and shapes: nothing is loaded.

The ranks look at the model itself once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslaunch.config.memory.adapter import quantised_weights
from dslaunch.config.memory.rows import embedding_of, head_names, is_named, row_layers
from dslaunch.config.memory.tensors import ModelFacts
from dslaunch.config.memory.wide import matched_modules
from dslaunch.core.errors import ConfigError
from dslaunch.core.module_patterns import head_beside_rows
from dslaunch.core.plan import AdapterPlan, QuantizationPlan

Conflict = tuple[str, ConfigError]  # the key in the run file, what is wrong


def find_conflicts(
    facts: ModelFacts,
    adapter: AdapterPlan | None,
    quantization: QuantizationPlan | None,
    *,
    fp32_modules: Sequence[str],
    num_new_tokens: int,
) -> list[Conflict]:
    """``fp32_modules``: () where the whole run is in fp32. Raises ConfigError as ``matched_modules`` does."""
    quantised = quantised_weights(facts, quantization) if quantization is not None else set()
    found = [*_in_fp32(facts, quantised, fp32_modules)]
    if adapter is not None:
        found += [*_saved(adapter, quantised), *_rows(facts, adapter, num_new_tokens)]
    return found


def _saved(adapter: AdapterPlan, quantised: set[str]) -> Iterator[Conflict]:
    key = "adapter.modules_to_save"
    for trained in adapter.modules_to_save:
        if any(f".{trained}." in f".{name}." for name in quantised):
            message = f"{key}: {trained} is quantised, and quantised weights are not trained"
            hint = f"keep it as it is: model.quantization_config.llm_int8_skip_modules: [{trained}]"
            yield key, ConfigError(message, hint=hint)


def _rows(facts: ModelFacts, adapter: AdapterPlan, num_new_tokens: int) -> Iterator[Conflict]:
    weight = embedding_of(facts)
    if weight is None:
        return
    key, rows = "adapter.trainable_token_indices", weight.shape[0]
    for index in adapter.trainable_token_indices:
        if index >= rows + num_new_tokens:
            message = f"{key}: {index} is no row of the embedding, which has {rows}"
            yield key, ConfigError(message, hint=f"ids go from 0 to {rows - 1}")
    layers, embedding = row_layers(facts, adapter, num_new_tokens), weight.name.rpartition(".")[0]
    for layer in layers:
        if is_named(layer, adapter.target_modules):
            message = f"adapter.target_modules: {layer} has rows to train, and cannot have an adapter as well"
            hint = f"move {layer} to adapter.modules_to_save, which trains all of its rows"
            yield "adapter.target_modules", ConfigError(message, hint=hint)
    for head in head_names(facts) if facts.tied and embedding in layers else ():
        if is_named(head, adapter.modules_to_save):
            yield "adapter.modules_to_save", head_beside_rows(head, embedding)


def _in_fp32(facts: ModelFacts, quantised: set[str], patterns: Sequence[str]) -> Iterator[Conflict]:
    if not quantised or not patterns:
        return
    for modules in matched_modules(facts, patterns).values():
        inside = tuple(f"{module}." for module in modules)
        packed = next(
            (t.name for t in facts.tensors if t.name in quantised and t.name.startswith(inside)), None
        )
        if packed is not None:
            message = f"fp32_modules: {packed} is quantised, and cannot be fp32"
            yield (
                "fp32_modules",
                ConfigError(message, hint="name modules that are not quantised, such as norms"),
            )
            return
