"""What export and generate are given must be there: said with the nearest name, before anything heavy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.cli.existing import check_checkpoint, check_model
from dslaunch.core.errors import ConfigError


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    for path in ("first-adapter", "runs/one/checkpoints/step-2", "runs/one/checkpoints/step-10", "runs/new"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "first-adapter/adapter_config.json").write_text("{}")
    (tmp_path / "runs/one/plan.json").write_text("{}")
    (tmp_path / "runs/new/plan.json").write_text("{}")
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("first-adaptr", "did you mean {here}/first-adapter?"),
        ("./first-adaptr", "did you mean {here}/first-adapter?"),
        ("runs/two", "looked for {here}/runs/two"),
        ("/nowhere/model", "looked for /nowhere/model"),
        ("smol.gguf", "looked for {here}/smol.gguf"),
    ],
)
def test_a_model_that_is_not_there(here: Path, text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(text)
    assert caught.value.message == f"no such directory or .gguf file: {text}"
    assert caught.value.hint == hint.format(here=here)


@pytest.mark.parametrize("text", ["first-adapter", "org/model", "gpt2", "file"])
def test_what_is_there_or_may_be_on_the_hub_passes_in_silence(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_model(text)
    assert capsys.readouterr() == ("", "")


def test_a_hub_id_that_is_like_a_directory_gives_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    check_model("rums/one")
    assert "note: rums/one is taken for a hub id; there is also " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["runs/one", "runs/one/checkpoints", "runs/one/checkpoints/step-2"])
def test_a_checkpoint_that_is_there(text: str) -> None:
    check_checkpoint(Path(text))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("runs/one/checkpoints/step-9", "runs/one/checkpoints has no step-9", "it has step-2, step-10"),
        ("runs/noe", "directory not found: runs/noe (in {here})", "did you mean runs/one?"),
        ("rums/one", "directory not found: rums/one (in {here})", "did you mean runs/one?"),
        ("x/y", "directory not found: x/y (in {here})", "give RUN_DIR, or RUN_DIR/checkpoints/step-N"),
        (
            "runs/new",
            "the run in runs/new has no checkpoint yet",
            "one is written at its end, and every output.save_steps steps",
        ),
        (
            "first-adapter",
            "first-adapter is no run: it holds a model or adapter already",
            "give RUN_DIR, or RUN_DIR/checkpoints/step-N",
        ),
        (
            "file",
            "file is a file, not a run directory or checkpoint",
            "give RUN_DIR, or RUN_DIR/checkpoints/step-N",
        ),
    ],
)
def test_a_checkpoint_that_is_not_there(here: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(Path(text))
    assert (caught.value.message, caught.value.hint) == (message.format(here=here), hint)


@pytest.mark.parametrize(
    "argv", [["generate", "first-adaptr", "--prompt", "a"], ["export", "runs/noe", "-o", "x"]]
)
def test_it_is_said_before_torch_is_imported(here: Path, argv: list[str]) -> None:
    code = "import sys\nfrom dslaunch.cli.main import main\nassert main(sys.argv[1:]) == 2\n"
    code += "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.match(r"Error: (no such directory or .gguf file: f|directory not found: runs/noe)", done.stderr)
