"""The part of the run file that the DeepSpeed JSON is made from.

``EngineSpec`` is all that ``dslaunch gen-config`` needs; the whole run file
(``dslaunch.config.spec.RunSpec``) adds model, data and what to do with them.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from dslaunch.config.spec_optimizer import OptimizerSpec
from dslaunch.config.spec_parts import (
    DeviceAsMapping,
    Names,
    NamesByHost,
    NonNegativeFloat,
    NonNegativeInt,
    PathAsMapping,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
)


class QuantizationSpec(Section):
    """Frozen weights in 4 or 8 bit by bitsandbytes, under an adapter (QLoRA). The names are transformers'.

    What is computed with them is in the run's `precision`; embeddings, norms and the output head stay
    in it, too. See docs/adapters.md.
    """

    load_in_4bit: bool = Field(False, description="4 bit for each weight.")
    load_in_8bit: bool = Field(False, description="8 bit for each weight (LLM.int8). Not at stage 3.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None = Field(
        None, description="The 16 values that 4 bits stand for. Default: nf4."
    )
    bnb_4bit_use_double_quant: bool | None = Field(
        None, description="Quantise the scales of the blocks, too: 0.4 bit less a weight. Default: true."
    )
    bnb_4bit_quant_storage: Literal["uint8", "bfloat16", "float16", "float32"] | None = Field(
        None,
        description="Type of the tensors that 4-bit weights are packed in. Default: at stage 3 the precision,"
        " else uint8.",
    )
    llm_int8_threshold: NonNegativeFloat | None = Field(
        None, description="Inputs above it are multiplied in 16 bit (8 bit on GPUs). Default: 6."
    )
    llm_int8_skip_modules: Names = Field(
        (), description="Modules that are not quantised, besides the output head; for 4 bit, too."
    )


class ModelSpec(Section):
    """The model to train. A plain string means ``path``."""

    path: Text = Field(description="Hub id, directory or `.gguf` file.")
    revision: Text | None = Field(None, description="Branch, tag or commit on the hub.")
    tokenizer: Text | None = Field(None, description="Hub id or directory of another tokenizer.")
    chat_template: Text | None = Field(None, description="Jinja file to use in place of the tokenizer's own.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    allow_pickle: bool = Field(False, description="Load weights that need unpickling (`.bin`, `.pt`).")
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="Attention backend of transformers; `auto` chooses and says why."
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        False,
        description="Recompute activations in the backward pass: less memory, about 1/3 more time. `auto`:"
        " where the memory plan needs it.",
    )
    new_tokens: Names = Field(
        (),
        description="Special tokens to add: tokenizer, embedding, head and config grow together. Their rows"
        " begin at the mean of the others and are trained, under an adapter they alone.",
    )
    quantization_config: QuantizationSpec | None = Field(
        None, description="Keep the frozen weights in 4 or 8 bit, for adapters."
    )


class Fp16Spec(Section):
    """Loss scaling, used when precision is fp16. The names and meanings are DeepSpeed's."""

    loss_scale: Annotated[float, Field(gt=1)] | Literal["dynamic"] = Field(
        "dynamic", description="`dynamic`, or one fixed number above 1."
    )
    initial_scale_power: NonNegativeInt = Field(
        16, le=32, description="The dynamic scale starts at 2 to this power."
    )
    loss_scale_window: PositiveInt = Field(
        1000,
        description="The scale doubles after every so many steps without overflow (first one later).",
    )
    hysteresis: PositiveInt = Field(
        2, description="The scale is halved from this overflow on; the ones before it are let pass."
    )
    consecutive_hysteresis: bool = Field(
        False, description="Refill the hysteresis at every step without overflow."
    )
    min_loss_scale: PositiveInt = Field(1, description="The scale never falls below this.")


class OffloadSpec(Section):
    """Where a part of the training state is kept off the device. A plain string means ``device``."""

    device: Literal["auto", "cpu", "nvme"] = Field(
        description="`cpu` memory, an `nvme` disk, or `auto`: `cpu` where the memory plan needs it."
    )
    nvme_path: Text | None = Field(None, description="Directory on the local disk, for `nvme`.")
    pin_memory: bool = Field(False, description="Page-locked memory: faster copies, not swappable.")


Offload = Annotated[OffloadSpec | None, DeviceAsMapping]


