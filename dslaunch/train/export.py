"""A checkpoint as a Hugging Face directory: the adapter, or a whole model.

Plain transformers and peft load what is written. It appears under its name
only when it is complete and has been checked.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dslaunch.core.atomic import write_json
from dslaunch.core.errors import ConfigError, EnvironmentNotReady, one_line
from dslaunch.core.plan import AdapterPlan, ModelPlan
from dslaunch.train.adapters import lora_config
from dslaunch.train.checkpoint.record import read_record
from dslaunch.train.fp32_modules import fp32_names, to_dtype
from dslaunch.train.model import DTYPES, load_base_model, load_config, load_tokenizer, model_source
from dslaunch.train.new_tokens import grow_vocabulary, ids_of, rows_to_train
from dslaunch.train.publish import new_directory
from dslaunch.train.quantization import QUANTIZATION_FILE, bitsandbytes_config, dequantised
from dslaunch.train.weights import TrainedWeights, check_tensors, find_checkpoint, load_trained_weights

_PROBE_TOKENS = 32


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    ``max_logit_drift``: of what was merged; None if nothing was (see :class:`MergeDrift`).
    ``quantization``: of the base that was trained on.
    """

    kind: Literal["adapter", "model"]
    checkpoint: str
    output: str
    step: int
    dtype: str
    num_tensors: int
    num_parameters: int
    base_model: str
    max_logit_drift: float | None = None
    max_logit_drift_rounded: float | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class MergeDrift:
    """The largest difference in the logits from the model that was trained, on a few tokens.

    ``merged``: in fp32. ``rounded``: as it is written, in the run's dtype.
    """

    merged: float
    rounded: float


@dataclass(frozen=True)
class _Trained:
    """A checkpoint's weights, and what they belong to. ``dtype``: the run's, but for ``fp32_modules``."""

    weights: TrainedWeights
    model: ModelPlan
    adapter: AdapterPlan | None
    dtype: torch.dtype
    tokenizer: Any
    fp32_modules: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return str(self.weights.checkpoint)


def export_checkpoint(
    source: Path, output: Path, *, merge: bool = False, onto_original: bool = False, force: bool = False
) -> ExportReport:
    """Write the checkpoint ``source`` (or the last one of a run directory) to ``output``.

    An adapter run gives an adapter directory, or with ``merge`` a full model
    with the adapter folded in; a full fine-tuning gives the model. Full models
    have the dtype of the training precision, but for fp32_modules; adapters are fp32. Where the
    base was quantised, ``merge`` folds into the values of its codes, which is the model that was
    trained, and ``onto_original`` into the weights that they were made of.

    Raises ConfigError where the checkpoint is unusable, ``merge`` makes no sense
    or ``output`` exists (without ``force``); EnvironmentNotReady where it cannot be written.
    """
    checkpoint = find_checkpoint(source)
    _check_output(output, force)
    trained = _read_trained(checkpoint)
    if merge and trained.adapter is None:
        raise ConfigError(
            "--merge folds an adapter into its base model, and this run trained the whole model",
            hint="leave --merge out",
        )
    if onto_original:
        _check_original(trained, merge)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with new_directory(output) as scratch:
            drift = _write_weights(trained, scratch, merge=merge, onto_original=onto_original)
            trained.tokenizer.save_pretrained(scratch)
            shapes = _written_shapes(scratch)
    except OSError as error:
        raise EnvironmentNotReady(f"cannot write {output}: {error.strerror or error}") from error
    is_adapter = trained.adapter is not None and not merge
    return ExportReport(
        kind="adapter" if is_adapter else "model",
        checkpoint=trained.where,
        output=str(output),
        step=trained.weights.manifest.step,
        dtype="float32" if is_adapter else str(trained.dtype).removeprefix("torch."),
        num_tensors=len(shapes),
        num_parameters=_count_elements(shapes),
        base_model=trained.model.path,
        max_logit_drift=drift.merged if drift else None,
        max_logit_drift_rounded=drift.rounded if drift else None,
        quantization=str(trained.model.quantization_config) if trained.model.quantization_config else None,
    )


def _read_trained(checkpoint: Path) -> _Trained:
    weights = load_trained_weights(checkpoint)
    record = read_record(weights.manifest.extra, f"{checkpoint}/manifest.json extra")
    fp32_modules = () if record.precision == "fp32" else record.fp32_modules
    dtype = DTYPES[record.precision]
    tokenizer = load_tokenizer(record.model, dtype)
    return _Trained(weights, record.model, record.adapter, dtype, tokenizer, fp32_modules)


