"""The table of planted faults: what is planted, at which stage and precision, and what must be named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.train.replay import planted
from tests.train.replay.planted import TRIGGER, PlantedLM, make_corpus, spoil, tiny_llama

OWN = "its weight"  # the parameter of the module that is named
NUM_SAMPLES = 8  # two micro-batches of two rows on each of two ranks: rank 1 has 2, 3 and then 6, 7


@dataclass(frozen=True)
class Plant:
    """``triggers``: the samples that set it off. ``names``: what the first finding must say."""

    build: Callable[[], torch.nn.Module]
    stage: int
    precision: str
    names: dict[str, Any]
    triggers: Sequence[int] = (6,)
    packing: bool = False
    loss_scale: float = 1.0
    engine: str = "deepspeed"
    fp32_modules: Sequence[str] = ()
    also: Sequence[tuple[int, int]] = field(default=())  # (rank, micro-batch) of further findings

    @property
    def num_samples(self) -> int:
        return 3 * NUM_SAMPLES if self.packing else NUM_SAMPLES


def names(
    phase: str,
    module: str,
    parameter: str | None = None,
    *,
    cause: str,
    rank: int = 1,
    micro: int = 1,
    samples: Sequence[int] = (6,),
    together: bool = False,
    reaches: str | None = None,
) -> dict[str, Any]:
    """``samples`` "any": it breaks with none of them as well. ``reaches``: of a fault outside of all
    modules, the first parameter whose gradient it breaks."""
    parameter = f"{module}.weight" if parameter == OWN else parameter
    return {
        "phase": phase, "module": module, "parameter": parameter, "cause": cause, "rank": rank,
        "micro_batch": micro, "samples": samples if samples == "any" else list(samples),
        "together": together, **({} if reaches is None else {"reaches": reaches}),
    }  # fmt: skip


def everywhere(phase: str, module: str, parameter: str | None = None, *, cause: str) -> dict[str, Any]:
    return names(phase, module, parameter, cause=cause, rank=0, micro=0, samples="any")


def spoilt(name: str, at: Any, value: float, **filled: float) -> Callable[[], torch.nn.Module]:
    """A Llama with entries of one parameter set; ``filled``: modules of layer 0's MLP made of one number.

    With those all tokens look alike, so that what is too large is so everywhere.
    """

    def build() -> torch.nn.Module:
        model = tiny_llama()
        for module, number in filled.items():
            spoil(model, f"{LAYER_0}.mlp.{module}.weight", slice(None), number)
            spoil(model, f"{EMBED}.weight", slice(None), 1.0)
        spoil(model, name, at, value)
        return model

    return build


def tied() -> torch.nn.Module:
    """The output head is the embedding, in which one row is inf: every logit of that token is."""
    model = tiny_llama(tie_word_embeddings=True)
    spoil(model, f"{EMBED}.weight", (TRIGGER, 3), torch.inf)
    return model


def checkpointed(build: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    def wrapped() -> torch.nn.Module:
        model: Any = build()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    return wrapped


def lora(part: str, value: float) -> Callable[[], torch.nn.Module]:
    """Only the adapter is trained. ``part`` of the first layer's q_proj is filled with ``value``."""

    def build() -> torch.nn.Module:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(tiny_llama(), config, autocast_adapter_dtype=False)
        spoil(model, f"{LORA_Q}.{part}.default.weight", slice(None), value)
        return model

    return build


def zero_norm() -> torch.nn.Module:
    """RMSNorm with eps 0 and a token whose embedding is 0: 0 / 0."""
    model = tiny_llama(rms_norm_eps=0.0)
    spoil(model, "model.embed_tokens.weight", TRIGGER, 0.0)
    return model


