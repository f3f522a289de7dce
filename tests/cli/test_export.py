"""``dslaunch export`` as typed: exit codes, messages, JSON."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dslaunch.cli.export import _about_base
from dslaunch.cli.main import main
from dslaunch.core.errors import ConfigError


def test_no_checkpoint_is_one_sentence_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert "neither a checkpoint (step-N) nor a run directory" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


def test_output_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "somewhere"]) == 2
    assert "--output" in capsys.readouterr().err


def test_term_is_handled_while_it_writes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = []

    def fail() -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        raise ConfigError("as far as this")

    monkeypatch.setattr("dslaunch.train.quiet.quiet_libraries", fail)
    (tmp_path / "step-3").mkdir()
    before = signal.getsignal(signal.SIGTERM)
    assert main(["export", str(tmp_path / "step-3"), "-o", str(tmp_path / "out")]) == 2
    assert len(handlers) == 1 and handlers[0] is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_adapter_on_a_gguf_base_says_how_to_load_it() -> None:
    text = _about_base("/models/smol.gguf")
    assert "AutoModelForCausalLM.from_pretrained('/models', gguf_file='smol.gguf')" in text
    assert "PeftModel.from_pretrained" in text
    assert "PeftModel" not in _about_base("org/model")
