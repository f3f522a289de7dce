"""RunPlan: a run with everything resolved, and its JSON round trip.

Made by ``dslaunch.config.resolve``; read by the launcher (``plan.launch``) and
by each rank (``python -m dslaunch.train.worker --plan RUN_DIR/plan.json``).
No field holds ``auto``. ``origins`` says for each key path why it has its value.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from dslaunch.core.errors import ConfigError
from dslaunch.core.topology import Host, Topology

SCHEMA_VERSION = 1

Precision = Literal["bf16", "fp16", "fp32"]
EngineKind = Literal["deepspeed", "torch"]
IMAGE_RUNTIMES = ("apptainer", "pyxis")  # make a container of an image; the others enter one that runs
Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]
Via = Literal["local", "ssh", "slurm", "openmpi", "mpich", "pdsh"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Why a value is what it is, and where it was written.

    ``source`` is ``default``, ``FILE:LINE``, ``--flag`` or ``derived``.
    """

    reason: str
    source: str


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """The frozen weights as bitsandbytes keeps them, in transformers' words; exactly one of the two is True.

    They are computed with in the precision of the run. ``bnb_4bit_*`` mean nothing for 8 bit, and
    ``llm_int8_threshold`` nothing for 4.
    """

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_use_double_quant: bool = True
    bnb_4bit_quant_storage: Literal["uint8", "bfloat16", "float16", "float32"] = "uint8"
    llm_int8_threshold: float = 6.0
    llm_int8_skip_modules: tuple[str, ...] = ()  # besides the output head, which never is

    def __post_init__(self) -> None:
        assert self.load_in_4bit != self.load_in_8bit

    def __str__(self) -> str:
        if self.load_in_8bit:
            return "int8"
        return self.bnb_4bit_quant_type + (
            " with double quantisation" if self.bnb_4bit_use_double_quant else ""
        )


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """Which model, and how to load it. ``path``: hub id, absolute directory or .gguf file."""

    path: str
    kind: Literal["hub", "directory", "gguf"]
    revision: str | None = None
    tokenizer: str | None = None  # hub id or directory; None: the model's own
    chat_template: str | None = None  # absolute path of a Jinja file; None: the tokenizer's own
    trust_remote_code: bool = False
    allow_pickle: bool = False
    attn_implementation: Attention = "sdpa"
    gradient_checkpointing: bool = False
    quantization_config: QuantizationPlan | None = None
    new_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One file (JSONL, JSON, parquet), ``datasets`` directory or hub id."""

    path: str
    kind: Literal["file", "directory", "hub"]
    split: str = "train"
    weight: float | None = None  # share of the mix; None on all sources: each sample once
    format: Literal["auto", "messages", "conversations", "instruction", "prompt_completion", "text"] = "auto"


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """What is trained and evaluated on. ``max_length`` is in tokens."""

    train: tuple[DataSource, ...]
    eval: tuple[DataSource, ...] = ()
    max_length: int = 1024
    packing: bool = False
    max_dropped_fraction: float = 0.05
    shuffle: bool = True
    cache_dir: str | None = None  # absolute; None: $DSLAUNCH_CACHE/tokens


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """A LoRA or DoRA adapter, in peft's words."""

    type: Literal["lora", "dora"]
    r: int
    lora_alpha: float
    lora_dropout: float
    target_modules: tuple[str, ...]  # ("all-linear",) for every linear layer but the head
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[int, ...] = ()  # rows of the embedding; those of new tokens besides


@dataclass(frozen=True, kw_only=True)
class Fp16Plan:
    """The fp16 block. ``loss_scale`` "dynamic" is DeepSpeed's 0; a number is static."""

    loss_scale: float | Literal["dynamic"] = "dynamic"
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1


