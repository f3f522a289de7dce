"""Options shared by the verbs, and the way from a run file and flags to a plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dslaunch.cli.talk import note

if TYPE_CHECKING:
    from dslaunch.config.load import LoadedSpec
    from dslaunch.config.overrides import Override
    from dslaunch.core.plan import ContainerPlan, RunPlan

F = TypeVar("F", bound=Callable[..., Any])

# Flag's parameter name -> key of the run file that it sets.
FLAG_KEYS: dict[str, tuple[str, ...]] = {
    "hostfile": ("cluster", "hostfile"),
    "include": ("cluster", "include"),
    "exclude": ("cluster", "exclude"),
    "num_nodes": ("cluster", "num_nodes"),
    "num_gpus_per_node": ("cluster", "num_gpus_per_node"),
    "gpu": ("cluster", "gpu"),
    "host_memory_gib": ("cluster", "host_memory_gib"),
    "inventory": ("cluster", "inventory"),
    "master_addr": ("cluster", "master_addr"),
    "master_port": ("cluster", "master_port"),
    "via": ("launch", "via"),
    "container": ("launch", "container"),
    "max_restarts": ("launch", "max_restarts"),
    "model": ("model", "path"),
    "precision": ("precision",),
    "zero_stage": ("zero_optimization", "stage"),
    "train_batch_size": ("train_batch_size",),
    "train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "lr": ("optimizer", "lr"),
    "optimizer": ("optimizer", "type"),
    "template": ("deepspeed_template",),
    "run_dir": ("output", "run_dir"),
    "max_length": ("data", "max_length"),
    "gradient_checkpointing": ("model", "gradient_checkpointing"),
    "attention": ("model", "attn_implementation"),
    "offload_optimizer": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param": ("zero_optimization", "offload_param", "device"),
}
# Flags that a run file has no key for, and all that EngineSpec has none for.
_SCRIPT_ONLY = ("task", "precompute_ref_log_probs", "method", "lora_r")
_TRAINING = (*_SCRIPT_ONLY, "max_length", "gradient_checkpointing", "attention")

local_rank_option = click.option(
    "--local-rank-arg",
    type=click.Choice(["--local_rank", "--local-rank"]),
    help="Give each rank one word more: this option, =, its local rank.",
)
container_option = click.option(
    "--container",
    metavar="RUNTIME:WHAT",
    help="Run inside of apptainer:IMAGE, of a running docker:NAME or podman:NAME, or of pyxis:IMAGE (srun).",
)
set_option = click.option(
    "--set", "set_", multiple=True, metavar="KEY=VALUE", help="Set a key of the run file (repeatable)."
)
launch_set_option = click.option(
    "--set",
    "set_",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of the run file (repeatable); for a command: launch.failure_grace_s,"
    " launch.checkpoint_grace_s, launch.host_timeout_s.",
)
template_option = click.option(
    "--template", metavar="FILE", help="Render the DeepSpeed JSON from this Jinja file."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
output_option = click.option(
    "-o", "--output", default="-", metavar="FILE", help="Write to FILE in place of stdout (-)."
)
force_option = click.option("--force", is_flag=True, help="Let -o replace an existing file.")
via_option = click.option(
    "--via",
    metavar="WAY",
    help="Way to reach hosts: auto (default), local, ssh, slurm, openmpi, mpich, pdsh.",
)
env_option = click.option(
    "--env", multiple=True, metavar="K=V | K", help="Set K for the ranks; K alone: pass it on, unrecorded."
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print what would run; write and start nothing."
)
run_dir_option = click.option("--run-dir", metavar="DIR", help="Run directory.")
resume_option = click.option("--resume", is_flag=True, help="Go on from the run directory's last checkpoint.")


def _number_or_text(_context: click.Context, _param: click.Parameter, value: str | None) -> int | str | None:
    """``auto`` or a number; which ones there are the spec knows."""
    return int(value) if value is not None and value.lstrip("-").isdecimal() else value


zero_stage_option = click.option(
    "--zero-stage",
    callback=_number_or_text,
    metavar="0-3|auto",
    help="ZeRO stage; auto: the lowest that fits.",
)


def cluster_options(function: F) -> F:
    """--hostfile --include --exclude --num-nodes --num-gpus-per-node --gpu --inventory."""
    options = [
        click.option("--hostfile", metavar="FILE", help="DeepSpeed hostfile."),
        click.option("--include", metavar="HOSTS", help="Hosts and slots to use: a@b:0,2."),
        click.option("--exclude", metavar="HOSTS", help="Hosts and slots to leave out: a@b:0,2."),
        click.option("--num-nodes", type=int, metavar="N", help="Number of nodes."),
        click.option("--num-gpus-per-node", type=int, metavar="N", help="Ranks on each node (CPUs too)."),
        click.option(
            "--gpu",
            metavar="NAME",
            help="Device of the nodes: a100, v100, cpu, ...; commas join several; PATTERN=NAME by host.",
        ),
        click.option("--inventory", metavar="FILE", help="What each host has, in place of --gpu (JSON)."),
    ]
    return _apply(options, function)


def master_options(function: F) -> F:
    """--master-addr --master-port."""
    options = [
        click.option("--master-addr", metavar="ADDR", help="Address on which the ranks meet."),
        click.option(
            "--master-port", type=int, metavar="PORT", help="Port on which they meet (default: free)."
        ),
    ]
    return _apply(options, function)


def training_options(function: F) -> F:
    """What a memory plan must know of the training: --method --lora-r --max-length --attention and so on."""
    choice = click.Choice
    options = [
        click.option(
            "--task",
            type=choice(["sft", "dpo", "kto", "reward", "ppo"]),
            help="What is trained for (no run file; default sft).",
        ),
        click.option(
            "--precompute-ref-log-probs",
            is_flag=True,
            help="No reference model beside (dpo, kto; no run file).",
        ),
        click.option(
            "--method", type=choice(["full", "lora", "qlora"]), help="What is trained (no run file)."
        ),
        click.option(
            "--lora-r", type=click.IntRange(min=1), metavar="R", help="Rank of the adapter (no run file)."
        ),
        click.option("--max-length", type=click.IntRange(min=1), metavar="N", help="Tokens of a sample."),
        click.option("--gradient-checkpointing", is_flag=True, help="Recompute activations."),
        click.option("--attention", type=choice(["sdpa", "flash", "eager"]), help="Attention backend."),
    ]
    return _apply(options, function)


def offload_options(function: F) -> F:
    """--offload-optimizer --offload-param."""
    where = click.Choice(["cpu", "auto", "none"])
    options = [
        click.option("--offload-optimizer", type=where, help="Optimizer states in host memory."),
        click.option("--offload-param", type=where, help="Parameters in host memory (stage 3)."),
    ]
    return _apply(options, function)


def memory_options(function: F) -> F:
    """What a memory plan depends on besides the cluster."""
    options = [
        click.option(
            "--model", metavar="MODEL", help="Directory, config.json or .gguf file (or cached hub id)."
        ),
        zero_stage_option,
        click.option("--precision", metavar="P", help="auto, bf16, fp16 or fp32."),
        click.option(
            "--host-memory-gib", type=float, metavar="N", help="RAM of each host (default: known only here)."
        ),
        training_options,
        click.option(
            "--train-micro-batch-size-per-gpu", type=int, metavar="N", help="Samples of one forward pass."
        ),
        click.option(
            "--gradient-accumulation-steps", type=int, metavar="N", help="Forward passes of one step."
        ),
        offload_options,
    ]
    return _apply(options, function)


def flag_overrides(flags: Mapping[str, Any]) -> list[Override]:
    """The flags that were given, as values of the run file's keys. None means not given."""
    from dslaunch.config.overrides import Override

    found = []
    for name, value in flags.items():
        if value is None or value == ():
            continue
        path = FLAG_KEYS[name]
        if name == "gpu":
            value = parse_gpu(value)
        elif name == "container":
            value = parse_container(value)
        elif name.startswith("offload_") and value == "none":
            path, value = path[:-1], None  # the section goes, and not its device alone
        found.append(Override(path, value, "--" + name.replace("_", "-")))
    return found


