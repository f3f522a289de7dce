"""What the patterns of a run file mean in its model: for ``plan`` to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslaunch.config.memory.adapter import linear_weights, tied_head
from dslaunch.config.memory.rows import DELTA, embedding_name, is_named
from dslaunch.config.memory.tensors import ModelFacts, Tensor
from dslaunch.core.module_patterns import ALL_LINEAR
from dslaunch.core.parameter_groups import match_groups, match_names
from dslaunch.core.plan import AdapterPlan, OptimizerPlan

_PEFT = "base_model.model."
_PARTS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.", ".modules_to_save.")
_SHOWN = 3

Matches = dict[str, tuple[str, ...]]  # "KEY PATTERN" -> names


def matches_of_run(
    facts: ModelFacts, trainable: Sequence[Tensor], adapter: AdapterPlan | None, optimizer: OptimizerPlan
) -> Matches:
    """Of each target of the adapter its modules, of each pattern of the optimizer its trained parameters.

    ``trainable``: what the memory plan counts as trained. Raises ConfigError, the key first, where a
    pattern of the optimizer matches nothing; targets have been looked at before.
    """
    found: Matches = {}
    if adapter is not None:
        for key in ("target_modules", "modules_to_save"):
            for target in getattr(adapter, key):
                found[f"adapter.{key} {target}"] = tuple(_modules(facts, target))
    names = trained_names(facts, trainable, adapter)
    for match in match_groups(names, optimizer):
        found[f"{match.key} {match.pattern}"] = match.names
    for pattern in optimizer.no_decay or ():
        found[f"optimizer.no_decay {pattern}"] = tuple(match_names(pattern, names, "optimizer.no_decay"))
    return found


def trained_names(
    facts: ModelFacts, trainable: Sequence[Tensor], adapter: AdapterPlan | None
) -> tuple[str, ...]:
    """The trained parameters as the ranks call them: peft puts the adapter's name among the parts."""
    if adapter is None:
        return tuple(tensor.name for tensor in trainable)
    return (*_embedding_names(facts, adapter), *(_in_peft(tensor.name) for tensor in trainable))


def match_rows(matches: Matches) -> list[tuple[str, str, str]]:
    """(key and pattern, how many, the first of them) for a table."""
    rows = []
    for key, names in matches.items():
        what = "module" if key.startswith("adapter.") else "parameter"
        more = ", ..." if len(names) > _SHOWN else ""
        count = f"{len(names)} {what}{'s' * (len(names) != 1)}"
        rows.append((key, count, ", ".join(names[:_SHOWN]) + more or "an earlier pattern has them"))
    return rows


def _modules(facts: ModelFacts, target: str) -> Iterator[str]:
    tensors = linear_weights(facts) if target == ALL_LINEAR else facts.tensors
    head = () if target == ALL_LINEAR else tied_head(facts)
    for module in dict.fromkeys((*(tensor.name.rpartition(".")[0] for tensor in tensors), *head)):
        if target == ALL_LINEAR or module == target or module.endswith(f".{target}"):
            yield module


def _in_peft(name: str) -> str:
    if name.endswith(DELTA):
        return f"{_PEFT}{name}.default"
    for part in _PARTS:
        name = name.replace(part, f"{part}default.")
    return _PEFT + name


def _embedding_names(facts: ModelFacts, adapter: AdapterPlan) -> Iterator[str]:
    """Of an adapter on the embedding, which the memory plan does not count."""
    module = embedding_name(facts)
    if is_named(module, adapter.target_modules):
        yield f"{_PEFT}{module}.lora_embedding_A.default"
        yield f"{_PEFT}{module}.lora_embedding_B.default"
