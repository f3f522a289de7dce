"""dslaunch diagnose as a user meets it: what it prints, its exit codes, its picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from dslaunch.cli.main import main
from tests.observe.diagnose.logs import hf, zero_log

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "train.log"
    path.write_text("\n".join(zero_log({1, 2, 3, 40}, 60).lines) + "\n")
    return str(path)


def test_a_healthy_run(log: str, capsys: Capture) -> None:
    assert main(["diagnose", log, "--set", "fp16.loss_scale_window=10"]) == 0
    out = capsys.readouterr().out
    assert "steps 1 to 60, 60 losses, 4 steps skipped, loss scale 256 at the end (inferred)" in out
    assert "info: 3 overflows at the start, from scale 256 to 32: normal" in out
    assert "\nnothing wrong found\n" in out
    assert "doubled 3 times between step 3 and step 40, 32 to 256; first at about step 14" in out
    rows = {line.split("|")[0].strip(): line.split("|")[1] for line in out.splitlines() if " |" in line}
    assert [column + 1 for column, mark in enumerate(rows["skipped"]) if mark == "x"] == [1, 2, 3, 40]
    assert rows["32"].index("#") == 2


def test_a_run_that_went_wrong(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bad.log"
    path.write_text("\n".join([hf(2.0, 1 + i / 9) for i in range(9)] + [hf(0.0, "nan")] * 4) + "\n")
    assert main(["diagnose", str(path)]) == 1
    out = capsys.readouterr().out
    assert "error: loss 0 with a gradient norm that is nan or never changes, 4 lines in a row" in out
    assert "  line 10: {'loss': 0.0, 'grad_norm': nan" in out
    assert "nan or inf |" in out
    assert '"overlap_comm": false' in out


def test_json(log: str, capsys: Capture) -> None:
    assert main(["diagnose", log, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 1
    assert [verdict["name"] for verdict in report["verdicts"]] == ["warm_up_descent", "saw_tooth"]
    evidence = report["verdicts"][0]["evidence"][0]
    assert (evidence["step"], evidence["file"]) == (1, log)
    assert "OVERFLOW" in Path(log).read_bytes().decode().split("\n")[evidence["line"] - 1]
    assert report["settings"]["hysteresis"]["source"] == "inferred"


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["nowhere.log"], 2, "log not found: nowhere.log (in /"),
        (["other.log"], 2, "other.log: no line of 1 tells of loss, norm or loss scale"),
        (["train.log", "--set", "fp16.window=3"], 2, "is no setting of the loss scale"),
        (["train.log", "-o", "plot.svg"], 2, "only .png is drawn"),
        (["train.log", "-o", "there.png"], 2, "there.png exists already"),
    ],
)
def test_what_is_wrong_with_the_call(
    argv: list[str], code: int, says: str, log: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(log).parent)
    Path("other.log").write_text("hello\n")
    Path("there.png").touch()
    assert main(["diagnose", *argv]) == code
    assert says in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_the_package_that_is_missing_is_named(log: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["diagnose", log, "-o", str(tmp_path / "plot.png")]) == 3
    captured = capsys.readouterr()
    assert "needs matplotlib, which is not installed" in captured.err
    assert captured.out == ""


@pytest.mark.needs("matplotlib")
def test_a_picture(log: str, tmp_path: Path) -> None:
    output = tmp_path / "plot.png"
    assert main(["diagnose", log, "-o", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
