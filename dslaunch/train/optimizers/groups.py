"""Parameter groups: who decays, and who learns at a rate of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dslaunch.core.parameter_groups import match_groups, match_names
from dslaunch.core.plan import OptimizerPlan


class Groups(NamedTuple):
    """``model_parameters`` for ``initialize``, and a line for each group (none where there is but one)."""

    parameters: list[Any]
    notes: tuple[str, ...]


class _Settings(NamedTuple):
    lr: float
    weight_decay: float


def parameter_groups(model: torch.nn.Module, plan: OptimizerPlan) -> Groups:
    """The trained parameters of ``model`` in groups of one rate and decay each.

    The first group is that with the plan's own rate and decay, where any parameter has them.
    Raises ConfigError where a pattern matches no trained parameter, or only such as an
    earlier group has taken.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    usual = _Settings(plan.lr, float(plan.params.get("weight_decay", 0.0)))
    own = _own_settings([name for name, _ in named], plan)
    undecayed = _undecayed(named, plan)
    found: dict[_Settings, list[tuple[str, torch.nn.Parameter]]] = {usual: []}
    for name, parameter in named:
        lr, weight_decay = own.get(name, (None, None))
        if weight_decay is None:
            weight_decay = 0.0 if name in undecayed else usual.weight_decay
        settings = _Settings(usual.lr if lr is None else lr, weight_decay)
        found.setdefault(settings, []).append((name, parameter))
    groups = {settings: members for settings, members in found.items() if members}
    if list(groups) == [usual]:
        return Groups([p for _, p in named], ())
    return Groups(
        [{"params": [p for _, p in members], **_keys(s, usual, plan)} for s, members in groups.items()],
        tuple(_note(s, members, _keys(s, usual, plan), plan) for s, members in groups.items()),
    )


def _keys(settings: _Settings, usual: _Settings, plan: OptimizerPlan) -> dict[str, float]:
    """Muon has two usual rates, its own and Adam's: a group that names neither gets each where it belongs."""
    named = settings._asdict()
    if plan.type == "Muon" and settings.lr == usual.lr:
        del named["lr"]
    return named


def _own_settings(names: Sequence[str], plan: OptimizerPlan) -> dict[str, tuple[float | None, float | None]]:
    """(lr, weight decay) of the parameters that have one of their own; None: the usual one."""
    return {
        name: (match.lr, match.weight_decay) for match in match_groups(names, plan) for name in match.names
    }


def _undecayed(named: Sequence[tuple[str, torch.nn.Parameter]], plan: OptimizerPlan) -> set[str]:
    """The parameters that weight decay leaves out unless their group says otherwise."""
    names = [name for name, _ in named]
    if plan.no_decay is None:
        # At ZeRO-3 the parameter itself is empty; its whole shape is beside it.
        return {name for name, p in named if len(getattr(p, "ds_shape", p.shape)) < 2}
    return {name for pattern in plan.no_decay for name in match_names(pattern, names, "optimizer.no_decay")}


def _note(
    settings: _Settings,
    members: Sequence[tuple[str, torch.nn.Parameter]],
    named: dict[str, float],
    plan: OptimizerPlan,
) -> str:
    count = sum(getattr(p, "ds_numel", p.numel()) for _, p in members)
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    adam = plan.params.get("adam_lr")
    both = "" if "lr" in named or adam is None else f" (where it is AdamW's {adam:g})"
    return (
        f"lr {settings.lr:g}{both}, weight decay {settings.weight_decay:g}: "
        f"{count:,} parameters, {members[0][0]}{more}"
    )
