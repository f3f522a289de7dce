"""Samples longer than a model with learned positions can read, through the real worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.support.plans import make_plan, save_plan, write_questions
from tests.support.ranks import run_ranks
from tests.support.tiny import make_tiny_tokenizer


def _tiny_gpt2(path: Path, *, n_positions: int) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = make_tiny_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=n_positions, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_too_long_for_learned_positions_is_a_sentence(tmp_path: Path, ops_dir: Path) -> None:
    model = _tiny_gpt2(tmp_path / "gpt2", n_positions=32)
    data = write_questions(tmp_path / "data.jsonl")
    plan = make_plan(tmp_path, model, data, world_size=1, zero_stage=0, max_steps=1)
    plan = dataclasses.replace(plan, data=dataclasses.replace(plan.data, max_length=128))
    result = run_ranks(["-m", "dslaunch.train.worker", "--plan", str(save_plan(plan))], world_size=1)[0]
    assert result.returncode == 2, result.stderr
    assert "data.max_length" in result.stderr
    assert "32" in result.stderr
    assert "Traceback" not in result.stderr
