"""Frozen weights in 4 or 8 bit by bitsandbytes: from the plan to transformers, and back to numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.plan import AdapterPlan, QuantizationPlan
from dslaunch.core.quantised_model import plan_on_disk, undeclared

# In an exported adapter: how its base was quantised, as BitsAndBytesConfig(**json) takes it;
# peft's own file has no place for it.
QUANTIZATION_FILE = "quantization_config.json"


def bitsandbytes_config(plan: QuantizationPlan, dtype: torch.dtype, skip: tuple[str, ...] = ()) -> Any:
    """transformers' ``BitsAndBytesConfig`` that quantises while loading, computed with in ``dtype``.

    ``skip``: names of modules that are left as they are: transformers' own choice (the output
    head) goes away when any is named. Raises EnvironmentNotReady without bitsandbytes.
    """
    check_bitsandbytes()
    from transformers import BitsAndBytesConfig

    if plan.load_in_8bit:
        return BitsAndBytesConfig(
            load_in_8bit=True,
            llm_int8_threshold=plan.llm_int8_threshold,
            llm_int8_skip_modules=list(skip or plan.llm_int8_skip_modules) or None,
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=plan.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=plan.bnb_4bit_use_double_quant,
        bnb_4bit_quant_storage=plan.bnb_4bit_quant_storage,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=list(skip or plan.llm_int8_skip_modules) or None,
    )


def loading_arguments(plan: QuantizationPlan | None, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What ``from_pretrained`` takes besides, so that a model of ``config`` is quantised as ``plan`` says.

    A model that is quantised on disk is read as it is, but computed with in ``dtype``: what its
    config.json says of that was right for another run. ``config`` is changed so.
    Raises ConfigError where the two do not go together.
    """
    on_disk = _on_disk(config)
    if on_disk is None:
        if plan is None:
            return {}
        return {"quantization_config": bitsandbytes_config(plan, dtype, _skipped(plan, config))}
    if plan is None:
        raise undeclared(plan_on_disk(on_disk), "model.path")
    check_on_disk(plan, on_disk, dtype)
    check_bitsandbytes()
    config.quantization_config = {**on_disk, "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch.")}
    return {}


def check_bitsandbytes() -> None:
    """Raises EnvironmentNotReady where bitsandbytes is not there or cannot be used."""
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # a wrong CUDA makes it raise all kinds
        raise EnvironmentNotReady(
            f"model.quantization_config needs bitsandbytes, and it cannot be imported: {error}",
            hint="pip install bitsandbytes -c constraints.txt",
        ) from error


