"""``dslaunch doctor --numerics``: what the installed DeepSpeed does right, alone and under dslaunch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dslaunch.cli.talk import talk

_SHORT = {"right": "right", "wrong": "WRONG", "refused": "refused", "failed": "FAILED", "-": "-"}


def numerics(*, as_json: bool) -> int:
    """Measure the table in two ranks, print it, and return the exit code: 1 where dslaunch is wrong."""
    from dslaunch.core.errors import EXIT_NO, EXIT_OK
    from dslaunch.train.numerics.table import ours_is_wrong

    report = measure_table()
    if as_json:
        click.echo(json.dumps(report))
    else:
        click.echo("\n".join(lines(report)))
    wrong = ours_is_wrong(report["cells"])
    for text in wrong:
        talk(f"dslaunch is wrong: {text}")
    return EXIT_NO if wrong else EXIT_OK


def measure_table() -> dict[str, Any]:
    """Start two ranks on this machine's CPU and read what they measured. Progress goes to stderr.

    Raises LaunchFailed with a rank's exit code where they did not get through.
    """
    from dslaunch.core.errors import LaunchFailed
    from dslaunch.core.plan import LaunchPlan
    from dslaunch.core.topology import Host, Topology
    from dslaunch.launch.supervisor import supervise

    with tempfile.TemporaryDirectory(prefix="dslaunch-numerics-") as folder:
        out = Path(folder, "table.json")
        plan = LaunchPlan(
            argv=(sys.executable, "-W", "ignore", "-m", "dslaunch.train.numerics.measure", str(out)),
            topology=Topology(hosts=(Host(name="localhost", slots=("0", "1")),)),
            run_dir=str(Path(folder, "run")),
            cwd=os.getcwd(),
            via="local",
            device_type="cpu",
        )
        outcome = supervise(plan, events=None, out=sys.stderr.buffer, err=sys.stderr.buffer)
        if outcome.exit_code != 0 or not out.exists():
            raise LaunchFailed(
                "the measuring ranks did not get through; what they wrote is above",
                exit_code=outcome.exit_code or 70,
            )
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return report


def lines(report: Mapping[str, Any]) -> list[str]:
    """The table for a reader, and below it what each wrong verdict was measured by."""
    from dslaunch.train.numerics.table import PROPERTIES, table_rows

    width = max(len(name) for name in PROPERTIES)
    head = f"{'dtype':<14}{'stage':<6}{'':<17}" + "".join(f"{name:<{width + 1}}" for name in PROPERTIES)
    found = [
        f"DeepSpeed {report['deepspeed']}, torch {report['torch']}, {report['world_size']} ranks on "
        f"{report['device']}",
        "",
        head.rstrip(),
    ]
    for stage, dtype, who, verdicts in table_rows(report["cells"]):
        row = "".join(f"{_SHORT[verdict]:<{width + 1}}" for verdict in verdicts)
        found.append(f"{dtype:<14}{stage:<6}{who:<17}{row}".rstrip())
    found += ["", *(f"{name}: {text}" for name, text in PROPERTIES.items()), ""]
    for cell in report["cells"]:
        for name, verdict in cell["properties"].items():
            if verdict["verdict"] in ("wrong", "failed"):
                where = f"{cell['dtype']} at stage {cell['stage']}, {cell['who']}, {name}"
                found.append(f"{where}: {verdict['evidence']}")
    return found
