"""A checkpoint as a Hugging Face directory: the adapter, or a whole model.

Plain transformers and peft load what is written. It appears under its name
only when it is complete and has been checked.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.plan import AdapterPlan, ModelPlan, from_json
from dslaunch.train.adapters import lora_config
from dslaunch.train.model import DTYPES, load_base_model, load_tokenizer, model_source
from dslaunch.train.publish import new_directory
from dslaunch.train.weights import TrainedWeights, check_tensors, find_checkpoint, load_trained_weights

_PROBE_TOKENS = 32


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    ``max_logit_drift``: merged against adapter model on a few tokens; None if not merged.
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


def export_checkpoint(
    source: Path, output: Path, *, merge: bool = False, force: bool = False
) -> ExportReport:
    """Write the checkpoint ``source`` (or the last one of a run directory) to ``output``.

    An adapter run gives an adapter directory, or with ``merge`` a full model
    with the adapter folded in; a full fine-tuning gives the model. Full models
    have the dtype of the training precision, adapters are fp32.

    Raises ConfigError where the checkpoint is unusable, ``merge`` makes no sense
    or ``output`` exists (without ``force``); EnvironmentNotReady where it cannot be written.
    """
    checkpoint = find_checkpoint(source)
    _check_output(output, force)
    weights = load_trained_weights(checkpoint)
    model_plan, adapter, dtype = _read_extra(weights)
    if merge and adapter is None:
        raise ConfigError(
            "--merge folds an adapter into its base model, and this run trained the whole model",
            hint="leave --merge out",
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with new_directory(output) as scratch:
            if adapter is None:
                written, drift = _write_full_model(weights, model_plan, dtype, scratch), None
            elif merge:
                written, drift = _write_merged_model(weights, model_plan, adapter, dtype, scratch)
            else:
                written, drift = _write_adapter(weights, model_plan, adapter, scratch), None
            load_tokenizer(model_plan, dtype).save_pretrained(scratch)
            _check_written(scratch, written)
    except OSError as error:
        raise EnvironmentNotReady(f"cannot write {output}: {error.strerror or error}") from error
    is_adapter = adapter is not None and not merge
    return ExportReport(
        kind="adapter" if is_adapter else "model",
        checkpoint=str(checkpoint),
        output=str(output),
        step=weights.manifest.step,
        dtype="float32" if is_adapter else str(dtype).removeprefix("torch."),
        num_tensors=len(written),
        num_parameters=sum(math.prod(shape) for shape in written.values()),
        base_model=model_plan.path,
        max_logit_drift=drift,
    )


Shapes = Mapping[str, tuple[int, ...]]


def _write_adapter(weights: TrainedWeights, plan: ModelPlan, adapter: AdapterPlan, out: Path) -> Shapes:
    """adapter_model.safetensors and adapter_config.json, without reading the base model's weights."""
    from peft import get_peft_model_state_dict

    wrapped = _wrap(_skeleton(plan), adapter)
    check_tensors(weights.tensors, _trainable_shapes(wrapped), str(weights.checkpoint))
    config = wrapped.peft_config["default"]
    config.base_model_name_or_path = plan.path
    config.revision = plan.revision
    wrapped.save_pretrained(out, state_dict=dict(weights.tensors), save_embedding_layers=False)
    # peft writes a model card with nothing in it.
    (out / "README.md").unlink(missing_ok=True)
    # The names in the file are peft's own; none may have got lost on the way to them.
    named = get_peft_model_state_dict(wrapped, state_dict=dict(weights.tensors), save_embedding_layers=False)
    assert len(named) == len(weights.tensors)
    return {name: tuple(tensor.shape) for name, tensor in named.items()}


