"""Answers prompts with a model directory, an adapter directory, a .gguf file or a hub id."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from dslaunch.core.command import quote
from dslaunch.core.errors import ConfigError, DslaunchError, one_line
from dslaunch.core.model_path import model_kind
from dslaunch.core.plan import ModelPlan, QuantizationPlan
from dslaunch.core.quantised_model import plan_on_disk
from dslaunch.train.fp32_modules import set_dtypes
from dslaunch.train.hub import check_hub_model
from dslaunch.train.model import check_vocabulary, load_base_model, load_config, load_tokenizer
from dslaunch.train.quantization import QUANTIZATION_FILE, check_rows


@dataclass(frozen=True)
class Answer:
    """``finish_reason``: ``stop`` at an end token, ``length`` at ``max_new_tokens``."""

    prompt: str
    text: str
    num_prompt_tokens: int
    num_new_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Generator:
    """A model with what it takes to ask it something."""

    model: Any
    tokenizer: Any
    end_token_ids: tuple[int, ...]


def load_generator(path: str, *, trust_remote_code: bool = False) -> Generator:
    """Load ``path`` for answering. An adapter's base is read from its adapter_config.json.

    On a CPU everything runs in fp32: bf16 and fp16 are emulated on most, and
    fp32 loses nothing. Raises ConfigError where ``path`` or the base cannot be loaded.
    """
    directory = Path(path)
    adapter = _read_adapter_config(directory) if (directory / "adapter_config.json").is_file() else None
    if adapter is None and directory.is_dir() and not (directory / "config.json").is_file():
        raise ConfigError(
            f"{path} holds neither config.json (a model) nor adapter_config.json (an adapter)",
            hint="export a checkpoint first: dslaunch export RUN_DIR -o DIR",
        )
    if adapter is None and directory.is_absolute() and not directory.exists():
        raise ConfigError(f"no model at {path}")
    if adapter is None and not directory.exists() and "/" not in path:
        _check_bare_name(path)
    base = _base_plan(adapter or {"base_model_name_or_path": path}, trust_remote_code)
    device, dtype = _device_and_dtype()
    # An adapter directory may bring its own tokenizer and template: they are what it was trained with.
    own = path if (directory / "tokenizer_config.json").is_file() else None
    tokenizer = load_tokenizer(replace(base, tokenizer=own), dtype)
    base = replace(base, quantization_config=_quantization(directory, base))
    model = load_base_model(base, dtype)
    check_rows(model)
    if adapter is not None and own is not None:
        _grow_for(model, tokenizer, adapter)
    check_vocabulary(model, tokenizer, base.path)
    if adapter is not None:
        model = _with_adapter(model, directory, dtype)
    model.config.use_cache = True
    return Generator(model.to(device).eval(), tokenizer, end_token_ids(model, tokenizer))


def _grow_for(model: Any, tokenizer: Any, adapter: Mapping[str, Any]) -> None:
    """Make room for new tokens whose rows the adapter brings."""
    brings = adapter.get("trainable_token_indices") or adapter.get("modules_to_save")
    if brings and len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)


def _quantization(directory: Path, base: ModelPlan) -> QuantizationPlan | None:
    """How the weights are quantised: the model's own, or as an adapter's base was while it was trained."""
    file = directory / QUANTIZATION_FILE
    if file.is_file():
        return plan_on_disk(read_json(file))
    if base.kind == "gguf":
        return None
    block = getattr(load_config(base, base.path), "quantization_config", None)
    return plan_on_disk(block) if isinstance(block, dict) else None


def _check_bare_name(name: str) -> None:
    """A name without an owner is most often meant as a directory; few models of the hub have one."""
    try:
        check_hub_model(name, None)
    except DslaunchError as error:
        raise ConfigError(
            f"no such directory: {name}; nor could the hub give a model of that name",
            hint=f"write it first: dslaunch export RUN_DIR -o {quote(name)}",
        ) from error


def answer_prompts(
    generator: Generator, prompts: Sequence[str], *, max_new_tokens: int = 256, system: str | None = None
) -> Iterator[Answer]:
    """Answer each prompt by itself, greedily, as one user turn of the chat template where there is one.

    Raises ConfigError where a prompt with its answer does not fit the model's context.
    """
    for prompt in prompts:
        ids = _encode(generator.tokenizer, prompt, system)
        _check_fits(generator.model, len(ids), max_new_tokens)
        new_ids = _generate(generator, ids, max_new_tokens)
        stopped = bool(new_ids) and new_ids[-1] in generator.end_token_ids
        text = generator.tokenizer.decode(new_ids, skip_special_tokens=True).strip()
        yield Answer(prompt, text, len(ids), len(new_ids), "stop" if stopped else "length")


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer: the model's, the tokenizer's, and the chat template's end of turn."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = set(declared if isinstance(declared, list) else [declared])
    ids |= {tokenizer.eos_token_id, end_of_turn_id(tokenizer)}
    return tuple(sorted(i for i in ids if i is not None))


def end_of_turn_id(tokenizer: Any) -> int | None:
    """The special token that the chat template writes after an assistant's words, if it writes one."""
    if not tokenizer.chat_template:
        return None
    word = "answer"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": word}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template may refuse these turns; then the declared end tokens are all there is
        return None
    tail = text[text.rindex(word) + len(word) :] if word in text else ""
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = [(tail.index(content), token_id) for content, token_id in special.items() if content in tail]
    return min(found)[1] if found else None


