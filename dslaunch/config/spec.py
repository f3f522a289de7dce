"""RunSpec: what a user may write in a run file. docs/run-file.md is made from it."""

from typing import Annotated, Literal

from pydantic import Field

from dslaunch.config.spec_engine import EngineSpec, ModelSpec
from dslaunch.config.spec_parts import (
    Fraction,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    OneAsMany,
    PathAsMapping,
    PositiveFloat,
    PositiveInt,
    Section,
    SourcesAsTuple,
    Text,
)


class DataSourceSpec(Section):
    """One source of samples. A plain string means ``path``."""

    path: Text = Field(description="JSONL, JSON or parquet file, directory written by `datasets`, or hub id.")
    split: Text = Field("train", description="Split, for hub ids and `datasets` directories.")
    weight: PositiveFloat | None = Field(
        None, description="Share of this source in the mix. Give all sources one, or none."
    )
    format: Literal["auto", "messages", "conversations", "instruction", "prompt_completion", "text"] = Field(
        "auto", description="Shape of the records; `auto` looks at the keys."
    )


Sources = Annotated[tuple[DataSourceSpec, ...], SourcesAsTuple]


class DataSpec(Section):
    """What is trained and evaluated on."""

    train: Sources = Field(min_length=1, description="A path, a mapping, or a list of them.")
    eval: Sources = Field((), description="Held-out data, in the same form.")
    max_length: int = Field(1024, ge=2, description="Longest sequence in tokens; longer ones are cut.")
    packing: bool = Field(
        False,
        description="Several samples in one row, kept apart exactly; train_batch_size then counts rows.",
    )
    max_dropped_fraction: Fraction = Field(
        0.05,
        description="Share of samples that may lose their whole answer to `max_length`; more is an error.",
    )
    shuffle: bool = Field(True, description="A new order every epoch, from `seed`.")
    cache_dir: Text | None = Field(
        None, description="Directory of tokenised data. Default: `tokens` in the cache."
    )


class AdapterSpec(Section):
    """A low-rank adapter (peft). Without this section the whole model is trained."""

    type: Literal["lora", "dora"] = Field("lora", description="Kind of adapter.")
    r: PositiveInt = Field(16, description="Rank.")
    lora_alpha: PositiveFloat = Field(32, description="The update is scaled by lora_alpha / r.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: Names = Field(
        ("all-linear",), min_length=1, description="Module names; `all-linear` is all but the head."
    )
    use_rslora: bool = Field(False, description="Scale by lora_alpha / sqrt(r).")
    modules_to_save: Names = Field((), description="Modules to train in full besides.")
    trainable_token_indices: tuple[NonNegativeInt, ...] = Field(
        (), description="Ids of tokens whose rows of the embedding are trained besides."
    )


class SchedulerSpec(Section):
    """The learning rate over optimizer steps."""

    type: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="Shape after warm-up. `wsd`: warm-up, stable, decay."
    )
    warmup_steps: NonNegativeInt | None = Field(None, description="Steps of warm-up.")
    warmup_ratio: Fraction | None = Field(
        None, description="Warm-up as a share of all steps. Default: 0.03, unless warmup_steps is given."
    )
    min_lr_ratio: Fraction = Field(
        0.0, description="Share of lr that the rate falls to, reached right after the last step."
    )
    decay_steps: PositiveInt | None = Field(None, description="Last steps, in which the rate falls (wsd).")
    decay_ratio: Fraction | None = Field(
        None, description="The same as a share of all steps (wsd). Default: 0.1, unless decay_steps is given."
    )
    decay_type: Literal["linear", "cosine", "1-sqrt"] | None = Field(
        None, description="Shape of the fall (wsd). Default: `linear`."
    )


class ContainerSpec(Section):
    """A container on each host, in which the ranks run."""

    runtime: Literal["apptainer", "docker", "podman", "pyxis"] = Field(
        description="What runs it. `pyxis`: srun's plugin, in a Slurm job."
    )
    image: Text | None = Field(
        None,
        description="For apptainer: a .sif file, a directory, or a URI. For pyxis: a .sqsh file, or"
        " REGISTRY#IMAGE:TAG.",
    )
    name: Text | None = Field(None, description="For docker and podman: of a container that runs already.")
    args: Names = Field(
        (), description="Options for `apptainer exec`, `docker exec` or `podman exec`; for pyxis, for srun."
    )


