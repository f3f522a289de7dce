"""What a model is asked: one BOS at most; and adapters of fp32 on a base of 16 bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from dslaunch.train import generate
from dslaunch.train.export import export_checkpoint
from dslaunch.train.generate import answer_prompts, load_generator
from tests.support.tiny import BOS, CHAT_TEMPLATE, make_tiny_model_dir, make_tiny_tokenizer
from tests.train.conftest import FinishedRuns


def asks_with_bos(directory: Path, template: str | None) -> Path:
    """A model whose tokenizer puts its BOS before every text, as Llama's does."""
    make_tiny_model_dir(directory)
    tokenizer = make_tiny_tokenizer(chat_template=template)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(directory)
    if template is None:
        (directory / "chat_template.jinja").unlink(missing_ok=True)
    return directory


@pytest.mark.parametrize("template", ["{{ bos_token }}" + CHAT_TEMPLATE, None], ids=["template", "plain"])
def test_a_prompt_begins_with_one_bos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    """With the template writing it, the tokenizer must not add another; without one, it does."""
    asked: list[list[int]] = []

    def remember(generator: Any, ids: list[int], max_new_tokens: int) -> list[int]:
        asked.append(ids)
        return [5]

    monkeypatch.setattr(generate, "_generate", remember)
    generator = load_generator(str(asks_with_bos(tmp_path / "model", template)))
    assert generator.tokenizer("x")["input_ids"][0] == generator.tokenizer.bos_token_id
    list(answer_prompts(generator, ["Who keeps it?"]))
    (ids,) = asked
    assert ids[0] == generator.tokenizer.bos_token_id
    assert ids.count(generator.tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp32_adapter_answers_on_a_16_bit_base(
    finished_runs: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As on a GPU: exported adapters are fp32, and the base is read in what the device computes in."""
    export_checkpoint(finished_runs.run_dir("s1-lora-bf16"), tmp_path / "adapter")
    monkeypatch.setattr(generate, "_device_and_dtype", lambda: (torch.device("cpu"), dtype))
    generator = load_generator(str(tmp_path / "adapter"))
    assert {p.dtype for p in generator.model.parameters()} == {dtype}
    with torch.no_grad():
        assert generator.model(input_ids=torch.arange(5, 20)[None]).logits.dtype == dtype
    (answer,) = answer_prompts(generator, ["Who keeps house 3?"], max_new_tokens=6)
    assert answer.num_new_tokens > 0
