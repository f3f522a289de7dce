"""What is looked up before resolving: paths from where they were written, hostfile, model dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.config.facts import Facts, looks_like_path, probe_facts
from dslaunch.config.load import load_flags, load_run_file
from dslaunch.core.errors import ConfigErrors, HostfileError


def probe(folder: Path, text: str, *overrides: str, cwd: Path | None = None) -> Facts:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return probe_facts(load_run_file(file, overrides), cwd=cwd or folder, environ={"DS_ACCELERATOR": "cpu"})


def test_paths_in_the_file_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/train.jsonl").write_text("")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/train.jsonl").write_text("")
    facts = probe(tmp_path / "a", "model: m\ndata: {train: train.jsonl}\n", cwd=tmp_path / "b")
    assert facts.paths["data.train[0].path"].absolute == str(tmp_path / "a/train.jsonl")
    typed = probe(
        tmp_path / "a", "model: m\ndata: {train: x}\n", "data.train=train.jsonl", cwd=tmp_path / "b"
    )
    assert typed.paths["data.train[0].path"].absolute == str(tmp_path / "b/train.jsonl")


def test_kinds_of_paths(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text("")
    facts = probe(
        tmp_path, "model: model\ndata: {train: trian.jsonl, eval: ./model/x}\noutput: {run_dir: out/r}\n"
    )
    assert facts.paths["model.path"].kind == "directory"
    missing = facts.paths["data.train[0].path"]
    assert (missing.kind, missing.nearest) == ("missing", str(tmp_path / "train.jsonl"))
    assert facts.paths["data.eval[0].path"].parent_exists
    assert facts.paths["output.run_dir"].absolute == str(tmp_path / "out/r")


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.csv", "x", "has none of the endings that are read as data"),
        ("a.jsonl.zst", "x", "has none of the endings that are read as data"),
        ("a", "x", "has none of the endings that are read as data"),
        ("a.jsonl", "", "is empty"),
        ("a.JSON", "[]", None),
        ("a.ndjson.gz", "x", None),
        ("a.parquet", "x", None),
    ],
)
def test_what_keeps_a_file_from_being_data(tmp_path: Path, name: str, text: str, fault: str | None) -> None:
    (tmp_path / name).write_text(text)
    assert probe(tmp_path, f"model: m\ndata: {{train: {name}}}\n").paths["data.train[0].path"].fault == fault


def test_an_empty_directory_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    text = "model: d\ndata: {train: ./d}\n"
    paths = probe(tmp_path, text).paths
    assert paths["data.train[0].path"].fault == "is an empty directory"
    assert paths["model.path"].fault == "holds no config.json"
    (tmp_path / "d/a.csv").write_text("x")  # which `datasets` reads where it is in a directory
    assert probe(tmp_path, text).paths["data.train[0].path"].fault is None


def test_a_hub_id_is_missing_without_a_parent(tmp_path: Path) -> None:
    fact = probe(tmp_path, "model: org/model\ndata: {train: org/d}\n").paths["model.path"]
    assert (fact.kind, fact.parent_exists, fact.nearest) == ("missing", False, None)


@pytest.mark.parametrize(
    "text",
    [
        "./m",
        "../m",
        "/m",
        "~/m",
        "a/b/c",
        "m.gguf",
        "x.jsonl",
        "x.parquet",
        "a\\b",
        "x.csv",
        "x.TXT",
        "o/x.zst",
    ],
)
def test_what_can_only_be_a_path(text: str) -> None:
    assert looks_like_path(text)


@pytest.mark.parametrize("text", ["gpt2", "org/model", "org/model-1.5b", "org/m.v2"])
def test_what_may_be_a_hub_id(text: str) -> None:
    assert not looks_like_path(text)


def test_the_hostfile_is_read_once_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\r\nb slots=1\r\n")
    facts = probe(tmp_path, "model: m\ndata: {train: x}\ncluster: {hostfile: hosts}\n")
    assert facts.hosts is not None
    assert [host.name for host in facts.hosts] == ["a", "b"]
    assert probe(tmp_path, "model: m\ndata: {train: x}\n").hosts is None


def test_a_missing_hostfile_is_an_error_never_a_local_run(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n")
    facts = probe(tmp_path, "model: m\ndata: {train: x}\ncluster: {hostfile: host}\n")
    problem = facts.hostfile_problem
    assert facts.hosts is None
    assert isinstance(problem, HostfileError)
    assert problem.message == f"run.yaml:3: hostfile not found: {tmp_path / 'host'}".replace(
        "run.yaml", str(tmp_path / "run.yaml")
    )
    assert problem.hint == f"did you mean {tmp_path / 'hosts'}?"
    facts = probe(tmp_path, "model: m\ndata: {train: x}\ncluster: {hostfile: .}\n")
    assert "is a directory" in str(facts.hostfile_problem)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a slots=2\nb slot=1\n", ["hosts:2:3: 'slot=1' is not slots=N"]),
        (
            "# c\na slots=0\n\nb slot=1\nc slots=2\nd\n",
            ["hosts:2:9: slots=0", "hosts:4:3: 'slot=1' is not", "hosts:6:2: slots are missing"],
        ),
        ("a slots=1\na slots=1\nb\n", ["hosts:2:1: host a is given twice", "hosts:3:2: slots are missing"]),
        ("x lots=8\na slots=1\na slots=2\n", ["hosts:1:3: 'lots=8' is not", "hosts:3:1: host a is given"]),
        ("# none\n", ["hosts: no host in it"]),
    ],
)
def test_all_wrong_lines_of_a_hostfile(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "hosts").write_text(text)
    problem = probe(tmp_path, "model: m\ndata: {train: x}\ncluster: {hostfile: hosts}\n").hostfile_problem
    found = problem.problems if isinstance(problem, ConfigErrors) else [problem]
    assert len(found) == len(parts)
    for part, each in zip(parts, found, strict=True):
        assert each is not None
        assert part in each.message


def test_an_interpreter_with_a_slash_is_a_path_and_a_bare_name_is_not(tmp_path: Path) -> None:
    text = "model: m\ndata: {train: x}\nlaunch: {python: %s}\n"
    facts = probe(tmp_path, text % "venv/bin/python", cwd=tmp_path.parent)
    assert facts.paths["launch.python"].absolute == str(tmp_path / "venv/bin/python")
    assert "launch.python" not in probe(tmp_path, text % "python3.11").paths


def test_the_nearest_name_is_one_of_a_model_or_of_data(tmp_path: Path) -> None:
    (tmp_path / "modell.yaml").write_text("")
    text = "model: model\ndata: {train: org/d}\n"
    assert probe(tmp_path, text).paths["model.path"].nearest is None
    (tmp_path / "modelll").mkdir()
    assert probe(tmp_path, text).paths["model.path"].nearest == str(tmp_path / "modelll")


def test_a_misspelt_folder_is_found_where_the_rest_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "models/llama").mkdir(parents=True)
    paths = probe(tmp_path, "model: modles/llama\ndata: {train: modles/gemma}\n").paths
    assert paths["model.path"].nearest == str(tmp_path / "models/llama")
    assert paths["data.train[0].path"].nearest is None


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({}, None),
        ("{", None),
        ([], None),
    ],
)
def test_the_model_says_its_dtype(tmp_path: Path, config: object, dtype: str | None) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert probe(tmp_path, "model: m\ndata: {train: x}\n").model_dtype == dtype


def test_flags_alone(tmp_path: Path) -> None:
    facts = probe_facts(load_flags(("train_batch_size=1",)), cwd=tmp_path, environ={"DS_ACCELERATOR": "cpu"})
    assert facts.paths == {}
    assert facts.inventory.accelerators == ()
