"""The run file's ``optimizer`` section."""

from typing import Literal, get_args

from pydantic import Field

from dslaunch.config.spec_parts import (
    Beta,
    Epsilon,
    Names,
    PositiveInt,
    Rate,
    Section,
    Weight,
)

OptimizerType = Literal[
    "AdamW", "Adam", "SGD", "Lion", "AdEMAMix", "Adafactor", "Muon", "AdamW8bit", "PagedAdamW8bit"
]
OPTIMIZER_TYPES: tuple[str, ...] = get_args(OptimizerType)


class OptimizerParamsSpec(Section):
    """What the optimizer takes besides the learning rate."""

    betas: tuple[Beta, ...] | None = Field(
        None, description="Decay of the running averages: two numbers, of AdEMAMix three."
    )
    eps: Epsilon | None = Field(
        None, description="Added to the denominator (AdamW, Adam, AdEMAMix, Muon, 8 bit)."
    )
    weight_decay: Weight | None = Field(
        None, description="Weight decay. Norms and biases are left out of it: see `optimizer.no_decay`."
    )
    momentum: Beta | None = Field(None, description="Momentum (SGD, Muon).")
    dampening: Weight | None = Field(None, description="Dampening of the momentum (SGD).")
    nesterov: bool | None = Field(None, description="Nesterov momentum (SGD).")
    alpha: Weight | None = Field(None, description="Weight of the slow average (AdEMAMix).")
    t_alpha: PositiveInt | None = Field(
        None, description="Steps in which alpha grows to its value (AdEMAMix)."
    )
    t_beta3: PositiveInt | None = Field(
        None, description="Steps in which beta3 grows to its value (AdEMAMix)."
    )
    beta2_decay: float | None = Field(
        None, lt=0, description="Power of the step by which the average lengthens (Adafactor)."
    )
    d: Rate | None = Field(None, description="Largest root mean square of an update (Adafactor).")
    adam_lr: Rate | None = Field(
        None, description="Rate of what Muon leaves to AdamW: embeddings, head, norms, biases. Default: lr."
    )
    torch_adam: bool | None = Field(
        None, description="PyTorch's Adam in place of DeepSpeed's compiled one (the default on CPUs)."
    )


class ParamGroupSpec(Section):
    """Parameters with settings of their own."""

    match: Names = Field(
        min_length=1, description="Patterns of parameter names, such as `lm_head.*` or `*.lora_B.*`."
    )
    lr: Rate | None = Field(None, description="Peak learning rate of these. Default: `optimizer.lr`.")
    weight_decay: Weight | None = Field(None, description="Weight decay of these.")


class OptimizerSpec(Section):
    """The optimizer. What runs at which stage, and with what: docs/optimizers.md."""

    type: OptimizerType = Field(
        "AdamW", description="Its name in DeepSpeed, torch or bitsandbytes (docs/optimizers.md)."
    )
    lr: Rate | None = Field(
        None,
        description="Peak learning rate. Default: 2e-4 with an adapter, 2e-5 without; a tenth of that for"
        " Lion; none for Adafactor and Muon, whose rates have another meaning.",
    )
    params: OptimizerParamsSpec = Field(
        default_factory=dict, validate_default=True, description="What it takes besides."
    )
    no_decay: Names | None = Field(
        None,
        description="Patterns of parameter names that weight decay leaves out. Default: norms and biases,"
        " which is every tensor of fewer than two dimensions. `[]`: it leaves nothing out.",
    )
    loraplus_lr_ratio: Rate | None = Field(
        None, description="LoRA+: the B matrices of the adapter learn at lr times this."
    )
    groups: tuple[ParamGroupSpec, ...] = Field(
        (), description="Parameters with a rate or decay of their own. Each parameter: its first match."
    )
