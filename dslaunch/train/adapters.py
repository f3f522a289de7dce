"""LoRA and DoRA adapters: from the plan to peft, and proof that they are trained."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dslaunch.core.errors import ConfigError, one_line
from dslaunch.core.module_patterns import ALL_LINEAR
from dslaunch.core.plan import AdapterPlan
from dslaunch.train.new_tokens import rows_readable, rows_to_train


def lora_config(adapter: AdapterPlan, rows: Mapping[str, Sequence[int]] | None = None) -> Any:
    """The peft ``LoraConfig`` of an adapter plan. ``rows``: of :func:`rows_to_train`."""
    from peft import LoraConfig

    targets: Any = ALL_LINEAR if adapter.target_modules == (ALL_LINEAR,) else list(adapter.target_modules)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,  # peft types it int and takes any number
        lora_dropout=adapter.lora_dropout,
        target_modules=targets,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.type == "dora",
        modules_to_save=list(adapter.modules_to_save) or None,
        trainable_token_indices={name: list(ids) for name, ids in (rows or {}).items()} or None,
    )


def add_adapter(model: Any, adapter: AdapterPlan, new_ids: Sequence[int] = ()) -> tuple[Any, str]:
    """Wrap ``model`` with a new adapter; all else is frozen. Returns it with a line for the user.

    The adapter has the dtype of the model: DeepSpeed keeps fp32 masters of it. ``new_ids``: tokens whose
    rows of embedding and head are trained besides. Collective at ZeRO-3.
    Raises ConfigError, with the names that would match, where a name in
    ``target_modules`` or ``modules_to_save`` matches nothing.
    """
    from peft import get_peft_model

    check_targets(model, adapter)
    parted = _parted_from_its_twin(model, adapter)
    rows = rows_to_train(model, adapter, new_ids)
    try:
        with rows_readable(model, rows):
            wrapped = get_peft_model(model, lora_config(adapter, rows), autocast_adapter_dtype=False)
    except ValueError as error:  # such as a norm: "Target module LlamaRMSNorm() is not supported"
        raise ConfigError(f"adapter.target_modules: peft refuses them: {one_line(error)}") from error
    count = len({name.rsplit(".lora_", 1)[0] for name, _ in wrapped.named_parameters() if _is_lora_a(name)})
    if count == 0:
        raise _no_match("adapter.target_modules", " ".join(adapter.target_modules), linear_names(model))
    trained = "".join(f", {len(ids)} row{'s' * (len(ids) > 1)} of {name}" for name, ids in rows.items())
    return wrapped, f"{adapter.type} adapter of rank {adapter.r} on {count} layers{trained}{parted}"


def check_targets(model: Any, adapter: AdapterPlan) -> None:
    """Each name must match a module: peft itself only minds when none of them does."""
    names = [name for name, _ in model.named_modules()]
    for key, wanted in (
        ("adapter.target_modules", adapter.target_modules),
        ("adapter.modules_to_save", adapter.modules_to_save),
    ):
        for target in wanted:
            if target != ALL_LINEAR and not any(n == target or n.endswith(f".{target}") for n in names):
                raise _no_match(key, target, linear_names(model))


def linear_names(model: Any) -> list[str]:
    """The last part of the name of every linear layer, each once, sorted."""
    return sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})


def _is_lora_a(name: str) -> bool:
    return ".lora_A." in name or ".lora_embedding_A." in name


def _parted_from_its_twin(model: Any, adapter: AdapterPlan) -> str:
    """What to add for the user where a head or embedding is trained that shares its weight with the other."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return ""
    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if module in (head, embedding)}
    trained = sorted(names & {*adapter.target_modules, *adapter.modules_to_save})
    if not trained:
        return ""
    return (
        f"; {' and '.join(trained)} parted: head and embedding were one weight, and a merged export has two"
    )


def _no_match(key: str, target: str, candidates: list[str]) -> ConfigError:
    near = difflib.get_close_matches(target, candidates, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give names of this model, or {ALL_LINEAR}"
    return ConfigError(
        f"{key}: {target!r} matches no layer of the model; it has {', '.join(candidates)}", hint=hint
    )


class GradientWitness:
    """Watches the first backward passes and tells which trained parameters never got a gradient.

    A frozen embedding under gradient checkpointing, or a layer that the
    forward never runs, leaves adapters untrained without a word. Of rows of tokens each is
    watched by itself.
    """

    def __init__(self, model: Any) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._seen = {name: [0.0] * (full_rows(p) if _is_rows(name) else 1) for name, p in trained}
        self._hooks = [p.register_hook(self._hook(name)) for name, p in trained]

    def _hook(self, name: str) -> Any:
        def seen(gradient: torch.Tensor) -> None:
            self._seen[name] = [1.0] * len(self._seen[name])

        def seen_rows(gradient: torch.Tensor) -> None:
            has = (gradient != 0).any(dim=1).tolist()
            self._seen[name] = [old or float(new) for old, new in zip(self._seen[name], has, strict=True)]

        return seen_rows if _is_rows(name) else seen

    def check(self, sum_over_ranks: Callable[[list[float]], list[float]]) -> str | None:
        """Stop watching. Collective: a gradient on any rank counts.

        ``sum_over_ranks`` adds vectors up element by element, as ``dist.all_reduce_sum`` does.
        Experts may be without one, where no token was routed to them, and so may rows of the embedding
        whose token was not there: returns a line about those. Raises ConfigError, on all ranks, naming
        any other parameter without a gradient.
        """
        for hook in self._hooks:
            hook.remove()
        summed = iter(sum_over_ranks([value for values in self._seen.values() for value in values]))
        seen = {name: [next(summed) > 0 for _ in values] for name, values in self._seen.items()}
        unseen = sorted(name for name, parts in seen.items() if not any(parts))
        experts = [name for name in unseen if "experts" in name.split(".")]
        rows = [name for name in unseen if _is_rows(name)]
        others = [name for name in unseen if name not in experts and name not in rows]
        if others:
            raise ConfigError(
                f"no gradient reached {len(others)} trained parameters in the first step, e.g. {others[0]}",
                hint="the forward pass does not use these layers: leave them out of adapter.target_modules",
            )
        lines = []
        if experts:
            lines.append(
                f"no token of the first step was routed to {len(experts)} expert weights, e.g. {experts[0]}"
            )
        if missing := sum(not part for name, parts in seen.items() if _is_rows(name) for part in parts):
            lines.append(f"{missing} rows of tokens got no gradient: their tokens were not in the first step")
        return "; ".join(lines) or None


def full_rows(parameter: torch.nn.Parameter) -> int:
    """Rows of the whole parameter, also where ZeRO-3 has it partitioned."""
    return int(getattr(parameter, "ds_shape", parameter.shape)[0])


def _is_rows(name: str) -> bool:
    return "trainable_tokens_delta" in name
