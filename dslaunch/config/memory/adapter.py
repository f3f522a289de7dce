"""The parameters that LoRA and DoRA add, and what quantised (NF4) weights take.

Sources: peft (tuners/lora/layer.py: A is [r, in], B is [out, r], DoRA's magnitude [out]);
bitsandbytes (functional.py: blocks of 64 weights with one absmax each, which double
quantisation stores as bytes with one fp32 for each 256).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from dslaunch.config.memory.tensors import ModelFacts, Tensor
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import QuantizationPlan

ALL_LINEAR = "all-linear"
_NOT_LINEAR = ("embed_tokens", "wte", "wpe", "embed_in", "lm_head", "score")
_CONV1D = ("c_attn", "c_proj", "c_fc")  # GPT-2: the weight is [in, out]


def adapter_tensors(
    facts: ModelFacts,
    *,
    r: int,
    target_modules: Sequence[str] = (ALL_LINEAR,),
    dora: bool = False,
    modules_to_save: Sequence[str] = (),
    trained_rows: int = 0,
) -> tuple[Tensor, ...]:
    """What an adapter trains, in the order of ``model.parameters()``; ``trained_rows``: of tokens besides.

    Raises ConfigError where a name in ``target_modules`` matches no layer.
    """
    linear = {tensor.name for tensor in linear_weights(facts)}
    modules = [tensor.name.rsplit(".", 1)[0] for tensor in facts.tensors]
    for target in (*target_modules, *modules_to_save):
        if target != ALL_LINEAR and not any(_matches(module, target) for module in modules):
            _fail(target, sorted({name.split(".")[-2] for name in linear}))
    found = tuple(_trained(facts, linear, r, target_modules, dora, modules_to_save))
    rows = Tensor("embedding.trainable_tokens_delta", (trained_rows, facts.dims.hidden))
    return (rows, *found) if trained_rows else found


def linear_weights(facts: ModelFacts) -> tuple[Tensor, ...]:
    """The weights of all linear layers but the output head. Experts and routers are no linear layers."""
    return tuple(tensor for tensor in facts.tensors if _is_linear(tensor))


def quantised_weights(facts: ModelFacts, quantization: QuantizationPlan) -> set[str]:
    """The names of the weights that bitsandbytes quantises: of linear layers, but those to be skipped."""
    skipped = quantization.llm_int8_skip_modules
    return {
        tensor.name
        for tensor in linear_weights(facts)
        if not any(f".{name}." in f".{tensor.name}" for name in skipped)
    }


def quantised_bytes(weight: Tensor, quantization: QuantizationPlan) -> tuple[int, int]:
    """Bytes of one quantised matrix: (codes, scales and code book). 8 bit has one fp32 scale a row."""
    if quantization.load_in_8bit:
        return weight.numel, 4 * weight.shape[0]
    return nf4_bytes(weight.numel, double_quant=quantization.bnb_4bit_use_double_quant)


def nf4_bytes(numel: int, *, double_quant: bool) -> tuple[int, int]:
    """Bytes of one quantised matrix: (packed weights, scales and code book)."""
    blocks = -(-numel // 64)
    scales = blocks + 4 * -(-blocks // 256) + 4 + 1024 if double_quant else 4 * blocks
    return -(-numel // 2), scales + 64


def _is_linear(tensor: Tensor) -> bool:
    parts = tensor.name.split(".")
    if len(tensor.shape) != 2 or parts[-1] != "weight" or len(parts) < 2:
        return False
    return parts[-2] not in _NOT_LINEAR and not (parts[-2] == "gate" and parts[-3] == "mlp")


def _matches(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _trained(
    facts: ModelFacts, linear: set[str], r: int, targets: Sequence[str], dora: bool, saved: Sequence[str]
) -> Iterator[Tensor]:
    for tensor in facts.tensors:
        module = tensor.name.rsplit(".", 1)[0]
        if any(_matches(module, name) or f".{name}." in f".{module}." for name in saved):
            yield Tensor(f"{module}.modules_to_save.{tensor.name.rsplit('.', 1)[-1]}", tensor.shape)
        elif tensor.name in linear and any(t == ALL_LINEAR or _matches(module, t) for t in targets):
            out, into = tensor.shape[::-1] if module.rsplit(".", 1)[-1] in _CONV1D else tensor.shape
            yield Tensor(f"{module}.lora_A.weight", (r, into))
            yield Tensor(f"{module}.lora_B.weight", (out, r))
            if dora:
                yield Tensor(f"{module}.lora_magnitude_vector.weight", (out,))


def _fail(target: str, candidates: list[str]) -> None:
    near = difflib.get_close_matches(target, candidates, n=1)
    raise ConfigError(
        f"{target!r} matches no layer of the model; it has {', '.join(candidates)}",
        hint=f"did you mean {near[0]}?" if near else f"give names of this model, or {ALL_LINEAR}",
    )