def _check_original(trained: _Trained, merge: bool) -> None:
    if not merge or trained.model.quantization_config is None:
        raise ConfigError(
            "--onto-original says what --merge folds an adapter into, where the base was quantised",
            hint="leave it out" if merge else "add --merge, or leave it out",
        )
    source = model_source(trained.model, trained.dtype)
    if getattr(load_config(trained.model, source), "quantization_config", None) is not None:
        raise ConfigError(
            f"--onto-original: {trained.model.path} is quantised itself; what it was made of is not known",
            hint="leave --onto-original out",
        )


def _write_weights(trained: _Trained, out: Path, *, merge: bool, onto_original: bool) -> MergeDrift | None:
    """Weights and config; the logit drift where there is something to compare."""
    if trained.adapter is None:
        _write_full_model(trained, out)
        return None
    if merge:
        return _write_merged_model(trained, trained.adapter, out, onto_original=onto_original)
    _write_adapter(trained, trained.adapter, out)
    return None


def _write_adapter(trained: _Trained, adapter: AdapterPlan, out: Path) -> None:
    """adapter_model.safetensors and adapter_config.json, without reading the base model's weights."""
    from peft import get_peft_model_state_dict

    tensors = dict(trained.weights.tensors)
    wrapped = _wrap(trained, _skeleton(trained), adapter)
    check_tensors(tensors, _trainable_shapes(wrapped), trained.where)
    config = wrapped.peft_config["default"]
    config.base_model_name_or_path = trained.model.path
    config.revision = trained.model.revision
    wrapped.save_pretrained(out, state_dict=tensors, save_embedding_layers=False)
    if trained.model.quantization_config is not None:
        # What the codes are packed in changes none of them, and bytes go with every type.
        plan = dataclasses.replace(trained.model.quantization_config, bnb_4bit_quant_storage="uint8")
        how = bitsandbytes_config(plan, trained.dtype)
        write_json(out / QUANTIZATION_FILE, how.to_dict())
    # peft writes a model card with nothing in it.
    (out / "README.md").unlink(missing_ok=True)
    # The names in the file are peft's own; none may have got lost on the way to them.
    named = get_peft_model_state_dict(wrapped, state_dict=tensors, save_embedding_layers=False)
    assert len(named) == len(tensors)
    if _written_shapes(out) != {name: tuple(tensor.shape) for name, tensor in named.items()}:
        raise ConfigError("the written adapter is not what was trained: names or shapes differ")


def _write_merged_model(
    trained: _Trained, adapter: AdapterPlan, out: Path, *, onto_original: bool
) -> MergeDrift:
    """Fold the adapter into the base, compare the two, then round once to the run's dtype.

    The base is read as the run read it and computed with in fp32: what is merged is the model that
    was trained; where it was quantised, the values that the codes stand for. ``onto_original``
    merges into the weights as they were before. Returns the largest logit differences.
    """
    wrapped, was_one = _adapted_base(trained, adapter, trained.model)
    before = _probe_logits(wrapped)
    if onto_original:
        original = dataclasses.replace(trained.model, quantization_config=None)
        wrapped, was_one = _adapted_base(trained, adapter, original)
    same = _probe_logits(wrapped) if onto_original else before
    merged = wrapped.merge_and_unload(safe_merge=True)  # raises on nan
    after = _probe_logits(merged)
    drift = float((after - same).abs().max())
    limit = 1e-3 * max(1.0, float(same.abs().max()))
    if not drift <= limit:
        raise ConfigError(
            f"the merged model differs from the adapter model: logits are up to {drift:.3g} apart",
            hint="export without --merge, and report this",
        )
    if was_one:
        _tie_if_equal(merged)
    _save_model(to_dtype(merged, trained.dtype, trained.fp32_modules), trained, out)
    rounded = _probe_logits(merged.float())
    return MergeDrift(float((after - before).abs().max()), float((rounded - before).abs().max()))


def _adapted_base(trained: _Trained, adapter: AdapterPlan, model: ModelPlan) -> tuple[Any, bool]:
    """The base in fp32 with the trained adapter, and whether its head and embedding were one."""
    base = load_base_model(model, trained.dtype, trained.fp32_modules)
    if model.new_tokens:
        grow_vocabulary(base, trained.tokenizer, model.new_tokens)
    base = dequantised(base, torch.float32) if model.quantization_config else base.float()
    was_one = _part_head_from_embedding(base)
    try:
        wrapped = _wrap(trained, base, adapter).eval()
    except (
        TypeError
    ) as error:  # a head with an adapter that was one with an embedding of which rows were trained
        reason = f"peft cannot merge this adapter: {one_line(error)}"
        raise ConfigError(reason, hint="export without --merge") from error
    check_tensors(trained.weights.tensors, _trainable_shapes(wrapped), trained.where)
    wrapped.load_state_dict(dict(trained.weights.tensors), strict=False)  # the rest is in the base
    return wrapped, was_one


