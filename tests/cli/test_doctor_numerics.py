"""doctor --numerics: the real measurement once, its verdicts, its page; and how a verdict is reached."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.doctor_numerics import lines
from dslaunch.cli.numerics_docs import BEGIN, END, PAGE, render_table
from dslaunch.train.numerics import table
from dslaunch.train.numerics.table import Found, Measured, judge, ours_is_wrong

GOOD = Measured(
    updates=[[[-0.0625, 0.0]] * 3 + [[-0.6, -0.8], [0.0, 0.0], [-0.0625, 0.0]]] * 2,
    norms=[0.0625, 0.0625, 0.0625, 5.0, math.inf, 0.0625],
    scales=[256, 256, 256, 512, 512, 512],
    adamw=[1.0, 0.85],
)


@pytest.fixture(scope="module")
def measured(ops_dir: Path) -> tuple[dict[str, Any], str]:
    """(what `doctor --numerics --json` printed, what it said on stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", "doctor", "--numerics", "--json"], capture_output=True, text=True,
        timeout=400, env={**os.environ, "TORCH_EXTENSIONS_DIR": str(ops_dir)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_page_is_what_is_measured_now(measured: tuple[dict[str, Any], str]) -> None:
    """Red: DeepSpeed or a cure changed. Run `make docs-numerics` and look at the difference."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == render_table(measured[0])


def test_nothing_of_ours_is_wrong_and_something_of_deepspeeds_is(
    measured: tuple[dict[str, Any], str],
) -> None:
    cells = measured[0]["cells"]
    assert len(cells) == 2 * len(table.STAGES) * len(table.DTYPES)
    assert ours_is_wrong(cells) == []
    wrong = {
        (cell["dtype"], cell["stage"], name)
        for cell in cells
        for name, found in cell["properties"].items()
        if found["verdict"] == "wrong"
    }
    assert {("fp16", 2, "growth"), ("fp16", 0, "scaled"), ("bf16", 0, "first"), ("fp32", 0, "skip")} <= wrong


def test_progress_is_on_stderr(measured: tuple[dict[str, Any], str]) -> None:
    assert "measuring fp16 at stage 3" in measured[1]
    assert "Warning" not in measured[1] and "Traceback" not in measured[1]


def test_the_text_names_the_verdicts_and_the_evidence(measured: tuple[dict[str, Any], str]) -> None:
    text = "\n".join(lines(measured[0]))
    assert text.startswith(f"DeepSpeed {measured[0]['deepspeed']}, torch ")
    assert "fp16 at stage 2, DeepSpeed alone, growth: update -0.03125, must be -0.0625" in text
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize(
    "arguments", [["run.yaml"], ["--hostfile", "h"], ["--build-ops"], ["--set", "a=1"], ["--via", "ssh"]]
)
def test_it_takes_no_run_and_no_hosts(arguments: list[str]) -> None:
    from click.testing import CliRunner

    from dslaunch.cli.doctor import command

    result = CliRunner().invoke(command, ["--numerics", *arguments])
    assert result.exit_code == 2
    assert "--numerics measures the DeepSpeed of this Python alone" in result.output


# How a verdict is reached


def test_what_is_right_is_called_right() -> None:
    assert set(judge(GOOD, "fp16").values()) == {Found("right")}
    fp32 = judge(GOOD, "fp32")
    assert {name for name, found in fp32.items() if found.verdict == "-"} == set(table.FP16_ONLY)


def changed(step: int, update: list[float], rank: int = 0) -> Measured:
    updates = [[list(values) for values in rank_updates] for rank_updates in GOOD.updates]
    updates[rank][step - 1] = update
    return dataclasses.replace(GOOD, updates=updates)


@pytest.mark.parametrize(
    ("measured_now", "wrong"),
    [
        (
            changed(1, [-0.0625 / 256, 0.0]),
            {"scaled", "skip"},
        ),  # the step after an overflow is compared with it
        (changed(3, [-0.03125, 0.0]), {"growth"}),
        (changed(4, [-3.0, -4.0]), {"clip"}),
        (changed(5, [math.nan, 0.0]), {"skip"}),
        (changed(5, [-0.0625, 0.0], rank=1), {"skip"}),
        (changed(6, [0.0, 0.0], rank=1), {"skip"}),
        (dataclasses.replace(GOOD, norms=[0.0625, 0.0625, 0.03125, 5.0, math.inf, 0.0625]), {"norm"}),
        (dataclasses.replace(GOOD, norms=[None] * 6), {"norm"}),
        (dataclasses.replace(GOOD, scales=[256, 256, 256, 512, 512, 256]), {"hysteresis"}),
        (dataclasses.replace(GOOD, scales=[256] * 6), {"growth"}),
        (dataclasses.replace(GOOD, adamw=[0.95, 0.8281]), {"first"}),
        (dataclasses.replace(GOOD, adamw=[1.0, 0.95 - 0.0744]), {"first"}),
    ],
)
def test_each_fault_is_called_wrong_and_shown(measured_now: Measured, wrong: set[str]) -> None:
    found = judge(measured_now, "fp16")
    assert {name for name, value in found.items() if value.verdict == "wrong"} == wrong
    assert all(found[name].evidence for name in wrong)


def test_a_refusal_of_ours_is_no_fault_and_a_failure_is() -> None:
    def cells(verdict: str, who: str) -> list[dict[str, Any]]:
        found = {name: {"verdict": verdict, "evidence": "so it was"} for name in table.PROPERTIES}
        return [{"stage": 1, "dtype": "fp16", "who": who, "properties": found}]

    assert ours_is_wrong(cells("refused", table.WHO[1])) == []
    assert ours_is_wrong(cells("wrong", table.WHO[0])) == []
    assert len(ours_is_wrong(cells("failed", table.WHO[1]))) == len(table.PROPERTIES)
