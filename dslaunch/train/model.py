"""Loads the tokenizer and the model of a plan, and puts its adapter on.

Everything that other stacks leave to chance is decided here: the dtype of
every parameter, safetensors only, no code from the model repository, sizes
that fit the tokenizer, ZeRO-3 partitioning from the first tensor on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dslaunch.core.errors import ConfigError, EnvironmentNotReady, one_line
from dslaunch.core.plan import ModelPlan, RunPlan
from dslaunch.core.run_dir import cache_dir
from dslaunch.train.adapters import add_adapter
from dslaunch.train.fp32_modules import Fp32Modules, loaded_in_fp32, set_dtypes
from dslaunch.train.gguf import convert_gguf
from dslaunch.train.hub import check_hub_model, has_no_answer, no_answer
from dslaunch.train.new_tokens import add_new_tokens, grow_vocabulary, ids_of
from dslaunch.train.quantization import (
    check_rows,
    check_trained_whole,
    loading_arguments,
    settle_codes,
)

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for the engine.

    ``trainable``: the parameters the optimizer gets. ``notes``: lines worth
    telling the user. ``keep_alive``: held for as long as the model is used
    (transformers only keeps a weak reference to the ZeRO-3 config). ``fp32``: the modules that stay
    in fp32 under a 16-bit precision.
    """

    model: Any
    trainable: list[torch.nn.Parameter]
    notes: tuple[str, ...]
    keep_alive: tuple[Any, ...] = ()
    fp32: Fp32Modules | None = None


def model_source(model: ModelPlan, dtype: torch.dtype) -> str:
    """What ``from_pretrained`` takes: the hub id, the directory, or the converted .gguf's directory.

    Raises ConfigError where a .gguf file or a directory is missing or unreadable.
    """
    if model.kind == "gguf":
        return str(convert_gguf(Path(model.path), dtype, cache_dir(os.environ) / "models"))
    if model.kind == "directory" and not (Path(model.path) / "config.json").is_file():
        raise ConfigError(
            f"model directory {model.path} holds no config.json",
            hint="model.path must be a Hugging Face model directory, a hub id or a .gguf file",
        )
    return model.path


def load_tokenizer(model: ModelPlan, dtype: torch.dtype) -> Any:
    """The tokenizer of ``model`` with the chat template of the plan.

    ``dtype`` is the training dtype: a .gguf file is converted once, for both.
    A missing pad token becomes the end-of-text token for padding only; which
    tokens are trained never depends on it.
    Raises ConfigError where there is none or its template file cannot be read,
    EnvironmentNotReady where it is to come from a hub that gives no answer.
    """
    from transformers import AutoTokenizer

    source = model.tokenizer or model_source(model, dtype)
    if model.tokenizer or model.kind == "hub":
        check_hub_model(source, None if model.tokenizer else model.revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            revision=None if model.tokenizer else model.revision,
            trust_remote_code=model.trust_remote_code,
        )
    except Exception as error:
        raise _load_error("tokenizer", source, error, model) from error
    if model.chat_template is not None:
        tokenizer.chat_template = _read_template(model.chat_template)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer of {source} has neither a pad nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    add_new_tokens(tokenizer, model.new_tokens)
    return tokenizer


def load_base_model(model: ModelPlan, dtype: torch.dtype, fp32_modules: Sequence[str] = ()) -> Any:
    """The pretrained causal language model at ``dtype``, the ``fp32_modules`` at fp32, in eval mode.

    Whole and on the CPU; where a ZeRO-3 config is alive, partitioned over the ranks
    on DeepSpeed's device instead (collective), from the first tensor on.
    Only safetensors are read unless ``allow_pickle``, and no code of the model
    repository runs unless ``trust_remote_code``.
    Raises ConfigError where it cannot be loaded that way.
    """
    from transformers import AutoModelForCausalLM

    source = model_source(model, dtype)
    try:
        config = load_config(model, source)
        quantised = loading_arguments(model.quantization_config, config, dtype)
        with loaded_in_fp32(fp32_modules):
            loaded, info = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                **quantised,
                revision=model.revision if model.kind == "hub" else None,
                dtype=dtype,
                trust_remote_code=model.trust_remote_code,
                use_safetensors=None if model.allow_pickle else True,
                attn_implementation=model.attn_implementation,
                output_loading_info=True,
            )
    except Exception as error:
        raise _load_error("model", source, error, model) from error
    _check_nothing_missing(source, info)
    loaded.config.use_cache = False  # with a cache, packed samples would attend to each other
    settle_codes(loaded, dtype)
    return loaded


