"""dslaunch gen-config: the DeepSpeed JSON of a run file, or of flags alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dslaunch.cli import options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dslaunch.config.engine_plan import EnginePlan
    from dslaunch.config.spec_engine import EngineSpec

# Flags that make the scheduler block.
_LENGTH = ("scheduler", "num_samples", "num_train_epochs", "max_steps", "warmup_steps", "warmup_ratio")


@click.command("gen-config", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_file", required=False, metavar="[RUN.yaml]")
@options.zero_stage_option
@click.option("--precision", metavar="P", help="auto, bf16, fp16 or fp32.")
@click.option("--train-batch-size", type=int, metavar="N", help="Samples of one step over all ranks.")
@click.option("--train-micro-batch-size-per-gpu", type=int, metavar="N", help="Samples of one forward pass.")
@click.option("--gradient-accumulation-steps", type=int, metavar="N", help="Forward passes of one step.")
@click.option(
    "--gradient-clipping", type=float, metavar="NORM", help="Largest gradient norm; 0: no clipping."
)
@click.option("--lr", type=float, metavar="RATE", help="Peak learning rate.")
@click.option("--optimizer", metavar="NAME", help="AdamW, Adam, SGD, Lion, ... (docs/optimizers.md).")
@click.option("--model", metavar="MODEL", help="Model to plan for: hub id, directory or .gguf file.")
@click.option(
    "--scheduler",
    type=click.Choice(["linear", "cosine", "constant", "wsd"]),
    help="Write a scheduler block, for a script of your own (DeepSpeed has no wsd).",
)
@click.option("--num-samples", type=click.IntRange(min=1), metavar="N", help="Samples of the data.")
@click.option("--num-train-epochs", type=float, metavar="E", help="Times each is seen (default 1).")
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N", help="Steps, in place of the two.")
@click.option("--warmup-steps", type=click.IntRange(min=0), metavar="N", help="Steps of warm-up.")
@click.option(
    "--warmup-ratio", type=click.FloatRange(0, 1), metavar="R", help="Or their share (default 0.03)."
)
@options.training_options
@options.offload_options
@options.cluster_options
@options.template_option
@options.set_option
@options.output_option
@options.force_option
def command(run_file: str | None, set_: tuple[str, ...], output: str, force: bool, **flags: Any) -> None:
    """Print the DeepSpeed JSON of RUN.yaml (-: stdin), or, without it, of flags alone.

    Every value is resolved: no "auto" is left, and no key that the ZeRO stage ignores.
    """
    config, notes = _render(run_file, set_, flags)
    options.show_notes(notes)
    from dslaunch.config.render import to_text

    options.write_output(to_text(config), output, force=force)


def _render(
    run_file: str | None, set_: tuple[str, ...], flags: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    import gc
    import os
    from pathlib import Path

    length = {name: flags.pop(name) for name in _LENGTH}
    gc.disable()  # a fraction of a second to live: collecting would only walk the imported modules
    from dslaunch.cli.settle import settle_auto
    from dslaunch.config.engine_plan import check_for_own_script, resolve_engine
    from dslaunch.config.facts import probe_facts
    from dslaunch.config.load import load_flags
    from dslaunch.config.paths import check_written_paths
    from dslaunch.config.render import render_ds_config
    from dslaunch.config.report import Report
    from dslaunch.config.without_deepspeed import uses_torch
    from dslaunch.core.errors import ConfigError

    if run_file is None:
        engine_flags, training = options.split_training(flags)
        loaded: Any = load_flags(set_, options.flag_overrides(engine_flags))
    else:
        loaded, training = options.load_run_spec(run_file, set_, options.run_file_flags(flags)), {}
    if uses_torch(loaded.spec):
        raise ConfigError(
            f"{loaded.where('engine')}engine torch runs without DeepSpeed, so there is no JSON for it",
            hint="dslaunch plan shows what it resolves to; for the JSON add --set engine=deepspeed",
        )
    facts = probe_facts(loaded, cwd=Path.cwd(), environ=os.environ)
    if run_file is None and facts.model_quantization is not None:
        _check_on_disk(facts.model_quantization, flags["model"])
    loaded = settle_auto(loaded, facts, training, for_json=True)
    report = Report(loaded, notes=list(loaded.notes))
    engine = resolve_engine(report, facts)
    check_written_paths(report, facts)
    if run_file is not None:
        from dslaunch.config.run_settings import resolve_settings

        resolve_settings(report, facts, engine)
    if engine:
        check_for_own_script(engine[0], report)
        engine = (_with_scheduler(engine[0], length, loaded.spec), engine[1])
    config = render_ds_config(engine[0], report, facts, engine[1].devices) if engine else {}
    report.raise_if_any()
    if run_file is None and (usual := report.reasons.get("optimizer.lr")) and "optimizer" in config:
        kind, params = config["optimizer"]["type"], config["optimizer"]["params"]
        report.note(f"optimizer {kind} with lr {params['lr']:g} ({usual.reason}); --lr sets it")
    return config, tuple(report.notes)


def _check_on_disk(block: Mapping[str, Any], model: str) -> None:
    """Raises ConfigError for what no adapter can be trained on, as a plan of that model does."""
    from dslaunch.core.errors import ConfigError
    from dslaunch.core.quantised_model import plan_on_disk

    try:
        plan_on_disk(block)
    except ConfigError as error:
        raise ConfigError(f"--model {model}: {error.message}", hint=error.hint) from None


def _with_scheduler(engine: EnginePlan, flags: dict[str, Any], spec: EngineSpec) -> EnginePlan:
    given = next((name for name, value in flags.items() if value is not None), None)
    if given is None:
        return engine
    import dataclasses

    from dslaunch.config.ds_scheduler import build_scheduler
    from dslaunch.config.spec import RunSpec
    from dslaunch.core.errors import ConfigError

    if isinstance(spec, RunSpec):
        raise ConfigError(
            f"--{given.replace('_', '-')} is for scripts of your own: a run file has its own schedule",
            hint="set the scheduler section of the run file",
        )
    if "scheduler" in spec.deepspeed:
        raise ConfigError(
            f"--{given.replace('_', '-')} and deepspeed.scheduler are both given", hint="keep one of the two"
        )
    block = build_scheduler(flags, lr=engine.optimizer.lr, train_batch_size=engine.batch.train_batch_size)
    return dataclasses.replace(engine, scheduler=block)
