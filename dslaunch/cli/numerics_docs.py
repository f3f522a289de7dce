"""The measured part of docs/numerics.md: ``python -m dslaunch.cli.numerics_docs [REPORT.json]``.

Without an argument the table is measured anew; with one it is that of ``doctor --numerics --json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dslaunch.cli.doctor_numerics import measure_table
from dslaunch.core.atomic import write_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numerics.md"
BEGIN = "<!-- Made by `python -m dslaunch.cli.numerics_docs` (make docs-numerics). Measured, not written. -->"
END = "<!-- End of what was measured. -->"


def render_table(report: Mapping[str, Any]) -> str:
    """The table in Markdown, and what each wrong verdict was measured by. No times, no paths."""
    from dslaunch.train.numerics.table import PROPERTIES, table_rows

    columns = ["dtype", "stage", "", *PROPERTIES]
    rows = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for stage, dtype, who, verdicts in table_rows(report["cells"]):
        marks = ["**wrong**" if v == "wrong" else v for v in verdicts]
        rows.append("| " + " | ".join([dtype, stage, who, *marks]) + " |")
    evidence = [
        f"- {cell['dtype']} at stage {cell['stage']}, {cell['who']}, {name}: {found['evidence']}"
        for cell in report["cells"]
        for name, found in cell["properties"].items()
        if found["verdict"] in ("wrong", "failed")
    ]
    head = f"DeepSpeed {report['deepspeed']}, {report['world_size']} ranks on {report['device']}."
    return "\n".join([head, "", *rows, "", "What the wrong ones gave:", "", *evidence])


def replace_table(page: str, report: Mapping[str, Any]) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render_table(report)}\n\n{END}{after}"


def main(argv: list[str]) -> int:
    report = json.loads(Path(argv[0]).read_text(encoding="utf-8")) if argv else measure_table()
    write_text(PAGE, replace_table(PAGE.read_text(encoding="utf-8"), report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