def load_config(model: ModelPlan, source: str) -> Any:
    """The model's config.json, as transformers has it; ``source``: of :func:`model_source`."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(
        source,
        revision=model.revision if model.kind == "hub" else None,
        trust_remote_code=model.trust_remote_code,
    )


def load_model(plan: RunPlan, tokenizer: Any) -> LoadedModel:
    """The plan's model with its adapter, in train mode, ready for the engine. Collective at ZeRO-3.

    torch.distributed must be initialised for ZeRO-3: each rank then holds only
    its share of every weight from the moment it is read.
    Raises ConfigError where sizes do not fit the tokenizer or the adapter
    matches no layer, EnvironmentNotReady where transformers did not partition it.
    """
    keep_alive = (_zero3_config(plan),) if plan.zero_stage == 3 else ()
    torch.manual_seed(plan.seed)  # new adapter weights must be the same on every rank
    dtype = DTYPES[base_precision(plan)]
    patterns = plan.fp32_modules if dtype != torch.float32 else ()
    if plan.adapter is not None and plan.model.quantization_config is not None:
        config = load_config(plan.model, model_source(plan.model, dtype))
        check_trained_whole(plan.model.quantization_config, config, plan.adapter)
    model = load_base_model(plan.model, dtype, patterns)
    if plan.zero_stage == 3 and plan.model.quantization_config is None:
        _check_partitioned(model, plan.model.path)  # quantised weights DeepSpeed partitions itself
    notes: list[str] = []
    if plan.model.new_tokens:
        notes.append(grow_vocabulary(model, tokenizer, plan.model.new_tokens))
        torch.manual_seed(plan.seed)  # growing has drawn numbers, at stage 3 more of them
    check_vocabulary(model, tokenizer, plan.model.path)
    if plan.model.quantization_config is not None:
        check_rows(model)
        notes.append(f"frozen weights are kept in {plan.model.quantization_config}")
    if plan.adapter is not None:
        model, note = add_adapter(model, plan.adapter, ids_of(tokenizer, plan.model.new_tokens))
        notes.append(note)
    if plan.model.gradient_checkpointing:
        _enable_gradient_checkpointing(model)
    fp32 = Fp32Modules(model, patterns) if patterns else None
    set_dtypes(model, dtype, fp32.parameters if fp32 else ())
    if fp32 is not None:
        fp32.add_borders(dtype)
        notes += fp32.notes
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    if plan.trained_in_fp32:
        for parameter in trainable:
            parameter.data = parameter.data.float()
    notes.append(_size_note(model, trainable))
    return LoadedModel(model, trainable, tuple(notes), keep_alive, fp32)


def base_precision(plan: RunPlan) -> str:
    """The type that the pretrained weights are loaded in.

    Where what is trained is kept in fp32, the whole model is; what an adapter leaves frozen
    is not trained and has the type that is computed in.
    """
    whole = plan.adapter is None or plan.torch_autocast is not None  # DeepSpeed wants one type for all
    return "fp32" if plan.trained_in_fp32 and whole else plan.precision


def check_vocabulary(model: Any, tokenizer: Any, name: str) -> None:
    """Every token id must have a row in the embedding and in the head. Raises ConfigError."""
    needed = max(tokenizer.get_vocab().values()) + 1
    for part, module in (
        ("embedding", model.get_input_embeddings()),
        ("output head", model.get_output_embeddings()),
    ):
        rows = needed if module is None else full_shape(module.weight)[0]
        if rows < needed:
            raise ConfigError(
                f"the tokenizer has {needed} token ids but the {part} of {name} has {rows} rows",
                hint="use the tokenizer that belongs to the model (model.tokenizer)",
            )
    declared = getattr(model.config.get_text_config(), "vocab_size", needed)
    rows = full_shape(model.get_input_embeddings().weight)[0]
    if rows < declared:
        raise ConfigError(f"config.json of {name} says vocab_size {declared}, its embedding has {rows} rows")


def full_shape(parameter: Any) -> torch.Size:
    """The shape of the whole parameter, also where ZeRO-3 has it partitioned."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _zero3_config(plan: RunPlan) -> Any:
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(dict(plan.ds_config))