class LaunchSpec(Section):
    """How the ranks are started."""

    via: Literal["auto", "local", "ssh", "slurm", "openmpi", "mpich", "pdsh"] = Field(
        "auto",
        description="Way to reach the hosts. `auto`: `local` where this machine is the only one, "
        "`slurm` (srun) for the nodes of a Slurm job, else `ssh`. `openmpi`: mpirun; `mpich`: mpiexec.",
    )
    container: ContainerSpec | None = Field(
        None, description="Run inside of a container; without it on the hosts themselves."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the ranks.")
    secret_env: Names = Field(
        (), description="Variables passed on by value at the start and never written to a file."
    )
    python: Text | None = Field(
        None,
        description="Interpreter of the ranks: a path, or a name for PATH. Default: the launcher's own; in a"
        " container `python3`.",
    )
    cwd: Text | None = Field(None, description="Working directory of the ranks. Default: the launcher's.")
    failure_grace_s: NonNegativeFloat = Field(
        5.0, description="Seconds from TERM to KILL for the others when a rank has failed."
    )
    checkpoint_grace_s: NonNegativeFloat = Field(
        120.0, description="Seconds that a cancelled run has to save a checkpoint."
    )
    ddp_timeout_s: PositiveFloat = Field(
        1800.0, description="Seconds that a rank waits in a collective for the others, and at the start."
    )
    max_restarts: NonNegativeInt = Field(
        0, description="Starts that may follow a failed rank or a lost host, each from the last checkpoint."
    )
    host_timeout_s: PositiveFloat = Field(
        30.0, description="Seconds of silence after which another host counts as lost."
    )


class CommandSpec(Section):
    """What ``--set`` may say where there is no run file; of ``launch`` the keys without a flag alone."""

    launch: LaunchSpec = Field(default_factory=dict, validate_default=True)


class OutputSpec(Section):
    """What is written, and how often. Counts are optimizer steps."""

    run_dir: Text | None = Field(
        None, description="Run directory. Default: runs/<name>-<time> under $DSLAUNCH_RUNS or here."
    )
    save_steps: PositiveInt | None = Field(
        None, description="Checkpoint every so many steps; always at the end."
    )
    eval_steps: PositiveInt | None = Field(
        None, description="Evaluate every so many steps; always at the end."
    )
    logging_steps: PositiveInt = Field(1, description="Log every so many steps.")
    save_total_limit: PositiveInt | None = Field(None, description="Checkpoints kept. Default: all.")
    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], OneAsMany] = Field(
        (), description="Services that must get the metrics; metrics.jsonl is always written."
    )


class WatchSpec(Section):
    """When a run is stopped because it gets nowhere (exit code 76), and when something is said."""

    max_skipped_in_a_row: PositiveInt = Field(
        50,
        description="Steps skipped one after the other, for overflow or a gradient that is not finite."
        " The descent of a dynamic loss scale at the start takes about initial_scale_power of them.",
    )
    max_nonfinite_losses_in_a_row: PositiveInt = Field(
        1,
        description="Steps with loss inf or nan, one after the other. They change no weight: with 2 a rare"
        " sample that does it is let pass.",
    )
    max_unchanged_in_a_row: PositiveInt = Field(
        5,
        ge=2,
        description="Steps one after the other with loss exactly 0, or with the very same gradient norm,"
        " after which a warning is written.",
    )
    saw_tooth_falls: PositiveInt = Field(
        2,
        description="Falls of the loss scale after a growth until the saw-tooth is called normal, once.",
    )
    saw_tooth_max_skipped_fraction: Fraction = Field(
        0.1,
        description="Skipped steps among all since the descent, above which it is not called normal.",
    )
    on_nonfinite: Literal["stop", "trace"] = Field(
        "stop",
        description="Where a run ends for a loss or gradient that is not finite, its last step is kept for"
        " `dslaunch replay`. `trace` runs it again at once, before the run ends, and names the first module,"
        " parameter, rank and samples that went inf or nan.",
    )
    detect_anomaly: bool = Field(
        False, description="With on_nonfinite trace: ask autograd's anomaly mode too: operation and line."
    )


class RunSpec(EngineSpec):
    """A whole run file."""

    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run: letters, digits, `.`, `_`, `-`. Default: the file's name.",
    )
    task: Literal["sft"] = Field("sft", description="What is trained for. sft: supervised fine-tuning.")
    engine: Literal["deepspeed", "torch"] = Field(
        "deepspeed",
        description="`torch`: without DeepSpeed, by autocast, GradScaler and DistributedDataParallel; every"
        " rank then holds the whole model in fp32.",
    )
    seed: NonNegativeInt = Field(42, lt=2**32, description="Seed of data order, adapter weights and dropout.")
    model: Annotated[ModelSpec, PathAsMapping] = Field(description="The model to train.")
    data: DataSpec = Field(description="Training and held-out data.")
    adapter: AdapterSpec | None = Field(None, description="Train an adapter in place of the whole model.")
    fp32_modules: Names = Field(
        (),
        description="Modules that stay in fp32 under bf16 and fp16: names or patterns such as `*norm*`.",
    )
    scheduler: SchedulerSpec = Field(
        default_factory=dict, validate_default=True, description="Learning-rate schedule."
    )
    num_train_epochs: PositiveFloat | None = Field(
        None, description="Passes over the data. Default: 1, unless max_steps is given."
    )
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps, in place of num_train_epochs.")
    neftune_noise_alpha: PositiveFloat | None = Field(
        None,
        description="NEFTune: uniform noise of at most this / sqrt(tokens of the sample x hidden size) on"
        " the embeddings, in training alone. Usual: 5 to 15.",
    )
    launch: LaunchSpec = Field(
        default_factory=dict, validate_default=True, description="How the ranks are started."
    )
    watch: WatchSpec = Field(
        default_factory=dict, validate_default=True, description="When to stop a run that gets nowhere."
    )
    allow_emulated_fp16: bool = Field(
        False,
        description="Run precision fp16 on CPUs that have no instructions for it: right, but slow; for tests"
        " and debugging.",
    )
    allow_untested_deepspeed: Text | None = Field(
        None,
        description="Version of a DeepSpeed that dslaunch was not tested with, to run it all the same. See"
        " first what `dslaunch doctor --numerics` says of it.",
    )
    output: OutputSpec = Field(
        default_factory=dict, validate_default=True, description="What is written, and how often."
    )
