"""What is looked up before resolving: paths from where they were written, hostfile, model dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.config.facts import Facts, looks_like_path, probe_facts
from dslaunch.config.load import load_flags, load_run_file
from dslaunch.core.errors import ConfigError, HostfileError


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


def test_a_hub_id_is_missing_without_a_parent(tmp_path: Path) -> None:
    fact = probe(tmp_path, "model: org/model\ndata: {train: org/d}\n").paths["model.path"]
    assert (fact.kind, fact.parent_exists, fact.nearest) == ("missing", False, None)


@pytest.mark.parametrize(
    "text", ["./m", "../m", "/m", "~/m", "a/b/c", "m.gguf", "x.jsonl", "x.parquet", "a\\b"]
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
    with pytest.raises(HostfileError, match=r"run\.yaml:3: hostfile not found: ") as caught:
        probe(tmp_path, "model: m\ndata: {train: x}\ncluster: {hostfile: host}\n")
    assert caught.value.hint == f"did you mean {tmp_path / 'hosts'}?"
    with pytest.raises(HostfileError, match="is a directory"):
        probe(tmp_path, "model: m\ndata: {train: x}\ncluster: {hostfile: .}\n")


def test_a_wrong_hostfile_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slot=1\n")
    with pytest.raises(ConfigError, match=r"hosts:2:3: 'slot=1' is not slots=N"):
        probe(tmp_path, "model: m\ndata: {train: x}\ncluster: {hostfile: hosts}\n")


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
