"""Which parameter lands in which group, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import OptimizerPlan, ParamGroupPlan
from dslaunch.train.optimizers import parameter_groups


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.proj = torch.nn.ModuleDict(
            {
                "lora_A": torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)}),
                "lora_B": torch.nn.ModuleDict({"default": torch.nn.Linear(2, 4, bias=False)}),
            }
        )
        self.lm_head = torch.nn.Linear(4, 5)


ALL = ["embed.weight", "norm.weight", "norm.bias", "proj.lora_A.default.weight",
       "proj.lora_B.default.weight", "lm_head.weight", "lm_head.bias"]  # fmt: skip


def grouped(model: torch.nn.Module | None = None, **plan: Any) -> list[tuple[float, float, list[str]]]:
    """(lr, weight decay, names) of each group, for lr 1."""
    model = model or Model()
    names = {id(p): name for name, p in model.named_parameters()}
    decay = plan.pop("weight_decay", 0.0)
    full = OptimizerPlan(type="AdamW", lr=1.0, params={"lr": 1.0, "weight_decay": decay}, **plan)
    found = parameter_groups(model, full).parameters
    if not isinstance(found[0], dict):
        return [(1.0, decay, [names[id(p)] for p in found])]
    return [(g["lr"], g["weight_decay"], [names[id(p)] for p in g["params"]]) for g in found]


def test_without_decay_there_is_one_group() -> None:
    assert grouped() == [(1.0, 0.0, ALL)]


def test_norms_and_biases_do_not_decay() -> None:
    whole = ["embed.weight", "proj.lora_A.default.weight", "proj.lora_B.default.weight", "lm_head.weight"]
    assert grouped(weight_decay=0.1) == [
        (1.0, 0.1, whole),
        (1.0, 0.0, ["norm.weight", "norm.bias", "lm_head.bias"]),
    ]


def test_patterns_in_place_of_the_default() -> None:
    assert grouped(weight_decay=0.1, no_decay=()) == [(1.0, 0.1, ALL)]
    assert grouped(weight_decay=0.1, no_decay=("embed.*",)) == [(1.0, 0.1, ALL[1:]), (1.0, 0.0, ALL[:1])]


def test_a_group_has_its_own_rate_and_decay() -> None:
    head = ParamGroupPlan(match=("lm_head.*",), lr=0.5)
    assert grouped(groups=(head,)) == [(1.0, 0.0, ALL[:5]), (0.5, 0.0, ALL[5:])]
    decayed = ParamGroupPlan(match=("norm.*",), weight_decay=0.2)
    assert (1.0, 0.2, ["norm.weight", "norm.bias"]) in grouped(weight_decay=0.1, groups=(decayed,))


def test_the_first_match_counts() -> None:
    narrow, wide = (
        ParamGroupPlan(match=("lm_head.bias",), lr=0.5),
        ParamGroupPlan(match=("lm_head.*",), lr=2.0),
    )
    assert grouped(groups=(narrow, wide))[1:] == [(2.0, 0.0, ALL[5:6]), (0.5, 0.0, ALL[6:])]
    with pytest.raises(ConfigError, match=r"groups\[1\].match 'lm_head.bias': an earlier group has all"):
        grouped(groups=(wide, narrow))
    again = ParamGroupPlan(match=("lm_head.bias",), lr=2.0)  # the same said twice is no contradiction
    assert grouped(groups=(wide, again)) == grouped(groups=(wide,))


def test_lora_plus() -> None:
    b = ["proj.lora_B.default.weight"]
    assert grouped(loraplus_lr_ratio=16.0) == [(1.0, 0.0, [n for n in ALL if n not in b]), (16.0, 0.0, b)]
    own = ParamGroupPlan(match=("*.lora_B.*",), lr=3.0)
    assert grouped(loraplus_lr_ratio=16.0, groups=(own,))[1] == (3.0, 0.0, b)
    with pytest.raises(ConfigError, match="no B matrices"):
        grouped(torch.nn.Linear(2, 2), loraplus_lr_ratio=16.0)


def test_muons_groups_name_no_rate_but_their_own() -> None:
    """It has two usual ones, for matrices and for the rest; a rate in the group would be for both."""
    plan = OptimizerPlan(
        type="Muon", lr=0.02, params={"lr": 0.02, "weight_decay": 0.1},
        groups=(ParamGroupPlan(match=("embed.*",), lr=0.5),),
    )  # fmt: skip
    groups = parameter_groups(Model(), plan).parameters
    assert [(g.get("lr"), g["weight_decay"]) for g in groups] == [(None, 0.1), (0.5, 0.1), (None, 0.0)]
    two = replace(plan, params={**plan.params, "adam_lr": 1e-3})
    notes = parameter_groups(Model(), two).notes
    assert notes[0].startswith("lr 0.02 (where it is AdamW's 0.001), weight decay 0.1: ")
    assert notes[1].startswith("lr 0.5, weight decay 0.1: ")


def test_what_is_not_trained_is_in_no_group() -> None:
    model = Model()
    model.embed.weight.requires_grad_(False)
    assert grouped(model) == [(1.0, 0.0, ALL[1:])]
    with pytest.raises(ConfigError, match=r"no_decay 'embed\.\*' matches no trained parameter"):
        grouped(model, no_decay=("embed.*",))


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"groups\[0\].match 'lm_haed.weight' matches no") as raised:
        grouped(groups=(ParamGroupPlan(match=("lm_haed.weight",), lr=2.0),))
    assert raised.value.hint == "patterns are of whole names, such as lm_head.weight"


def test_notes_say_how_many_parameters_each_group_has() -> None:
    plan = OptimizerPlan(type="AdamW", lr=1.0, params={"lr": 1.0, "weight_decay": 0.1})
    assert parameter_groups(Model(), plan).notes == (
        "lr 1, weight decay 0.1: 56 parameters, embed.weight and 3 more",
        "lr 1, weight decay 0: 13 parameters, norm.weight and 2 more",
    )