def _write_merged_model(
    weights: TrainedWeights, plan: ModelPlan, adapter: AdapterPlan, dtype: torch.dtype, out: Path
) -> tuple[Shapes, float]:
    """Fold the adapter into the base in fp32, compare the two, then round once to ``dtype``."""
    base = load_base_model(plan, torch.float32)
    wrapped = _wrap(base, adapter).eval()
    check_tensors(weights.tensors, _trainable_shapes(wrapped), str(weights.checkpoint))
    wrapped.load_state_dict(dict(weights.tensors), strict=False)  # the rest is the base, already there
    before = _probe_logits(wrapped)
    merged = wrapped.merge_and_unload(safe_merge=True)  # raises on nan
    drift = float((_probe_logits(merged) - before).abs().max())
    limit = 1e-3 * max(1.0, float(before.abs().max()))
    if not drift <= limit:
        raise ConfigError(
            f"the merged model differs from the adapter model: logits are up to {drift:.3g} apart",
            hint="export without --merge, and report this",
        )
    _untie_if_different(merged)
    return _save_model(merged.to(dtype), plan, dtype, out), drift


def _write_full_model(weights: TrainedWeights, plan: ModelPlan, dtype: torch.dtype, out: Path) -> Shapes:
    model = _skeleton(plan)
    tensors = {name: tensor.to(dtype) for name, tensor in weights.tensors.items()}
    check_tensors(tensors, _trainable_shapes(model), str(weights.checkpoint))
    buffers = {name for name, _ in model.named_buffers()}
    missing, _ = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    left = [name for name in missing if name not in buffers and _is_meta(model, name)]
    if left:
        raise ConfigError(f"{weights.checkpoint}: {left[0]} is not in the checkpoint ({len(left)} missing)")
    return _save_model(model, plan, dtype, out)


def _save_model(model: Any, plan: ModelPlan, dtype: torch.dtype, out: Path) -> Shapes:
    model.config.dtype = dtype
    model.config.use_cache = True
    model.generation_config = _generation_config(model, plan)
    model.save_pretrained(out)
    shared: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in model.state_dict().items():
        shared.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)  # a tied weight is saved once
    return {name: shape for (_, shape), name in shared.items()}


def _skeleton(plan: ModelPlan) -> Any:
    """The base model without its weights, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = model_source(plan, torch.float32)
    config = AutoConfig.from_pretrained(
        source, revision=plan.revision, trust_remote_code=plan.trust_remote_code
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=plan.trust_remote_code)


def _wrap(model: Any, adapter: AdapterPlan) -> Any:
    from peft import get_peft_model

    return get_peft_model(model, lora_config(adapter), autocast_adapter_dtype=False)


def _trainable_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def _is_meta(model: Any, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return bool(getattr(model.get_submodule(owner), leaf).is_meta)


def _untie_if_different(model: Any) -> None:
    """Merging into one of two tied weights parts them: loading must not tie them again."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not getattr(model.config, "tie_word_embeddings", False):
        return
    if head.weight is not embedding.weight and not torch.equal(head.weight, embedding.weight):
        model.config.tie_word_embeddings = False


def _probe_logits(model: Any) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, _PROBE_TOKENS), generator=generator)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _generation_config(model: Any, plan: ModelPlan) -> Any:
    """The base's own generation settings, where it ships any."""
    from transformers import GenerationConfig

    try:
        source = model_source(plan, torch.float32)
        return GenerationConfig.from_pretrained(source, revision=plan.revision)
    except OSError:  # it ships none: what its config implies
        return GenerationConfig.from_model_config(copy.deepcopy(model.config))


def _read_extra(weights: TrainedWeights) -> tuple[ModelPlan, AdapterPlan | None, torch.dtype]:
    extra = weights.manifest.extra
    where = f"{weights.checkpoint}/manifest.json extra"
    if "model" not in extra or "adapter" not in extra:
        raise ConfigError(f"{where} does not say which model was trained")
    model = from_json(ModelPlan, extra["model"], f"{where}.model")
    adapter = from_json(AdapterPlan, extra["adapter"], f"{where}.adapter") if extra["adapter"] else None
    return model, adapter, DTYPES[weights.manifest.precision]


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


def _check_written(directory: Path, expected: Shapes) -> None:
    """Read the headers back: every tensor is there with its shape, whatever the saving library reported."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(os.fspath(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                found[name] = tuple(tensors.get_slice(name).get_shape())
    if found != dict(expected):
        wrong = sorted(set(found.items()) ^ set(dict(expected).items()))
        raise ConfigError(f"the written model is not what was trained: {wrong[0][0]} differs")