def planted_lm(plant: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    return lambda: PlantedLM(plant())


def in_fp32_too_large() -> torch.nn.Module:
    """Logits of +-3e38 are finite; their difference, the loss, is not."""
    model = PlantedLM()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[:2, 0] = torch.tensor([3e37, -3e37])
    return model


LORA_Q = "base_model.model.model.layers.0.self_attn.q_proj"
LAYER_0, LAYER_1 = "model.layers.0", "model.layers.1"
UP, DOWN = f"{LAYER_0}.mlp.up_proj", f"{LAYER_1}.mlp.down_proj"
EMBED = "model.embed_tokens"
PLANT = "blocks.1.plant"
# A sample in the middle of a row of three: row 0 of rank 1's second micro-batch.
PACKED = int(make_corpus(3 * NUM_SAMPLES, (), packing=True).packs[6][1])

PLANTS: dict[str, Plant] = {
    # Weights that are broken already.
    "nan weight, stage 0 fp32": Plant(
        spoilt(f"{DOWN}.weight", (3, 5), torch.nan), 0, "fp32",
        everywhere("forward", DOWN, OWN, cause="weights"), also=[(1, 0)],
    ),
    "nan weight, stage 3 bf16": Plant(
        spoilt(f"{DOWN}.weight", (3, 5), torch.nan), 3, "bf16",
        everywhere("forward", DOWN, OWN, cause="weights"), also=[(1, 0)],
    ),
    "nan weight under checkpointing, stage 2 bf16": Plant(
        checkpointed(spoilt(f"{UP}.weight", (0, 0), torch.nan)), 2, "bf16",
        everywhere("forward", UP, OWN, cause="weights"), also=[(1, 0)],
    ),
    "inf in an embedding row, stage 2 bf16": Plant(
        spoilt(f"{EMBED}.weight", (TRIGGER, 3), torch.inf), 2, "bf16",
        names("forward", EMBED, OWN, cause="weights"),
    ),
    "inf in an embedding row, stage 3 fp32": Plant(
        spoilt(f"{EMBED}.weight", (TRIGGER, 3), torch.inf), 3, "fp32",
        names("forward", EMBED, OWN, cause="weights", rank=0, samples=[5]), triggers=[5],
    ),
    "inf in an embedding row, a packed sample": Plant(
        spoilt(f"{EMBED}.weight", (TRIGGER, 3), torch.inf), 2, "fp32",
        names("forward", EMBED, OWN, cause="weights", samples=[PACKED]),
        triggers=[PACKED], packing=True,
    ),
    "inf in an embedding row, two samples of a batch": Plant(
        spoilt(f"{EMBED}.weight", (TRIGGER, 3), torch.inf), 1, "bf16",
        names("forward", EMBED, OWN, cause="weights", micro=0, samples=[2, 3]),
        triggers=[2, 3],
    ),
    "inf in an embedding that is the head too, stage 3 bf16": Plant(
        tied, 3, "bf16", everywhere("forward", "lm_head", OWN, cause="weights"), also=[(1, 0)],
    ),
    "nan in LoRA A, stage 0 bf16": Plant(
        lora("lora_A", torch.nan), 0, "bf16",
        everywhere("forward", f"{LORA_Q}.lora_A.default", OWN, cause="weights"),
        also=[(1, 0)],
    ),
    # Too large for fp16, and nothing else wrong.
    "a large output projection, stage 1 fp16": Plant(
        spoilt(f"{LAYER_0}.mlp.down_proj.weight", slice(None), 6e4, gate_proj=1, up_proj=1), 1, "fp16",
        everywhere("forward", f"{LAYER_0}.mlp.down_proj", OWN, cause="overflow"), also=[(1, 0)],
    ),
    "a large product in a module's own code, stage 2 fp16": Plant(
        spoilt(f"{UP}.weight", slice(None), 100, gate_proj=50), 2, "fp16",
        everywhere("forward", f"{LAYER_0}.mlp", cause="overflow"), also=[(1, 0)],
    ),
    "LoRA B blown up, stage 2 fp16": Plant(
        lora("lora_B", 6e4), 2, "fp16",
        everywhere("forward", f"{LORA_Q}.lora_B.default", OWN, cause="overflow"), also=[(1, 0)],
    ),
    "LoRA B blown up, stage 3 fp16": Plant(
        lora("lora_B", 6e4), 3, "fp16",
        everywhere("forward", f"{LORA_Q}.lora_B.default", OWN, cause="overflow"), also=[(1, 0)],
    ),
    "a large product in a module's own code, stage 3 fp16": Plant(
        spoilt(f"{UP}.weight", slice(None), 100, gate_proj=50), 3, "fp16",
        everywhere("forward", f"{LAYER_0}.mlp", cause="unknown"), also=[(1, 0)],
    ),
    "huge logits, stage 2 fp16": Plant(
        spoilt("lm_head.weight", slice(None), 6e4), 2, "fp16",
        names("forward", "lm_head", OWN, cause="overflow", rank=0, micro=0, samples=[0, 1]), also=[(1, 0)],
    ),
    "huge logits whose loss alone is inf, stage 2 fp32": Plant(
        in_fp32_too_large, 2, "fp32", names("loss", "(the loss)", cause="computation"),
    ),
    "a norm in fp32 whose output does not fit, stage 2 fp16": Plant(
        spoilt(f"{LAYER_0}.input_layernorm.weight", slice(None), 1e6), 2, "fp16",
        everywhere("forward", f"{LAYER_0}.input_layernorm", OWN, cause="overflow"), also=[(1, 0)],
        fp32_modules=["*norm*"],
    ),
    "huge logits, engine torch fp16": Plant(
        spoilt("lm_head.weight", slice(None), 6e4), 0, "fp16",
        names("forward", "lm_head", OWN, cause="overflow", rank=0, micro=0, samples=[0, 1]), also=[(1, 0)],
        engine="torch",
    ),
    # The scale alone.
    "the gradient overflows at this scale, stage 1 fp16": Plant(
        tiny_llama, 1, "fp16", names(
            "backward", "(the loss)", cause="loss_scale", rank=0, micro=0, samples=[0, 1],
            reaches="lm_head.weight",
        ), loss_scale=2.0**24, also=[(1, 0)],
    ),
    "the gradient overflows at this scale, stage 3 fp16": Plant(
        tiny_llama, 3, "fp16", names(
            "backward", "(the loss)", cause="loss_scale", rank=0, micro=0, samples=[0, 1],
            reaches="lm_head.weight",
        ), loss_scale=2.0**24, also=[(1, 0)],
    ),
    "two samples overflow only together, stage 1 fp16": Plant(
        planted_lm(planted.LargeForWeight), 1, "fp16",
        names("backward", PLANT, OWN, cause="overflow", micro=0, samples=[2, 3], together=True),
        triggers=[2, 3],
    ),
    # What is computed is not finite.
    "log of 0, stage 2 fp32": Plant(
        planted_lm(planted.LogOfZero), 2, "fp32", names("forward", PLANT, OWN, cause="computation"),
    ),
    "log of 0, stage 3 bf16": Plant(
        planted_lm(planted.LogOfZero), 3, "bf16", names("forward", PLANT, OWN, cause="computation"),
    ),
    "0 / 0 in a norm without eps, stage 2 bf16": Plant(
        zero_norm, 2, "bf16", names("forward", f"{LAYER_0}.input_layernorm", OWN, cause="computation"),
    ),
    "0 / 0 in a norm under checkpointing, stage 3 bf16": Plant(
        checkpointed(zero_norm), 3, "bf16",
        names("forward", f"{LAYER_0}.input_layernorm", OWN, cause="computation"),
    ),
    "division by 0 in the backward, stage 2 fp32": Plant(
        planted_lm(planted.DividesInBackward), 2, "fp32", names("backward", PLANT, OWN, cause="computation"),
    ),
    "division by 0 in the backward, stage 3 fp32": Plant(
        planted_lm(planted.DividesInBackward), 3, "fp32", names("backward", PLANT, OWN, cause="computation"),
    ),
    "division by 0 in the backward, stage 0 fp32, on both ranks": Plant(
        planted_lm(planted.DividesInBackward), 0, "fp32",
        names("backward", PLANT, OWN, cause="computation", rank=1, micro=0, samples=[3]),
        triggers=[3, 4], also=[(0, 1)],
    ),
    "division by 0 in the backward, engine torch bf16": Plant(
        planted_lm(planted.DividesInBackward), 0, "bf16", names("backward", PLANT, OWN, cause="computation"),
        engine="torch",
    ),
    "root of 0 in the backward, stage 1 bf16": Plant(
        planted_lm(planted.RootOfZero), 1, "bf16", names("backward", PLANT, OWN, cause="computation"),
    ),
    "nan behind a where in the backward, stage 2 fp16": Plant(
        planted_lm(planted.HiddenByWhere), 2, "fp16", names("backward", PLANT, OWN, cause="computation"),
        loss_scale=256.0,
    ),
    "nan behind a where in the backward, stage 3 bf16": Plant(
        planted_lm(planted.HiddenByWhere), 3, "bf16",
        names("backward", PLANT, OWN, cause="computation", rank=0, micro=0, samples=[1]),
        triggers=[1],
    ),
    "root of 0 in the backward, stage 0 fp32": Plant(
        planted_lm(planted.RootOfZero), 0, "fp32",
        names("backward", PLANT, OWN, cause="computation", rank=0, samples=[4]), triggers=[4],
    ),
    "log of 0, stage 1 fp16": Plant(
        planted_lm(planted.LogOfZero), 1, "fp16",
        names("forward", PLANT, OWN, cause="computation", micro=0, samples=[3]), triggers=[3],
    ),
    "log of 0, stage 0 bf16, in both micro-batches": Plant(
        planted_lm(planted.LogOfZero), 0, "bf16",
        names("forward", PLANT, OWN, cause="computation", micro=0, samples=[2]),
        triggers=[2, 7],
    ),
}  # fmt: skip

# Those that one rank without others meets as well: its two micro-batches have samples 0 to 3.
ALONE = (
    "nan weight, stage 3 bf16",
    "LoRA B blown up, stage 2 fp16",
    "the gradient overflows at this scale, stage 1 fp16",
    "huge logits, engine torch fp16",
)

SOUND: dict[str, Plant] = {
    "nothing planted, stage 3 bf16": Plant(tiny_llama, 3, "bf16", {}),
    "an inf that nothing comes of, stage 2 fp32": Plant(planted_lm(planted.Harmless), 2, "fp32", {}),
}
