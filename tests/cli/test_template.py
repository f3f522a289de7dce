"""dslaunch template list, show, copy; and the presets, each used as it comes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main
from dslaunch.config.check import Target, check_config
from dslaunch.core.devices import lookup_device
from dslaunch.core.templating import shipped_files, template_root
from tests.support.deepspeed_config import read_by_deepspeed

NAME = "deepspeed/ds_config.json.j2"
PRESETS = sorted(name for name in shipped_files() if name.startswith("presets/"))


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["template", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["templates"]
    assert [re.split(r"  +", line) for line in lines] == [
        [entry["name"], entry["description"]] for entry in listed
    ]
    names = [entry["name"] for entry in listed]
    assert {NAME, "hostfiles/two-nodes", "presets/full-zero3.yaml"} < set(names)
    assert all(Path(entry["path"]).is_file() for entry in listed)


@pytest.mark.parametrize("name", sorted(shipped_files()))
def test_each_says_in_its_first_line_what_it_is_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = shipped_files()[name].read_text(encoding="utf-8").split("\n")[0]
    assert re.fullmatch(r"\{# [A-Z].*[.?] #\}|# [A-Z].*[.?]", first)
    assert len(first) <= 110


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "show", NAME]) == 0
    assert capsys.readouterr().out == (template_root() / NAME).read_text(encoding="utf-8")


def test_copy(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["template", "copy", "hostfiles/two-nodes"]) == 0
    assert "worker-0 slots=8" in Path("two-nodes").read_text()
    Path("two-nodes").write_text("mine")
    assert main(["template", "copy", "hostfiles/two-nodes"]) == 2
    assert Path("two-nodes").read_text() == "mine"
    assert main(["template", "copy", "hostfiles/two-nodes", "--force"]) == 0
    assert Path("two-nodes").read_text() != "mine"
    assert main(["template", "copy", NAME, "-o", "-"]) == 0


@pytest.mark.parametrize(
    ("name", "then"),
    [
        (NAME, "wrote my file; use it with: dslaunch gen-config --template 'my file'"),
        (
            "presets/cpu-debug.yaml",
            "wrote my file; put your model and data in, then: dslaunch plan 'my file'",
        ),
        ("hostfiles/two-nodes", "wrote my file\n"),
    ],
)
def test_copy_says_what_to_do_next(
    name: str,
    then: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["template", "copy", name, "-o", "my file"]) == 0
    assert capsys.readouterr().err.startswith(then)


@pytest.mark.parametrize("name", ["deepspeed/ds_config.json", "../pyproject.toml", "/etc/passwd"])
def test_an_unknown_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["template", "show", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"no template {name!r}" in captured.err


def test_a_name_without_its_folder_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "copy", "full-zero3"]) == 2
    assert "hint: did you mean presets/full-zero3.yaml?" in capsys.readouterr().err


def test_there_are_presets_for_the_usual_cases() -> None:
    assert {Path(name).stem for name in PRESETS} == {
        "cpu-debug", "full-zero2", "full-zero3", "full-zero3-offload", "lora-single-gpu", "lora-zero2",
        "v100-fp16",
    }  # fmt: skip


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Copies a preset to run.yaml in an empty directory, and gives what it says of its cluster."""
    import yaml

    monkeypatch.chdir(tmp_path)

    def copy(name: str) -> Any:
        assert main(["template", "copy", name, "-o", "run.yaml"]) == 0
        capsys.readouterr()
        return yaml.safe_load(Path("run.yaml").read_text())["cluster"]

    return copy


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_renders_what_deepspeed_accepts_without_findings(
    name: str, copied: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = copied(name)
    assert main(["check", "run.yaml", "--strict"]) == 0
    assert "nothing to say" in capsys.readouterr().err
    assert main(["gen-config", "run.yaml"]) == 0
    captured = capsys.readouterr()
    world_size = cluster["num_gpus_per_node"]
    target = Target(world_size=world_size, devices=(lookup_device(cluster["gpu"]),))
    assert check_config(captured.out, target).findings == ()
    read = read_by_deepspeed(json.loads(captured.out), world_size)
    assert read.train_batch_size == json.loads(captured.out)["train_batch_size"]
    said = ("accumulation", "no parameter groups")  # of sizes chosen, and of what JSON cannot say
    notes = [line for line in captured.err.splitlines() if line and not any(part in line for part in said)]
    assert notes == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_to_a_whole_plan(
    name: str, copied: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = copied(name)
    assert main(["plan", "run.yaml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["world_size"] == cluster["num_gpus_per_node"]
