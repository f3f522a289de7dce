"""``dslaunch generate`` as typed: exit codes, stdin, JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from dslaunch.cli.main import main
from tests.support.tiny import make_tiny_model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("model") / "a model")  # a space in the path


def test_json_has_every_answer_in_order(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    argv = ["generate", str(model_dir), "--prompt", "- $(rm) 'quote'\n", "--prompt", "-"]
    assert main([*argv, "--max-new-tokens", "3", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["schema_version"] == 1
    assert [a["prompt"] for a in out["answers"]] == ["- $(rm) 'quote'\n", "from stdin"]
    assert all(1 <= a["num_new_tokens"] <= 3 for a in out["answers"])


def test_two_prompts_are_told_apart_in_text(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(model_dir), "--prompt", "a", "--prompt", "b", "--max-new-tokens", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("> ")] == ["> a", "> b"]


def test_a_name_that_is_nowhere_is_most_likely_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "first-adapter", "--prompt", "a"]) == 2
    said = capsys.readouterr().err
    assert "no such directory: first-adapter" in said
    assert "hint: write it first: dslaunch export RUN_DIR -o first-adapter\n" in said


def test_nothing_to_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path)]) == 2
    assert "--prompt" in capsys.readouterr().err
    assert main(["generate", str(tmp_path), "--prompt", "-", "--prompt", "-"]) == 2
    assert "only once" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["", " \n", "-"])
def test_an_empty_prompt(
    tmp_path: Path, prompt: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["generate", str(tmp_path), "--prompt", prompt]) == 2
    assert "empty" in capsys.readouterr().err
