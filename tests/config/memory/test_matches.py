"""The names that patterns are matched with before the start are those that the ranks match them with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.memory.adapter import adapter_tensors
from dslaunch.config.memory.matches import match_rows, matches_of_run, trained_names
from dslaunch.config.memory.model import load_model_facts
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import AdapterPlan, ModelPlan, OptimizerPlan, ParamGroupPlan
from tests.support.plans import LORA
from tests.support.tiny import make_tiny_model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("m") / "model", tie=False, layers=1)


def trainable(model_dir: Path, adapter: AdapterPlan | None) -> Any:
    facts = load_model_facts(model_dir)
    if adapter is None:
        return facts, facts.tensors
    tensors = adapter_tensors(
        facts, r=adapter.r, target_modules=adapter.target_modules, dora=adapter.type == "dora",
        modules_to_save=adapter.modules_to_save, trained_rows=len(adapter.trainable_token_indices),
    )  # fmt: skip
    return facts, tensors


@pytest.mark.parametrize(
    "adapter",
    [
        None,
        LORA,
        replace(LORA, type="dora", target_modules=("q_proj", "down_proj"), modules_to_save=("lm_head",)),
        replace(LORA, target_modules=("q_proj", "embed_tokens")),
        replace(LORA, target_modules=("v_proj",), trainable_token_indices=(3,)),
    ],
    ids=["none", "lora", "dora", "embedding", "rows"],
)
def test_the_names_are_those_of_the_ranks(model_dir: Path, adapter: AdapterPlan | None) -> None:
    import torch

    from dslaunch.train.adapters import add_adapter
    from dslaunch.train.model import load_base_model

    model = load_base_model(ModelPlan(path=str(model_dir), kind="directory"), torch.float32)
    if adapter is not None:
        model, _ = add_adapter(model, adapter)
    expected = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(trained_names(*trainable(model_dir, adapter), adapter)) == expected


def optimizer(*groups: ParamGroupPlan, **more: Any) -> OptimizerPlan:
    return OptimizerPlan(type="AdamW", lr=1e-3, params={"lr": 1e-3}, groups=groups, **more)


def test_each_pattern_has_what_no_pattern_before_it_took(model_dir: Path) -> None:
    adapter = replace(LORA, target_modules=("q_proj",), modules_to_save=("lm_head",))
    groups = (ParamGroupPlan(match=("*lm_head*",), lr=1e-5), ParamGroupPlan(match=("*weight",), lr=1e-4))
    plan = optimizer(*groups, loraplus_lr_ratio=8.0, no_decay=("*lora_A*",))
    found = matches_of_run(*trainable(model_dir, adapter), adapter, plan)
    q_proj = "model.layers.0.self_attn.q_proj"
    peft = f"base_model.model.{q_proj}"
    assert found == {
        "adapter.target_modules q_proj": (q_proj,),
        "adapter.modules_to_save lm_head": ("lm_head",),
        "optimizer.groups[0].match *lm_head*": ("base_model.model.lm_head.modules_to_save.default.weight",),
        "optimizer.groups[1].match *weight": (
            f"{peft}.lora_A.default.weight",
            f"{peft}.lora_B.default.weight",
        ),
        "optimizer.loraplus_lr_ratio *lora_B*": (),
        "optimizer.no_decay *lora_A*": (f"{peft}.lora_A.default.weight",),
    }
    rows = match_rows(found)
    assert rows[0] == ("adapter.target_modules q_proj", "1 module", q_proj)
    assert rows[4][1:] == ("0 parameters", "an earlier pattern has them")


def test_a_pattern_that_matches_nothing_is_an_error(model_dir: Path) -> None:
    facts, tensors = trainable(model_dir, None)
    for plan, key in (
        (optimizer(ParamGroupPlan(match=("*lora_A*",))), r"optimizer\.groups\[0\]\.match '\*lora_A\*'"),
        (optimizer(no_decay=("*nothing*",)), r"optimizer\.no_decay '\*nothing\*'"),
    ):
        with pytest.raises(ConfigError, match=f"{key} matches no trained parameter"):
            matches_of_run(facts, tensors, None, plan)
