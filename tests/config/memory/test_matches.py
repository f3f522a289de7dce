"""The names that patterns are matched with before the start are those that the ranks match them with."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.memory.conflicts import find_conflicts
from dslaunch.config.memory.matches import match_rows, matches_of_run, trained_names
from dslaunch.config.memory.model import load_model_facts
from dslaunch.config.memory.rows import trained_with
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import AdapterPlan, ModelPlan, OptimizerPlan, ParamGroupPlan, QuantizationPlan
from tests.support.plans import LORA
from tests.support.tiny import make_tiny_model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("m") / "model", tie=False, layers=1)


@pytest.fixture(scope="module")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("m") / "tied", layers=1)


def trainable(model_dir: Path, adapter: AdapterPlan | None, new_tokens: int = 0) -> Any:
    facts = load_model_facts(model_dir)
    if adapter is None:
        return facts, facts.tensors
    return facts, trained_with(facts, adapter, new_tokens)


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


SAVED: list[tuple[str, ...]] = [(), ("embed_tokens",), ("embed_tokens", "lm_head")]


@pytest.mark.parametrize(("tied", "saved"), [(False, ("lm_head",)), *itertools.product((False, True), SAVED)])
def test_rows_of_new_tokens_are_where_the_ranks_have_them(
    model_dir: Path, tied_dir: Path, tied: bool, saved: tuple[str, ...]
) -> None:
    import torch

    from dslaunch.train.adapters import add_adapter
    from dslaunch.train.model import load_base_model

    path = tied_dir if tied else model_dir
    adapter = replace(LORA, modules_to_save=saved, trainable_token_indices=(3, 4))
    model = load_base_model(ModelPlan(path=str(path), kind="directory"), torch.float32)
    facts, tensors = trainable(path, adapter, new_tokens=1)
    assert find_conflicts(facts, adapter, None, fp32_modules=(), num_new_tokens=1) == []
    model, _ = add_adapter(model, adapter, new_ids=[5])
    model(torch.tensor([[3, 5]])).logits.sum().backward()
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    planned = zip(trained_names(facts, tensors, adapter), tensors, strict=True)
    assert {name: tensor.shape for name, tensor in planned} == trained


def test_all_of_a_head_that_is_its_embedding_cannot_be_trained_beside_rows_of_it(
    tied_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused alike by plan and ranks; and peft really cannot, or this fails."""
    import torch

    from dslaunch.train import new_tokens
    from dslaunch.train.adapters import add_adapter
    from dslaunch.train.model import load_base_model

    adapter = replace(LORA, modules_to_save=("lm_head",), trainable_token_indices=(3,))
    facts = load_model_facts(tied_dir)
    ((key, error),) = find_conflicts(facts, adapter, None, fp32_modules=(), num_new_tokens=0)
    assert key == "adapter.modules_to_save"
    model = load_base_model(ModelPlan(path=str(tied_dir), kind="directory"), torch.float32)
    with pytest.raises(ConfigError) as of_ranks:
        add_adapter(model, adapter)
    assert (of_ranks.value.message, of_ranks.value.hint) == (error.message, error.hint)
    monkeypatch.setattr(new_tokens, "_is_among", lambda name, targets: False)
    wrapped, _ = add_adapter(model, adapter)
    with pytest.raises(ValueError, match="wraps an unknown layer type"):
        wrapped(torch.tensor([[3, 5]]))


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


FOUR = QuantizationPlan(load_in_4bit=True)


@pytest.mark.parametrize(
    ("adapter", "quantization", "fp32_modules", "key", "says"),
    [
        (
            replace(LORA, modules_to_save=("q_proj",)), FOUR, (), "adapter.modules_to_save",
            "q_proj is quantised, and quantised weights are not trained",
        ),
        (
            replace(LORA, trainable_token_indices=(384,)), None, (), "adapter.trainable_token_indices",
            "384 is no row of the embedding, which has 384",
        ),
        (
            replace(LORA, trainable_token_indices=(3,), target_modules=("q_proj", "embed_tokens")), None, (),
            "adapter.target_modules",
            "model.embed_tokens has rows to train, and cannot have an adapter as well",
        ),
        (
            LORA, FOUR, ("*norm*", "self_attn"), "fp32_modules",
            "model.layers.0.self_attn.q_proj.weight is quantised, and cannot be fp32",
        ),
    ],
    ids=["saved", "row", "embedding", "fp32"],
)  # fmt: skip
def test_what_modules_cannot_do_is_known_from_their_names(
    model_dir: Path, adapter: Any, quantization: Any, fp32_modules: Any, key: str, says: str
) -> None:
    """And the ranks, which have the model itself, say the same."""
    facts = load_model_facts(model_dir)
    ((found, error),) = find_conflicts(
        facts, adapter, quantization, fp32_modules=fp32_modules, num_new_tokens=0
    )
    assert (found, error.message) == (key, f"{key}: {says}")
    plan = ModelPlan(path=str(model_dir), kind="directory", quantization_config=quantization)
    with pytest.raises(ConfigError) as of_ranks:
        load_as_a_rank(plan, adapter, fp32_modules)
    assert (of_ranks.value.message, of_ranks.value.hint) == (error.message, error.hint)


def load_as_a_rank(plan: ModelPlan, adapter: AdapterPlan, fp32_modules: Any) -> None:
    import torch

    from dslaunch.train.adapters import add_adapter
    from dslaunch.train.fp32_modules import Fp32Modules
    from dslaunch.train.model import load_base_model, load_config
    from dslaunch.train.quantization import check_trained_whole

    if plan.quantization_config is not None:
        check_trained_whole(plan.quantization_config, load_config(plan, plan.path), adapter)
    model = load_base_model(plan, torch.float32)
    if fp32_modules:
        Fp32Modules(model, fp32_modules)
    add_adapter(model, adapter)


def test_what_modules_can_do_is_let_pass(model_dir: Path) -> None:
    adapter = replace(LORA, modules_to_save=("lm_head", "embed_tokens"), trainable_token_indices=(383, 385))
    kept = replace(FOUR, llm_int8_skip_modules=("q_proj",))
    facts = load_model_facts(model_dir)
    assert find_conflicts(facts, adapter, kept, fp32_modules=("*norm*", "q_proj"), num_new_tokens=2) == []