def _check_partitioned(model: Any, name: str) -> None:
    # transformers reads a model whole on every rank, without a word, where it sees no ZeRO-3 config.
    whole = [parameter for parameter, p in model.named_parameters() if not hasattr(p, "ds_tensor")]
    if whole:
        raise EnvironmentNotReady(
            f"{name} was read whole on every rank, not partitioned as ZeRO stage 3 needs it: {whole[0]} "
            f"and {len(whole) - 1} more",
            hint="use the transformers and DeepSpeed of constraints.txt, or zero_optimization.stage: 2",
        )


def _enable_gradient_checkpointing(model: Any) -> None:
    # Non-reentrant: the reentrant kind loses gradients when the first input needs none (frozen embedding).
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


def _check_nothing_missing(source: str, info: dict[str, Any]) -> None:
    missing = sorted(info.get("missing_keys") or ())
    mismatched = sorted(str(key) for key in (info.get("mismatched_keys") or ()))
    if missing or mismatched:
        names = ", ".join((missing + mismatched)[:4])
        raise ConfigError(
            f"the weights of {source} do not fill the model: {len(missing)} missing, "
            f"{len(mismatched)} of another shape ({names})",
            hint="the download may be incomplete, or config.json belongs to another model",
        )


def _load_error(
    what: str, source: str, error: Exception, model: ModelPlan
) -> ConfigError | EnvironmentNotReady:
    if isinstance(error, (ConfigError, EnvironmentNotReady)):
        return error
    if isinstance(error, ImportError):
        return EnvironmentNotReady(f"loading the {what} {source} needs another package: {one_line(error)}")
    if not Path(source).exists() and has_no_answer(error):
        return no_answer(source, error)
    if "attn_implementation" in str(error):
        return ConfigError(
            f"{source} does not run with model.attn_implementation {model.attn_implementation}:"
            f" {one_line(error, 160)}",
            hint="set model.attn_implementation: eager, which every model has",
        )
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"the {what} {source} needs Python code from its own repository, which is not run",
            hint="set model.trust_remote_code: true if you have read that code and trust it",
        )
    if not model.allow_pickle and _only_pickles(source):
        return ConfigError(
            f"{source} holds no safetensors, only pickled weights, which can run code when read",
            hint="convert it to safetensors, or set model.allow_pickle: true if you trust the file",
        )
    return ConfigError(f"cannot load the {what} {source}: {type(error).__name__}: {one_line(error, 400)}")


def _only_pickles(source: str) -> bool:
    directory = Path(source)
    if not directory.is_dir():
        return False
    return not any(directory.glob("*.safetensors")) and any(directory.glob("*.bin"))


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: cannot read {path}: {error}") from None


def _numel(parameter: Any) -> int:
    """Weights of a whole parameter; of 4-bit ones not the elements that they are packed in."""
    state = getattr(parameter, "quant_state", None)
    return full_shape(parameter).numel() if state is None else state.shape.numel()


def _size_note(model: Any, trainable: list[torch.nn.Parameter]) -> str:
    total = sum(_numel(p) for p in model.parameters())
    trained = sum(full_shape(p).numel() for p in trainable)
    return f"training {trained:,} of {total:,} parameters ({100 * trained / total:.2f}%)"