def parse_gpu(text: str) -> tuple[str, ...] | dict[str, str]:
    """``a100,v100`` -> names; ``node-[1-4]=a100,*=v100`` -> a name for each host pattern.

    Raises ConfigError where both are mixed or a pattern is given twice.
    """
    import re

    from dslaunch.core.errors import ConfigError

    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", text)]
    if not any("=" in part for part in parts):
        return tuple(parts)
    by_host: dict[str, str] = {}
    for part in parts:
        pattern, equals, name = (piece.strip() for piece in part.partition("="))
        if not (pattern and equals and name):
            raise ConfigError(
                f"--gpu {text!r}: {part!r} is not PATTERN=DEVICE, as the others are",
                hint="write --gpu 'node-[1-4]=a100,*=v100'",
            )
        if pattern in by_host:
            raise ConfigError(f"--gpu {text!r}: {pattern} is given twice", hint="keep one of the two")
        by_host[pattern] = name
    return by_host


def parse_container(text: str) -> dict[str, str]:
    """``apptainer:IMAGE`` or ``docker:NAME``, as a run file has it. Raises ConfigError for other forms."""
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.plan import IMAGE_RUNTIMES

    runtime, _, what = text.partition(":")
    if runtime not in ("docker", "podman", *IMAGE_RUNTIMES) or not what:
        raise ConfigError(
            f"--container {text!r} is not RUNTIME:WHAT",
            hint="write --container apptainer:image.sif, docker:NAME or podman:NAME of a running one, or in a"
            " Slurm job pyxis:image.sqsh",
        )
    return {"runtime": runtime, "image" if runtime in IMAGE_RUNTIMES else "name": what}