@dataclass(frozen=True, kw_only=True)
class ParamGroupPlan:
    """Parameters whose names match one of the patterns, and what is theirs alone. None: as all others."""

    match: tuple[str, ...]
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """``params`` (lr, betas, ...) as DeepSpeed's JSON takes them, or else the constructor of ``type``.

    ``made_by`` dslaunch: the JSON has no optimizer, the worker hands one over.
    ``no_decay`` None: tensors of fewer than two dimensions.
    """

    type: str
    lr: float
    params: Mapping[str, Any]
    made_by: Literal["deepspeed", "dslaunch"] = "deepspeed"
    no_decay: tuple[str, ...] | None = None
    loraplus_lr_ratio: float | None = None
    groups: tuple[ParamGroupPlan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SchedulerPlan:
    """The learning rate over optimizer steps. Skipped steps do not advance it.

    Warm-up goes from ``warmup_steps`` or ``warmup_ratio`` of all steps; the
    rate falls towards ``min_lr_ratio`` x lr, which it would have in the step after
    the last, so that no step is taken at rate 0: from the warm-up on (linear, cosine), or in
    the last ``decay_steps``, or ``decay_ratio`` of all steps, alone (wsd: warm-up, stable, decay).
    """

    type: Literal["constant", "linear", "cosine", "wsd"]
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    min_lr_ratio: float = 0.0
    decay_steps: int | None = None
    decay_ratio: float | None = None
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "linear"


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """train_batch_size == micro x accumulation x world_size, always exactly."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    world_size: int

    def __post_init__(self) -> None:
        assert self.train_batch_size == (
            self.train_micro_batch_size_per_gpu * self.gradient_accumulation_steps * self.world_size
        )


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """What the run writes and how often, in optimizer steps. None: never, or (save) only at the end."""

    save_steps: int | None = None
    eval_steps: int | None = None
    logging_steps: int = 1
    save_total_limit: int | None = None
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ContainerPlan:
    """Where agent and ranks run on each host. ``args`` go to the runtime's exec (pyxis: to srun)."""

    runtime: Literal["apptainer", "docker", "podman", "pyxis"]
    image: str | None = None  # apptainer, pyxis: absolute path of a file or a directory, or a URI
    name: str | None = None  # docker, podman: of a container that runs on each host
    args: tuple[str, ...] = ()


def is_image_file(runtime: str, image: str) -> bool:
    """Whether an image is a file or directory here, and not the name of one elsewhere."""
    if runtime == "pyxis":  # as enroot tells them apart
        return image.startswith(("/", "./", "../")) or image.endswith((".sqsh", ".squashfs"))
    return "://" not in image


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """All that starting ranks takes; ``launch -- COMMAND`` needs nothing else.

    ``argv`` is what each rank runs, byte for byte. ``env`` is added to the
    launcher's environment; ``secret_env`` names variables that are passed on
    by value at start and never written down.
    """

    argv: tuple[str, ...]
    topology: Topology
    run_dir: str  # absolute
    cwd: str  # absolute
    via: Via = "local"
    container: ContainerPlan | None = None
    device_type: Literal["cpu", "cuda"] = "cpu"
    master_addr: str | None = None  # None: 127.0.0.1 on one host, else found by host 0
    master_port: int | None = None  # None: a free port is found at start
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: tuple[str, ...] = ()
    failure_grace_s: float = 5.0
    checkpoint_grace_s: float = 120.0
    host_timeout_s: float = 30.0  # of silence, after which a host counts as lost
    ddp_timeout_s: float = 1800.0  # of our own worker's process group
    max_restarts: int = 0
    local_rank_arg: str | None = None  # a last word for each rank, NAME=its local rank, where asked for
    devices: tuple[str, ...] = ()  # names of the GPUs that it was planned for, where that is known
    spare_hosts: tuple[Host, ...] = ()  # of the hostfile, beyond num_nodes: for hosts that fail again


@dataclass(frozen=True, kw_only=True)
class WatchPlan:
    """When a run is stopped because it gets nowhere."""

    max_skipped_in_a_row: int = 50
    max_nonfinite_losses_in_a_row: int = 1
    max_unchanged_in_a_row: int = 5
    saw_tooth_falls: int = 2  # of the scale after a growth, until they are called normal
    saw_tooth_max_skipped_fraction: float = 0.1  # of all steps since the descent, up to which they are
    on_nonfinite: Literal["stop", "trace"] = "stop"
    detect_anomaly: bool = False  # ask autograd as well, when tracing


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything a training run needs, resolved."""

    name: str
    task: Literal["sft"]
    seed: int
    model: ModelPlan
    data: DataPlan
    adapter: AdapterPlan | None
    precision: Precision
    fp16: Fp16Plan | None  # set when precision is fp16
    zero_stage: Literal[0, 1, 2, 3]
    gradient_clipping: float  # 0: no clipping
    optimizer: OptimizerPlan
    scheduler: SchedulerPlan
    batch: BatchPlan
    num_train_epochs: float | None  # exactly one of the two is set
    max_steps: int | None
    output: OutputPlan
    launch: LaunchPlan
    ds_config: Mapping[str, Any]  # the DeepSpeed JSON, as rendered; empty with engine torch
    origins: Mapping[str, Origin]
    engine: EngineKind = "deepspeed"
    torch_autocast: tuple[str, ...] | None = None  # on where not None: lower_precision_safe_modules
    watch: WatchPlan = field(default_factory=WatchPlan)
    allow_emulated_fp16: bool = False  # on CPUs without instructions for it
    allow_untested_deepspeed: str | None = None
    fp32_modules: tuple[str, ...] = ()  # patterns of modules that stay in fp32 under bf16 and fp16
    neftune_noise_alpha: float | None = None
    deepspeed_template: str | None = None  # absolute path of the user's own that it is rendered from
    schema_version: int = SCHEMA_VERSION

    @property
    def trained_in_fp32(self) -> bool:
        """Whether the trained weights are fp32 and autocast computes in ``precision``."""
        return self.engine == "torch" or self.torch_autocast is not None


T = TypeVar("T")


def to_json(plan: Any) -> dict[str, Any]:
    """A plan (any of the dataclasses here) as plain JSON values."""
    value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan), allow_nan=False))
    return value


def from_json(kind: type[T], value: Any, where: str = "plan") -> T:
    """The inverse of :func:`to_json`.

    Raises ConfigError, naming the key path, where a key is unknown or missing
    or a value has another type: a plan.json of another version, or edited.
    """
    result: T = _decode(kind, value, where)
    return result


def load_run_plan(path: Path) -> RunPlan:
    """Read plan.json. Raises ConfigError where it is missing or no plan of this version."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no plan at {path}", hint="give the plan.json of a run directory") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version is {version!r}, this dslaunch reads {SCHEMA_VERSION}",
            hint="start the run again with this version of dslaunch",
        )
    return from_json(RunPlan, value, str(path))


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(kind), value, where)
    if origin is Literal:
        _expect(value in typing.get_args(kind), kind, value, where)
        return value
    if origin is tuple:
        _expect(isinstance(value, list), kind, value, where)
        item = typing.get_args(kind)[0]
        return tuple(_decode(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(value, dict), kind, value, where)
        item = typing.get_args(kind)[1]
        return {k: _decode(item, v, f"{where}.{k}") for k, v in value.items()}
    if kind is float:
        _expect(isinstance(value, (int, float)) and not isinstance(value, bool), kind, value, where)
        return float(value)
    _expect(type(value) is kind, kind, value, where)
    return value


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), kind, value, where)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise ConfigError(f"{where}.{key}: unknown key in a saved plan")
    for name, spec in fields.items():
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise ConfigError(f"{where}.{name}: missing in a saved plan")
    return kind(**{k: _decode(hints[k], v, f"{where}.{k}") for k, v in value.items()})


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    last: ConfigError | None = None
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return _decode(kind, value, where)
        except ConfigError as error:
            last = error
    assert last is not None
    raise last


def _expect(holds: bool, kind: Any, value: Any, where: str) -> None:
    if not holds:
        name = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{where}: expected {name}, found {value!r}")
