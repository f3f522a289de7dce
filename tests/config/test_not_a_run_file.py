"""A file of another kind given as run file: the message says what it is and where it goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.config.load import load_run_file
from dslaunch.core.errors import ConfigError
from tests.config.build import SMALL, load, problems

RECORD = '{"prompt": "a", "completion": "b"}\n'


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run_file(path)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("name", "text", "what", "hint"),
    [
        ("a.jsonl", RECORD * 3, "data (JSON lines)", "data.train"),
        ("a.jsonl", RECORD, "data (JSON lines)", "data.train"),
        ("a.json", f"[{RECORD}]", "data (a JSON array)", "data.train"),
        ("a.csv", "prompt,completion\na,b\n", "data", "data.train"),
        (
            "ds.json",
            '{"train_batch_size": 8, "fp16": {"enabled": true}}',
            "a DeepSpeed config",
            "dslaunch check",
        ),
        ("ds.json", '{"zero_optimization": {"stage": 2}, // 2\n}', "a DeepSpeed config", "dslaunch check"),
        ("config.json", '{"model_type": "llama", "hidden_size": 8}', "a model's config.json", "plan --model"),
        ("hosts", "a slots=2\nb slots=2\n", "a hostfile", "--hostfile"),
        ("job.sh", "#!/bin/bash\n#SBATCH -n 2\n", "a script", "-- bash"),
        ("train.py", "#!/usr/bin/env python\nimport torch\n", "a script", "-- python"),
        (
            "plan.json",
            json.dumps({"schema_version": 1, "launch": {}, "model": {}}),
            "a recorded plan",
            "--plan",
        ),
    ],
)
def test_text_of_another_kind(tmp_path: Path, name: str, text: str, what: str, hint: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    error = refusal(file)
    assert error.message == f"{file}: this is {what}, not a run file"
    assert error.hint is not None
    assert hint in error.hint


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"PAR1\x15\x04\xff", "a parquet file"),
        (b"GGUF\x03\xff", "a .gguf model"),
        (b"\x1f\x8b\x08\xff", "gzip"),
        (bytes(range(256)), "a binary file"),
    ],
)
def test_bytes_of_another_kind(tmp_path: Path, data: bytes, what: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(data)
    assert refusal(file).message == f"{file} is {what}, not a run file"


def test_utf_16_says_how_to_convert(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(SMALL, encoding="utf-16")
    error = refusal(file)
    assert error.message == f"{file}:1: UTF-16 text; a run file is UTF-8"
    assert error.hint == f"iconv -f UTF-16 -t UTF-8 {file} > NEW.yaml"


def test_an_empty_file() -> None:
    ((message, hint),) = problems(" \n")
    assert message == "run.yaml is empty; a run file needs model and data"
    assert hint is not None
    assert "examples/quickstart.yaml" in hint


def test_the_command_line_can_stand_for_the_whole_file() -> None:
    assert load("", "model=m", "data.train=d").spec.data.train[0].path == "d"
    assert [message for message, _ in problems("", "model=m")] == ["run.yaml: data is missing"]


def test_a_run_file_written_as_json_is_one() -> None:
    text = json.dumps({"model": "m", "data": {"train": "d"}, "train_batch_size": 8})
    assert load(text).spec.train_batch_size == 8
    wrong = text.replace("train_batch_size", "train_batch_sise")
    assert problems(wrong)[0][0] == "run.yaml:1: unknown key train_batch_sise; did you mean train_batch_size?"


@pytest.mark.parametrize(
    ("inside", "hint"),
    [
        ("plan.json", "--plan"),
        ("config.json", "model.path"),
        ("my.yaml", "did you mean"),
        ("x", "quickstart"),
    ],
)
def test_a_directory(tmp_path: Path, inside: str, hint: str) -> None:
    (tmp_path / inside).write_text("")
    error = refusal(tmp_path)
    assert error.message == f"{tmp_path} is a directory, not a run file"
    assert error.hint is not None
    assert hint in error.hint


def test_hints_about_stdin_name_no_file() -> None:
    for text in ("\ufeff" + SMALL, '{"fp16": {"enabled": true}}'):
        with pytest.raises(ConfigError) as caught:
            load_run_file(Path("<stdin>"), text=text)
        assert caught.value.hint
        assert "<stdin>" not in caught.value.hint
