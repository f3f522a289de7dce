"""``dslaunch export``: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dslaunch.cli.talk import talk
from dslaunch.core.errors import EXIT_CANCELLED_TERM

if TYPE_CHECKING:
    from dslaunch.train.export import ExportReport


@click.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="The directory to write. An existing one needs --force.",
)
@click.option("--merge", is_flag=True, help="Fold the adapter into its base and write a full model.")
@click.option(
    "--onto-original",
    is_flag=True,
    help="With --merge, where the base was quantised: fold into the weights as they were before.",
)
@click.option("--force", is_flag=True, help="Replace an earlier export in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object about what was written.")
def command(
    checkpoint: Path, output: Path, merge: bool, onto_original: bool, force: bool, as_json: bool
) -> int:
    """Write CHECKPOINT as a Hugging Face model or adapter directory.

    CHECKPOINT is RUN_DIR/checkpoints/step-N, or RUN_DIR for its last one.
    Plain transformers and peft load the result.
    """
    from dslaunch.cli.existing import check_checkpoint
    from dslaunch.core.command import quote

    check_checkpoint(checkpoint)
    with cancelled_by_term():
        from dslaunch.train.quiet import quiet_libraries, stdout_is_data

        quiet_libraries()
        with stdout_is_data():
            from dslaunch.train.export import export_checkpoint

            report = export_checkpoint(
                checkpoint, output, merge=merge, onto_original=onto_original, force=force
            )
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **dataclasses.asdict(report)}, indent=2))
        return 0
    click.echo(
        f"wrote the {report.kind} of step {report.step} to {report.output} "
        f"({report.num_parameters:,} parameters, {report.dtype})"
    )
    if report.kind == "adapter":
        talk(_about_base(report.base_model))
    for line in _about_merge(report, onto_original):
        talk(line)
    talk(f"next: dslaunch generate {quote(report.output)} --prompt TEXT")
    return 0


@contextmanager
def cancelled_by_term() -> Iterator[None]:
    """While entered, SIGTERM ends this process by way of what removes a directory that is half written.

    Only a main thread can have handlers; elsewhere SIGTERM does what it did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, _cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _cancel(*_: object) -> None:
    os.write(2, b"cancelled\n")  # print may be the very thing that is interrupted
    raise SystemExit(EXIT_CANCELLED_TERM)


def _about_merge(report: ExportReport, onto_original: bool) -> list[str]:
    """How far the merged model is from the one that was trained, and what it costs besides."""
    drift, rounded = report.max_logit_drift, report.max_logit_drift_rounded
    if report.quantization and report.kind == "adapter":
        return [f"it was trained on the base in {report.quantization}: quantization_config.json says how"]
    if drift is None or rounded is None:
        return []
    written = f"in {report.dtype} to {rounded:.2g}"
    if onto_original:
        return [
            f"the logits differ by {drift:.2g} from the trained model's, whose base was in"
            f" {report.quantization}; {written}"
        ]
    lines = [f"merged and adapter model agree to {drift:.2g} in the logits; {written}"]
    if report.quantization:
        lines.append(
            f"its weights are the values of the base in {report.quantization}, as {report.dtype}:"
            " quantising them again would move them; keep the adapter for that"
        )
    return lines


def _about_base(base_model: str) -> str:
    """What it takes to load an adapter on ``base_model``; peft by itself cannot open a .gguf file."""
    text = f"its base is {base_model}; --merge writes a model that needs none"
    path = Path(base_model)
    if path.suffix.lower() != ".gguf":
        return text
    return (
        f"{text}\nthe base is a .gguf file, which AutoPeftModel cannot open; in Python:\n"
        f"  base = AutoModelForCausalLM.from_pretrained({str(path.parent)!r}, gguf_file={path.name!r})\n"
        "  model = PeftModel.from_pretrained(base, DIR)"
    )
