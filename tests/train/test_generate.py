"""Answers: greedy, templated, ended by the right token, from models and adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dslaunch.core.errors import ConfigError
from dslaunch.train.export import export_checkpoint
from dslaunch.train.generate import answer_prompts, end_of_turn_id, end_token_ids, load_generator
from tests.support.tiny import make_tiny_model_dir, make_tiny_tokenizer
from tests.train.conftest import FinishedRuns


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


def test_answers_equal_plain_transformers(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    text = "<|im_start|>user\nWho keeps it?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    new_ids = expected[0, ids.shape[1] :]
    (answer,) = answer_prompts(load_generator(str(model_dir)), ["Who keeps it?"], max_new_tokens=12)
    assert answer.text == tokenizer.decode(new_ids, skip_special_tokens=True).strip()
    assert answer.num_prompt_tokens == ids.shape[1]
    assert answer.num_new_tokens == len(new_ids)
    assert answer.finish_reason == ("stop" if new_ids[-1] == tokenizer.eos_token_id else "length")


def test_it_stops_at_the_end_of_turn_even_if_the_model_names_another_token(
    model_dir: Path, tmp_path: Path
) -> None:
    """A model whose files say eos is <s>, as many base models do; the template ends turns otherwise."""
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    for file in ("config.json", "generation_config.json"):
        config = json.loads((other / file).read_text())
        config["eos_token_id"] = 0
        (other / file).write_text(json.dumps(config))
    generator = load_generator(str(other))
    turn_end = generator.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn_end in generator.end_token_ids and 0 in generator.end_token_ids
    with torch.no_grad():  # a head that always prefers the end of the turn
        generator.model.model.norm.weight.zero_()
        generator.model.lm_head.weight = torch.nn.Parameter(torch.zeros(384, 64))
        bias = torch.full((384,), -1.0)
        bias[turn_end] = 1.0
        generator.model.lm_head.bias = torch.nn.Parameter(bias)
    (answer,) = answer_prompts(generator, ["hello"], max_new_tokens=9)
    assert (answer.num_new_tokens, answer.finish_reason, answer.text) == (1, "stop", "")


def test_end_of_turn_is_read_from_the_template() -> None:
    tokenizer = make_tiny_tokenizer()
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert end_of_turn_id(tokenizer) is None
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert end_of_turn_id(tokenizer) is None
    tokenizer.chat_template = None
    assert end_of_turn_id(tokenizer) is None


def test_end_token_ids_take_lists(model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.generation_config.eos_token_id = [0, 7]
    tokenizer = make_tiny_tokenizer()
    assert end_token_ids(model, tokenizer) == tuple(sorted({0, 7, tokenizer.eos_token_id}))


def test_an_adapter_finds_its_base_and_differs_from_it(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    export_checkpoint(finished_runs.run_dir("s2-dropout"), tmp_path / "adapter")
    export_checkpoint(finished_runs.run_dir("s2-dropout"), tmp_path / "merged", merge=True)
    texts = [
        next(answer_prompts(load_generator(str(path)), ["Who keeps house 3?"], max_new_tokens=16)).text
        for path in (tmp_path / "adapter", tmp_path / "merged")
    ]
    assert texts[0] == texts[1]
    adapter = load_generator(str(tmp_path / "adapter")).model
    assert any(float(p.abs().sum()) > 0 for n, p in adapter.named_parameters() if "lora_B" in n)


def test_an_adapter_whose_base_is_gone(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    export_checkpoint(finished_runs.run_dir("s2-dropout"), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"base model .*gone is not there"):
        load_generator(str(tmp_path / "adapter"))


def test_what_cannot_be_answered_is_said(model_dir: Path, tmp_path: Path) -> None:
    generator = load_generator(str(model_dir))
    with pytest.raises(ConfigError, match="does not fit the model's context of 2048"):
        list(answer_prompts(generator, ["hello"], max_new_tokens=2048))
    with pytest.raises(ConfigError, match=r"neither config\.json"):
        load_generator(str(tmp_path))
    with pytest.raises(ConfigError, match="no model at"):
        load_generator(str(tmp_path / "none"))
    generator.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="needs a chat template"):
        list(answer_prompts(generator, ["hello"], system="be brief"))
    assert next(answer_prompts(generator, ["hello"], max_new_tokens=2)).num_new_tokens <= 2