class ZeroSpec(Section):
    """DeepSpeed's block of the same name. A key that the chosen stage ignores is an error."""

    stage: Literal["auto", 0, 1, 2, 3] = Field(
        2,
        description="0: nothing is sharded; 1: optimizer states; 2: and gradients; 3: and parameters."
        " `auto`: the lowest that fits by the memory plan.",
    )
    overlap_comm: bool | None = Field(None, description="Reduce gradients during the backward pass.")
    contiguous_gradients: bool | None = Field(None, description="Copy gradients to one contiguous buffer.")
    reduce_scatter: bool | None = Field(None, description="Reduce-scatter in place of all-reduce.")
    reduce_bucket_size: PositiveInt | None = Field(None, description="Elements reduced at once.")
    allgather_bucket_size: Annotated[int, Field(gt=0, multiple_of=2)] | None = Field(
        None, description="Elements gathered at once; DeepSpeed takes an even number alone."
    )
    round_robin_gradients: bool | None = Field(None, description="Spread gradient copies over the ranks.")
    sub_group_size: PositiveInt | None = Field(None, description="Elements updated at once by the optimizer.")
    stage3_prefetch_bucket_size: NonNegativeInt | None = Field(
        None, description="Elements of parameters fetched ahead of use."
    )
    stage3_param_persistence_threshold: NonNegativeInt | None = Field(
        None, description="Parameters of fewer elements are not sharded."
    )
    stage3_max_live_parameters: NonNegativeInt | None = Field(
        None, description="Gathered elements at which prefetching pauses."
    )
    stage3_max_reuse_distance: NonNegativeInt | None = Field(
        None, description="A parameter used again within so many elements stays gathered."
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = Field(
        None, description="Let `save_16bit_model` write the whole model (on by default at stage 3)."
    )
    offload_optimizer: Offload = Field(None, description="Keep optimizer states off the device.")
    offload_param: Offload = Field(None, description="Keep parameters off the device.")


class ClusterSpec(Section):
    """Which machines and devices. One rank runs on each slot."""

    hostfile: Text | None = Field(
        None, description="DeepSpeed hostfile. Without one: the hosts of the batch job, else this machine."
    )
    include: Text | None = Field(None, description="Hosts and slots to use: `a@b:0,2`.")
    exclude: Text | None = Field(None, description="Hosts and slots to leave out: `a@b:0,2`.")
    num_nodes: PositiveInt | None = Field(None, description="Number of nodes (the first of the hostfile).")
    num_gpus_per_node: PositiveInt | None = Field(None, description="Ranks on each node.")
    gpu: NamesByHost | None = Field(
        None,
        description="Device of the nodes, such as `a100` or `cpu`. Where nodes differ: a list, or a mapping"
        " of host patterns (`node-[1-4]`, `a100-*`) to devices, of which the first that fits counts.",
    )
    inventory: Text | None = Field(
        None,
        description="JSON file with what each host has, in place of `gpu`: what"
        " `dslaunch doctor --json` prints.",
    )
    host_memory_gib: PositiveFloat | None = Field(
        None, description="RAM of each host that a job may use, where that is not this machine's; for `plan`."
    )
    master_addr: Text | None = Field(None, description="Address on which the ranks meet.")
    master_port: Port | None = Field(None, description="Port on which they meet. Default: a free one.")


class TorchAutocastSpec(Section):
    """DeepSpeed's block of the same name: weights stay fp32, forward computes in bf16 by autocast."""

    enabled: bool = Field(False, description="Compute in precision bf16 with fp32 weights.")
    lower_precision_safe_modules: Names = Field(
        (),
        description="Classes (`torch.nn.Linear`) whose weights and gradients may be sent in bf16 too."
        " Default: DeepSpeed's, linear and convolution layers.",
    )


class EngineSpec(Section):
    """What the DeepSpeed JSON is made from."""

    model: Annotated[ModelSpec | None, PathAsMapping] = Field(None, description="The model to train.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="`auto` chooses for the weakest device of all hosts and says why."
    )
    fp16: Fp16Spec = Field(
        default_factory=dict, validate_default=True, description="Loss scaling for precision fp16."
    )
    torch_autocast: TorchAutocastSpec = Field(
        default_factory=dict, validate_default=True, description="bf16 by autocast, with fp32 weights."
    )
    zero_optimization: ZeroSpec = Field(
        default_factory=dict, validate_default=True, description="ZeRO sharding."
    )
    gradient_clipping: NonNegativeFloat = Field(
        1.0, description="Largest global gradient norm; larger ones are scaled down. 0: no clipping."
    )
    optimizer: OptimizerSpec = Field(
        default_factory=dict, validate_default=True, description="The optimizer."
    )
    train_batch_size: PositiveInt | None = Field(
        None,
        description="Samples of one optimizer step over all ranks (with data.packing: rows, each of several"
        " samples). Give it alone, or two of the three sizes:"
        " train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, exactly.",
    )
    train_micro_batch_size_per_gpu: PositiveInt | None = Field(
        None, description="Samples in one forward pass of one rank."
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        None, description="Forward and backward passes of one optimizer step."
    )
    cluster: ClusterSpec = Field(
        default_factory=dict, validate_default=True, description="Machines and devices."
    )
    deepspeed_template: Text | None = Field(
        None,
        description="Jinja file to render the DeepSpeed JSON from in place of dslaunch's own"
        " (`dslaunch template copy deepspeed/ds_config.json.j2`). It must say what the run file says.",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="Further keys of the DeepSpeed JSON, merged last. What the run file decides is refused,"
        " and so is what `dslaunch check` calls an error or a warning.",
    )
