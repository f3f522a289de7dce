"""dslaunch gen-config: the DeepSpeed JSON of a run file, or of flags alone."""

from __future__ import annotations

from typing import Any

import click

from dslaunch.cli import options


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
@click.option("--optimizer", metavar="NAME", help="AdamW, Adam, SGD or Lion.")
@click.option("--model", metavar="MODEL", help="Model to plan for: hub id, directory or .gguf file.")
@options.training_options
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

    gc.disable()  # a fraction of a second to live: collecting would only walk the imported modules
    from dslaunch.config.engine_plan import check_for_own_script, resolve_engine
    from dslaunch.config.facts import probe_facts
    from dslaunch.config.load import load_flags
    from dslaunch.config.paths import check_written_paths
    from dslaunch.config.render import render_ds_config
    from dslaunch.config.report import Report

    if run_file is None:
        engine_flags, training = options.split_training(flags)
        loaded: Any = load_flags(set_, options.flag_overrides(engine_flags))
    else:
        loaded, training = options.load_run_spec(run_file, set_, options.run_file_flags(flags)), {}
    facts = probe_facts(loaded, cwd=Path.cwd(), environ=os.environ)
    loaded = options.settle_auto(loaded, facts, training)
    report = Report(loaded, notes=list(loaded.notes))
    engine = resolve_engine(report, facts)
    check_written_paths(report, facts)
    if engine:
        check_for_own_script(engine[0], report)
    config = render_ds_config(engine[0], report, facts, engine[1].devices) if engine else {}
    report.raise_if_any()
    return config, tuple(report.notes)