def container_plan(text: str) -> ContainerPlan:
    """The same where there is no run file: files are relative to the working directory."""
    from dslaunch.core.plan import ContainerPlan, is_image_file

    words: dict[str, Any] = parse_container(text)
    if "image" in words and is_image_file(words["runtime"], words["image"]):
        words["image"] = os.path.abspath(words["image"])
    return ContainerPlan(**words)


def run_file_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags as overrides of a run file. Raises ConfigError for those that it decides itself."""
    from dslaunch.core.errors import ConfigError

    for name in _SCRIPT_ONLY:
        if flags.get(name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for plans without a run file",
                hint="the run file has its own keys, such as adapter.r; leave the flag out",
            )
    kept = {name: value for name, value in flags.items() if name not in _SCRIPT_ONLY}
    kept["gradient_checkpointing"] = flags.get("gradient_checkpointing") or None
    if kept.get("attention") == "flash":
        kept["attention"] = "flash_attention_2"
    return kept


def split_training(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(flags that EngineSpec has a key for, those of :func:`training_options`)."""
    engine = {name: value for name, value in flags.items() if name not in _TRAINING}
    given = {name: flags[name] for name in _TRAINING if flags.get(name) not in (None, False)}
    return engine, given


def load_and_resolve(
    run_file: str, *, set_: tuple[str, ...] = (), run_dir: str | None = None, **flags: Any
) -> RunPlan:
    """Read a run file (``-``: stdin), apply ``--set`` and flags, and resolve it for this machine.

    ``flags`` are named as in FLAG_KEYS. Notes go to stderr. Writes nothing.
    Raises ConfigError(s) with file, line and key path.
    """
    return load_and_resolve_with_spec(run_file, set_=set_, run_dir=run_dir, **flags)[0]


def load_and_resolve_with_spec(
    run_file: str, *, set_: tuple[str, ...] = (), run_dir: str | None = None, **flags: Any
) -> tuple[RunPlan, LoadedSpec[Any]]:
    """The same, with what the run file itself says."""
    from dslaunch.cli.settle import settle_auto
    from dslaunch.config.facts import probe_facts
    from dslaunch.config.resolve import resolve

    loaded = load_run_spec(run_file, set_, {**flags, "run_dir": run_dir})
    cwd = Path.cwd()
    name = loaded.spec.name or _default_name(run_file)
    facts = probe_facts(loaded, cwd=cwd, environ=os.environ)
    loaded = settle_auto(loaded, facts)
    where = facts.paths.get("output.run_dir")
    directory = Path(where.absolute) if where else _new_run_dir(name, cwd)
    plan, notes = resolve(
        loaded, facts=facts, run_dir=directory, cwd=cwd, python=sys.executable, default_name=name
    )
    show_notes(notes)
    return plan, loaded


def load_run_spec(run_file: str, set_: tuple[str, ...], flags: Mapping[str, Any]) -> LoadedSpec[Any]:
    """Read and check a run file (``-``: stdin) with ``--set`` and flags applied."""
    from dslaunch.config.load import decode, load_run_file
    from dslaunch.core.bounded import hint_of, read_stream
    from dslaunch.core.errors import ConfigError

    overrides = flag_overrides(flags)
    if run_file != "-":
        return load_run_file(Path(run_file), set_, overrides)
    try:
        text = decode(read_stream(sys.stdin.buffer, "<stdin>"), "<stdin>")
    except OSError as error:
        raise ConfigError(f"cannot read <stdin>: {error.strerror}", hint=hint_of(error)) from None
    return load_run_file(Path("<stdin>"), set_, overrides, text=text)


def show_notes(notes: tuple[str, ...]) -> None:
    """Print notes to stderr, one a line; none with -q."""
    for text in notes:
        note(text)


def write_output(text: str, output: str, *, force: bool) -> None:
    """Write ``text`` to a file, or to stdout for ``-``. An existing file needs ``force``.

    Raises ConfigError where it exists, EnvironmentNotReady where it cannot be written.
    """
    from dslaunch.core.atomic import write_text
    from dslaunch.core.errors import ConfigError, EnvironmentNotReady

    if output == "-":
        click.echo(text, nl=False)
        return
    path = Path(output)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; nothing was written", hint="add --force to replace it")
    try:
        write_text(path, text)
    except OSError as error:
        raise EnvironmentNotReady(f"cannot write {path}: {error.strerror}") from None


def _default_name(run_file: str) -> str:
    import re

    stem = "run" if run_file == "-" else Path(run_file).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-") or "run"


def _new_run_dir(name: str, cwd: Path) -> Path:
    from datetime import datetime, timezone

    from dslaunch.core.run_dir import default_run_dir, runs_root

    root = Path(os.path.abspath(runs_root(os.environ, cwd)))
    return default_run_dir(name, runs_root=root, now=datetime.now(timezone.utc))


def _apply(options: list[Any], function: F) -> F:
    for option in reversed(options):
        function = option(function)
    return function
