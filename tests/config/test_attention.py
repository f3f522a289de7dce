"""model.attn_implementation: what auto means, with its reason, and what is refused."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from dslaunch.config.attention import WITHOUT_FLASH, WITHOUT_FLEX, WITHOUT_SDPA
from dslaunch.config.facts import ModelAttention, model_attention
from dslaunch.core.errors import ConfigErrors
from dslaunch.core.topology import Host
from tests.config.build import SMALL, gpus, plan_of

KEY = "model.attn_implementation"
PACKED = SMALL.replace("data: {train: org/data}", "data: {train: org/data, packing: true}")
OLD = {"inventory": gpus("t4")}
READY = {"inventory": gpus("a100", "h100"), "flash_attn": True}


def of(kind: str, dropout: float = 0.0) -> dict[str, Any]:
    """A machine where all is there, and a model of this kind."""
    return {**READY, "model_attention": ModelAttention(kind, dropout)}


def written(value: str) -> str:
    return SMALL.replace("model: org/model", f"model: {{path: org/model, attn_implementation: {value}}}")


@pytest.mark.parametrize(
    ("text", "facts", "value", "reason"),
    [
        (SMALL, READY, "sdpa", "data.packing is off"),
        (PACKED, READY, "flash_attention_2", "flash-attn is installed, and every GPU is sm_80 or newer"),
        (PACKED, {**READY, "flash_attn": False}, "sdpa", "flash-attn is not installed"),
        (PACKED, {"flash_attn": True}, "sdpa", "it does not run on a CPU"),
        (PACKED + "precision: fp32\n", READY, "sdpa", "it computes in bf16 and fp16 only"),
        (
            PACKED,
            {"inventory": gpus("a100", "v100"), "flash_attn": True},
            "sdpa",
            "it needs compute capability 8.0, and v100",
        ),
        (PACKED, of("doge"), "sdpa", "no flash attention for doge"),
        (SMALL, of("gemma2"), "eager", "no sdpa for gemma2"),
        (PACKED, {"inventory": gpus("mi300x"), "flash_attn": True}, "sdpa", "not every device"),
        (
            PACKED + "cluster: {hostfile: hosts, gpu: a100}\n",
            {**READY, "hosts": (Host(name="far-1", slots=("0",)), Host(name="far-2", slots=("0",)))},
            "sdpa",
            "whether flash-attn is installed on the other hosts is not known",
        ),
        (written("eager"), READY, "eager", "as written"),
    ],
)
def test_what_is_chosen_and_why(text: str, facts: dict[str, Any], value: str, reason: str) -> None:
    plan = plan_of(text, **facts)
    assert plan.model.attn_implementation == value
    assert reason in plan.origins[KEY].reason


@pytest.mark.parametrize(
    ("asked", "text", "facts", "part"),
    [
        ("flash_attention_2", "precision: bf16\n", {}, "it does not run on a CPU"),
        ("flash_attention_2", "precision: fp32\n", READY, "it computes in bf16 and fp16 only"),
        ("flash_attention_2", "", OLD, "it needs compute capability 8.0, and t4 (sm_75) has less"),
        ("flash_attention_2", "", of("bloom"), "no flash attention for bloom"),
        ("flex_attention", "", {}, "it has no backward pass on a CPU"),
        ("flex_attention", "", of("llama", 0.1), "attention_dropout 0.1"),
        ("flex_attention", "", of("gpt2"), "no flex attention for gpt2"),
        ("sdpa", "", of("gpt_oss"), "transformers has no sdpa for gpt_oss"),
    ],
)
def test_what_cannot_run_is_refused(asked: str, text: str, facts: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan_of(written(asked) + text, **facts)
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"run.yaml:1: {KEY} {asked}: ") and part in problem.message
    eager = "gpt_oss" in part or "bloom" in part
    assert problem.hint == f"use {'eager' if eager else 'sdpa'}, or leave it to auto"


def test_the_tables_are_those_of_transformers() -> None:
    """After an upgrade: which causal models have which backend is said by their classes."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if kind in (
            "gemma2",
            "gpt_oss",
            "llama",
            "qwen3_next",
            "mamba2",
            "bloom",
            "gemma3",
            "gpt2",
            "lfm2",
            "opt",
        ):
            module = importlib.import_module(f"transformers.models.{model_type_to_module_name(kind)}")
            classes[kind] = getattr(module, name)
    assert len(classes) == 10
    for table, flag in (
        (WITHOUT_SDPA, "_supports_sdpa"),
        (WITHOUT_FLASH, "_supports_flash_attn"),
        (WITHOUT_FLEX, "_supports_flex_attn"),
    ):
        assert {kind for kind, c in classes.items() if not getattr(c, flag)} == table & classes.keys()
        assert table <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


def test_config_json_says_type_and_dropout(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "attention_dropout": 0.1}')
    assert model_attention(str(tmp_path)) == ModelAttention("llama", 0.1)
    assert model_attention(None) == model_attention(str(tmp_path / "none.json")) == ModelAttention()