def check_on_disk(plan: QuantizationPlan, on_disk: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Raises ConfigError where a model's own quantisation is not the plan's, or DeepSpeed would break it."""
    there = plan_on_disk(on_disk)
    for name in ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
        planned, found = getattr(plan, name), getattr(there, name)
        if planned != found:
            raise ConfigError(
                f"model.quantization_config.{name} is {planned}, but the model's weights are quantised"
                f" already: {there}",
                hint=f"set {name}: {str(found).lower()}",
            )
    storage = there.bnb_4bit_quant_storage
    same = storage in ("uint8", str(dtype).removeprefix("torch."))
    if there.load_in_4bit and not same and dtype != torch.float32:
        raise ConfigError(
            f"the model's 4-bit weights are packed in {storage} and the run is in {dtype}: DeepSpeed would"
            " cast the packed bits as if they were numbers",
            hint="use the precision of the file, or quantise the original model anew",
        )


def check_trained_whole(plan: QuantizationPlan, config: Any, adapter: AdapterPlan) -> None:
    """Raises ConfigError where a module to be trained in full would be quantised. Reads no weights."""
    for name in quantised_names(plan, config):
        for trained in adapter.modules_to_save:
            if f".{trained}." in f".{name}.":
                raise ConfigError(
                    f"adapter.modules_to_save: {trained} is quantised, and quantised weights are not trained",
                    hint=f"keep it as it is: model.quantization_config.llm_int8_skip_modules: [{trained}]",
                )


def quantised_names(plan: QuantizationPlan, config: Any) -> list[str]:
    """The layers of a model of ``config`` that are quantised, in order."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    skeleton = _skeleton(config)
    kept = [*_never_quantised(skeleton), *plan.llm_int8_skip_modules]
    linear = [n for n, m in skeleton.named_modules() if isinstance(m, Conv1D) or type(m) is torch.nn.Linear]
    return [name for name in linear if should_convert_module(name, kept)]


def is_quantised(parameter: torch.nn.Parameter) -> bool:
    """Whether the numbers of ``parameter`` are bitsandbytes' codes, also where they are kept as floats."""
    return type(parameter).__name__ in ("Params4bit", "Int8Params")


def settle_codes(model: Any, dtype: torch.dtype) -> None:
    """Let 4-bit codes stand for the same values in forward and backward, and stay where they are.

    bitsandbytes 0.50 reads them in the input's type in forward and, in backward, in the one that they were
    made of, which for a model on disk may be another than the run's. And on CPUs with AVX512-BF16 it packs
    a layer's weight anew in its first forward pass in eval mode (nn/modules.py, Linear4bit.forward),
    whatever else holds that tensor: ZeRO's shares, for one.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            state.dtype = dtype
        if hasattr(module, "init_8bit_state"):
            module.register_load_state_dict_pre_hook(_keep_scales)


def _keep_scales(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A checkpoint of an adapter has the 8-bit layers' scales, which do not count as frozen parameters.

    The base that was read has the same ones. bitsandbytes 0.50 takes them only while they lie on the weight,
    and a forward pass before (the probe of packed samples) has moved them (nn/modules.py, Linear8bitLt).
    """
    for name in ("SCB", "weight_format"):
        state.pop(prefix + name, None)


def dequantised(model: Any, dtype: torch.dtype) -> Any:
    """The same model with plain layers of the values that the codes stand for, in ``dtype``.

    transformers' own ``dequantize`` makes linear layers of GPT-2's Conv1D, and saves them transposed.
    """
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if not any(is_quantised(p) for p in module.parameters(recurse=False)):
            continue
        weight = _values(module).to(dtype)
        out, into = weight.shape
        with torch.device("meta"):
            plain = Conv1D(out, into) if module.source_cls is Conv1D else torch.nn.Linear(into, out)
        plain.weight = torch.nn.Parameter(weight.T.contiguous() if module.source_cls is Conv1D else weight)
        plain.bias = module.bias
        model.set_submodule(name, plain)
    model.hf_quantizer.remove_quantization_config(model)
    return model.to(dtype)


def check_rows(model: Any) -> None:
    """Raises ConfigError for 4-bit layers on a CPU that bitsandbytes 0.50.2 reads wrong, by 25-40 %.

    Its kernel takes each row's blocks to begin anew, and quantising does not (backends/cpu/ops.py).
    """
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is None or module.weight.device.type != "cpu":
            continue
        width = state.shape[-1]
        if width % 2 == 0 and width % state.blocksize:
            raise ConfigError(
                f"{name} has rows of {width} weights: on a CPU bitsandbytes misreads 4-bit rows that are no"
                f" multiple of {state.blocksize}",
                hint=f"model.quantization_config.llm_int8_skip_modules: [{name.rsplit('.', 1)[-1]}], or"
                " load_in_8bit",
            )


def _values(module: Any) -> torch.Tensor:
    """What the codes of a layer stand for. 4-bit rows are read as one, which every kernel reads right."""
    from bitsandbytes import functional
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    state = getattr(module.weight, "quant_state", None)
    if state is None:
        return dequantize_bnb_weight(module.weight, module.state)
    flat = copy.copy(state)
    flat.shape = torch.Size((1, state.shape.numel()))
    return functional.dequantize_4bit(module.weight.data, flat).reshape(state.shape)


def _on_disk(config: Any) -> dict[str, Any] | None:
    block = getattr(config, "quantization_config", None)
    if block is None:
        return None
    return dict(block) if isinstance(block, Mapping) else dict(block.to_dict())


def _skipped(plan: QuantizationPlan, config: Any) -> tuple[str, ...]:
    """Naming one module would quantise the head, so it is named as well."""
    if not plan.llm_int8_skip_modules:
        return ()
    return (*_never_quantised(_skeleton(config)), *plan.llm_int8_skip_modules)


def _never_quantised(skeleton: Any) -> list[str]:
    from transformers.quantizers.base import get_keys_to_not_convert

    names: list[str] = get_keys_to_not_convert(skeleton)
    return [*names, *(skeleton._keep_in_fp32_modules or ())]


def _skeleton(config: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import set_quantized_state

    # In that state transformers partitions nothing, also where a ZeRO-3 config is alive.
    with torch.device("meta"), set_quantized_state():
        return AutoModelForCausalLM.from_config(config)
