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
from dslaunch.core.module_patterns import ALL_LINEAR
from dslaunch.core.plan import QuantizationPlan

_NOT_LINEAR = ("embed_tokens", "wte", "wpe", "embed_in", "lm_head", "score")
_CONV1D = ("c_attn", "c_proj", "c_fc")  # GPT-2: the weight is [in, out]


def adapter_tensors(
    facts: ModelFacts,
    *,
    r: int,
    target_modules: Sequence[str] = (ALL_LINEAR,),
    dora: bool = False,
    modules_to_save: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """What an adapter trains, in the order of ``model.parameters()``; without rows of tokens.

    Raises ConfigError where a name in ``target_modules`` matches no layer.
    """
    for _, error in name_problems(facts, target_modules, modules_to_save):
        raise error
    linear = {tensor.name for tensor in linear_weights(facts)}
    return tuple(_trained(facts, linear, r, target_modules, dora, modules_to_save))


def name_problems(
    facts: ModelFacts, target_modules: Sequence[str], modules_to_save: Sequence[str] = ()
) -> list[tuple[str, ConfigError]]:
    """(run-file key, error) for each name that matches no layer, with the nearest that there is."""
    modules = [*(tensor.name.rsplit(".", 1)[0] for tensor in facts.tensors), *tied_head(facts)]
    named = {"adapter.target_modules": target_modules, "adapter.modules_to_save": modules_to_save}
    found = []
    for key, names in named.items():
        for index, name in enumerate(names):
            if name != ALL_LINEAR and not any(_matches(module, name) for module in modules):
                has = {tensor.name.split(".")[-2] for tensor in linear_weights(facts)}
                found.append((f"{key}[{index}]", _no_match(key, name, sorted(has))))
    return found


def tied_head(facts: ModelFacts) -> tuple[str, ...]:
    """The output head where it has no tensor of its own."""
    return ("embed_out" if facts.dims.family == "gpt_neox" else "lm_head",) if facts.tied else ()


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
    for head in tied_head(facts):
        if head in saved:  # peft copies the module, and the copy is tied to nothing
            yield Tensor(f"{head}.modules_to_save.weight", (facts.dims.vocab, facts.dims.hidden))


def _no_match(key: str, target: str, candidates: list[str]) -> ConfigError:
    near = difflib.get_close_matches(target, [*candidates, "lm_head", "embed_tokens"], n=1)
    return ConfigError(
        f"{key}: {target!r} matches no layer of the model; it has {', '.join(candidates)}",
        hint=f"did you mean {near[0]}?" if near else f"give names of this model, or {ALL_LINEAR}",
    )
