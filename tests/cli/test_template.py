"""dslaunch template list, show, copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.cli.main import main
from dslaunch.core.templating import template_root

NAME = "deepspeed/ds_config.json.j2"


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert NAME in names
    assert "hostfiles/two-nodes" in names
    assert main(["template", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed["templates"]] == names
    assert all(Path(entry["path"]).is_file() for entry in listed["templates"])


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


@pytest.mark.parametrize("name", ["deepspeed/ds_config.json", "../pyproject.toml", "/etc/passwd"])
def test_an_unknown_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["template", "show", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"no template {name!r}" in captured.err