def _generate(generator: Generator, ids: list[int], max_new_tokens: int) -> list[int]:
    config = copy.deepcopy(generator.model.generation_config)
    # Sampling settings in the model's own file would only be warned about.
    config.update(do_sample=False, temperature=None, top_p=None, top_k=None, max_length=None)
    config.update(max_new_tokens=max_new_tokens, use_cache=True)
    config.update(eos_token_id=list(generator.end_token_ids), pad_token_id=generator.tokenizer.pad_token_id)
    inputs = torch.tensor([ids], device=generator.model.device)
    with torch.inference_mode():
        output = generator.model.generate(
            inputs=inputs, attention_mask=torch.ones_like(inputs), generation_config=config
        )
    return cast(list[int], output[0, len(ids) :].tolist())


def _encode(tokenizer: Any, prompt: str, system: str | None) -> list[int]:
    if not tokenizer.chat_template:
        if system is not None:
            raise ConfigError("a system message needs a chat template, and this tokenizer has none")
        return cast(list[int], tokenizer(prompt)["input_ids"])
    turns = [{"role": "system", "content": system}] if system is not None else []
    turns.append({"role": "user", "content": prompt})
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # The template has written every special token itself: adding some would double the first.
    return cast(list[int], tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_fits(model: Any, num_prompt_tokens: int, max_new_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if num_prompt_tokens == 0:
        raise ConfigError("the prompt is empty")
    if limit is not None and num_prompt_tokens + max_new_tokens > limit:
        raise ConfigError(
            f"a prompt of {num_prompt_tokens} tokens with {max_new_tokens} new ones does not fit the "
            f"model's context of {limit}",
            hint="shorten the prompt or lower --max-new-tokens",
        )


def _device_and_dtype() -> tuple[torch.device, torch.dtype]:
    if torch.cuda.is_available():
        bf16 = torch.cuda.get_device_capability() >= (8, 0)  # older ones only emulate it
        return torch.device("cuda"), torch.bfloat16 if bf16 else torch.float16
    return torch.device("cpu"), torch.float32


def _read_adapter_config(directory: Path) -> dict[str, Any]:
    path = directory / "adapter_config.json"
    value = read_json(path)
    if not value.get("base_model_name_or_path"):
        raise ConfigError(f"{path} does not name its base model (base_model_name_or_path)")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model's or adapter's directory. Raises ConfigError where it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"cannot read {path}: it holds a {type(value).__name__}, no JSON object")
    return value


def _base_plan(adapter: dict[str, Any], trust_remote_code: bool) -> ModelPlan:
    path = adapter["base_model_name_or_path"]
    kind = model_kind(path)
    if Path(path).is_absolute() and not Path(path).exists():
        raise ConfigError(
            f"the adapter's base model {path} is not there",
            hint="put it back, or edit base_model_name_or_path in adapter_config.json",
        )
    return ModelPlan(
        path=str(Path(path).resolve()) if kind != "hub" else path,
        kind=kind,
        revision=adapter.get("revision"),
        trust_remote_code=trust_remote_code,
    )


def _with_adapter(model: Any, directory: Path, dtype: torch.dtype) -> Any:
    from peft import PeftModel

    if not (directory / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{directory} holds an adapter_config.json but no adapter_model.safetensors")
    try:
        adapted = PeftModel.from_pretrained(model, str(directory))
        set_dtypes(adapted, dtype)
        return adapted
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the adapter in {directory} does not fit its base model: {one_line(error)}"
        ) from error