def _write_full_model(trained: _Trained, out: Path) -> None:
    model = _skeleton(trained)
    wide = fp32_names(model, trained.fp32_modules)
    tensors = {n: t if n in wide else t.to(trained.dtype) for n, t in trained.weights.tensors.items()}
    check_tensors(tensors, _trainable_shapes(model), trained.where)
    if buffers := saved_buffers(model):
        # Such as the expert biases of DeepSeek-V3: no gradient trains them, so they are the base's.
        base = load_base_model(trained.model, trained.dtype).state_dict()
        tensors |= {name: base[name] for name in buffers}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if left:
        raise ConfigError(f"{trained.where}: {left[0]} is not in the checkpoint ({len(left)} missing)")
    _save_model(model, trained, out)


def saved_buffers(model: Any) -> list[str]:
    """The buffers that belong to the weights; rotary tables and the like are made anew on loading."""
    state = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name in state]


def _save_model(model: Any, trained: _Trained, out: Path) -> None:
    model.config.dtype = trained.dtype
    model.config.use_cache = True
    model.generation_config = _generation_config(model, trained)
    model.save_pretrained(out)
    # Names in the file may be others (transformers 5 fuses experts when it loads and parts them
    # when it saves), but every number must be there, and a tied weight only once.
    one_each = {id(tensor): tensor.numel() for tensor in model.parameters()}
    buffers = model.state_dict()
    expected = sum(one_each.values()) + sum(buffers[name].numel() for name in saved_buffers(model))
    found = _count_elements(_written_shapes(out))
    if found != expected:
        raise ConfigError(f"the written model has {found:,} numbers, and {expected:,} were trained")


def _skeleton(trained: _Trained) -> Any:
    """The base model without its weights, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plan = trained.model
    config = AutoConfig.from_pretrained(
        model_source(plan, trained.dtype), revision=plan.revision, trust_remote_code=plan.trust_remote_code
    )
    if plan.new_tokens:
        text = config.get_text_config()
        text.vocab_size = max(text.vocab_size, len(trained.tokenizer))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=plan.trust_remote_code)


def _wrap(trained: _Trained, model: Any, adapter: AdapterPlan) -> Any:
    from peft import get_peft_model

    rows = rows_to_train(model, adapter, ids_of(trained.tokenizer, trained.model.new_tokens))
    return get_peft_model(model, lora_config(adapter, rows), autocast_adapter_dtype=False)


def _trainable_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def _part_head_from_embedding(model: Any) -> bool:
    """Two weights where there was one, until it is known whether they stay equal: peft merges into both.

    Returns whether there was one.
    """
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return False
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return True


def _tie_if_equal(model: Any) -> None:
    """Training or merging into one of two tied weights parts them: loading must not tie them again."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = torch.equal(head.weight, embedding.weight)
    if model.config.tie_word_embeddings:
        head.weight = embedding.weight


def _probe_logits(model: Any) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, _PROBE_TOKENS), generator=generator)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _generation_config(model: Any, trained: _Trained) -> Any:
    """The base's own generation settings, where it ships any."""
    from transformers import GenerationConfig

    try:
        source = model_source(trained.model, trained.dtype)
        return GenerationConfig.from_pretrained(source, revision=trained.model.revision)
    except OSError:  # it ships none: what its config implies
        return GenerationConfig.from_model_config(copy.deepcopy(model.config))


def _check_output(output: Path, force: bool) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() and not force:
        raise ConfigError(f"{output} exists already; nothing was written", hint="add --force to replace it")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file, and export writes a directory")
    if output.exists() and not _looks_exported(output):
        raise ConfigError(
            f"{output} holds neither a model nor an adapter, so --force does not replace it",
            hint="give a new directory, or remove it yourself",
        )


def _looks_exported(output: Path) -> bool:
    return any((output / name).is_file() for name in ("config.json", "adapter_config.json"))


def _written_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the files, whatever the saving library reported."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(os.fspath(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                found[name] = tuple(tensors.get_slice(name).get_shape())
    return found


def _count_elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
