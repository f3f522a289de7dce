"""Adapters in 16 bit are trained in fp32, every layer of them; what a schedule and Adam do meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import ModelPlan
from dslaunch.train.adapters import add_adapter
from dslaunch.train.model import load_base_model
from tests.support.plans import LORA
from tests.support.tiny import make_tiny_model_dir, make_tiny_tokenizer
from tests.train.case_results import CaseResults, run_case_ranks

MOVED = ["1/bf16/head", "2/fp16/head", "3/bf16/head", "2/bf16/dora", "3/fp16/dora"]
RESUMED = ["1/fp16/dora", "2/bf16/head", "3/fp16/head"]


def make_models(root: Path) -> Path:
    """Tiny models: ``untied`` of odd sizes, and two whose rotary tables are computed in other ways."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    make_tiny_model_dir(root / "untied", tie=False, vocab_size=311)
    sizes = {
        "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    rope = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes, rope_scaling=rope)).save_pretrained(root / "llama3-rope")
        Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=8)).save_pretrained(root / "gemma3")
    for name in ("llama3-rope", "gemma3"):
        make_tiny_tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def ran(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    models = make_models(tmp_path_factory.mktemp("models"))
    return run_case_ranks("tests.train.rank_adapters", tmp_path_factory.mktemp("adapters"), 2, str(models))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_layer_gets_its_gradient(ran: CaseResults, stage: int, checkpointing: bool) -> None:
    """The embedding is frozen: a checkpoint whose input needs no gradient would lose those of its layer."""
    result = ran[f"gradients/{stage}/{checkpointing}"]
    assert result["passes"] == 1 + checkpointing  # it is on where it is asked for
    gradients, expected = result["gradients"], ran["gradients/0/False"]["gradients"]
    sizes = {name: max(map(abs, values)) for name, values in gradients.items()}
    assert [sum(f"lora_{part}" in name for name in sizes) for part in "AB"] == [2 * 7, 2 * 7]
    assert all(size > 1e-4 for name, size in sizes.items() if "lora_B" in name)
    assert all(size == 0 for name, size in sizes.items() if "lora_A" in name)  # B is 0 before the first step
    assert gradients.keys() == expected.keys()
    for name, values in gradients.items():
        assert values == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_layer_that_the_first_step_leaves_out_ends_the_run(ran: CaseResults, stage: int) -> None:
    for rank in range(ran.world_size):
        said = ran.of_rank(rank, f"unused/{stage}")
        assert said["all"] is None
        assert (
            "no gradient reached 6 trained parameters in the first step" in said["without"]
        )  # A and B of three
        assert "layers.0.mlp.down_proj.lora_A" in said["without"]


@pytest.mark.parametrize("cell", MOVED)
def test_what_is_trained_in_16_bit_moves_by_less_than_16_bit_can_hold(ran: CaseResults, cell: str) -> None:
    """Adapter, magnitudes and the head beside them: three steps of Adam at 1e-6, kept in fp32."""
    result = ran[f"moved/{cell}"]
    assert result["dtypes"] == [{"bf16": "torch.bfloat16", "fp16": "torch.float16"}[cell.split("/")[1]]]
    assert result["skipped"] == [False] * 3
    kinds = {"head": ("lora_B", "modules_to_save"), "dora": ("lora_B", "lora_magnitude_vector")}
    for part in kinds[cell.split("/")[2]]:
        moves = [move for name, move in result["moves"].items() if part in name]
        assert moves and all(1e-6 < move < 3.1e-6 for move in moves), (part, moves)
    assert all(move > 0 for move in result["moves"].values())


@pytest.mark.parametrize("cell", RESUMED)
def test_they_are_resumed_to_the_last_bit(ran: CaseResults, cell: str) -> None:
    for rank in range(ran.world_size):
        result = ran.of_rank(rank, f"resumed/{cell}")
        assert result["same"]
        assert result["losses"][1] < result["losses"][0] - 0.03  # it trains: equal would else say nothing


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_row_without_gradient_stays_as_it_was_in_fp16(ran: CaseResults, stage: int) -> None:
    """With Adam's states in fp16, eps 1e-8 is 0 and 0/0 is nan. The batches hold the tokens 1 and 2."""
    assert ran[f"rows/{stage}"] == {"finite": True, "changed": [1, 2]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_schedule_waits_while_fp16_overflows(ran: CaseResults, stage: int) -> None:
    """The first step that is taken has the first rate, however many were skipped before it."""
    skipped, first, second = [0.25, True, 0.0], [0.25, False, -0.25], [0.5, False, -0.75]
    assert ran[f"schedule/{stage}"] == [skipped, skipped, skipped, first, second]


# ZeRO-3: partitioned from the first tensor on, and the same model


@pytest.mark.parametrize("name", ["untied", "llama3-rope", "gemma3"])
def test_under_zero_3_a_rank_holds_its_share_of_the_very_same_model(ran: CaseResults, name: str) -> None:
    """Rotary tables too: made under zero.Init in bf16, positions beyond 256 would run together."""
    for rank in range(ran.world_size):
        result = ran.of_rank(rank, f"partitioned/{name}")
        assert result["held"] == 0
        assert result["shares"] == pytest.approx(result["all"] / 2, rel=0.01)  # shares are padded
        assert result["num_buffers"] >= 2 and result["differing"] == []
        assert result["equal"]  # logits, bit by bit


def test_a_model_that_was_read_whole_under_zero_3_is_refused(ran: CaseResults) -> None:
    for rank in range(ran.world_size):
        error = ran.of_rank(rank, "too-early")
        assert error.startswith("EnvironmentNotReady: ")
        assert "was read whole on every rank, not partitioned as ZeRO stage 3 needs it: " in error


@pytest.mark.parametrize(
    ("tie", "more", "layers", "said"),
    [
        (True, {"modules_to_save": ("lm_head",)}, 1, "; lm_head parted: head and embedding were one weight"),
        (
            True,
            {"target_modules": ("embed_tokens", "q_proj")},
            2,
            "; embed_tokens parted: head and embedding",
        ),
        (True, {}, 1, ""),
        (False, {"modules_to_save": ("lm_head",)}, 1, ""),
    ],
)
def test_a_head_that_is_parted_from_its_embedding_is_told(
    tmp_path: Path, tie: bool, more: dict[str, tuple[str, ...]], layers: int, said: str
) -> None:
    import torch

    path = make_tiny_model_dir(tmp_path / "model", layers=1, tie=tie)
    model = load_base_model(ModelPlan(path=str(path), kind="directory"), torch.float32)
    note = add_adapter(model, replace(LORA, **{"target_modules": ("q_proj",), **more}))[1]
    begin, _, rest = note.partition(" layers")
    assert begin == f"lora adapter of rank {LORA.r} on {layers}"
    assert rest.startswith(said) and bool(rest) is bool(said)


def test_a_target_that_peft_cannot_adapt_is_one_sentence(tmp_path: Path) -> None:
    import torch

    path = make_tiny_model_dir(tmp_path / "model", layers=1)
    model = load_base_model(ModelPlan(path=str(path), kind="directory"), torch.float32)
    with pytest.raises(ConfigError, match=r"adapter\.target_modules: peft refuses them: .*LlamaRMSNorm"):
        add_adapter(model, replace(LORA, target_modules=("q_proj", "norm")))
