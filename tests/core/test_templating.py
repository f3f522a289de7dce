"""Templates: found, rendered with types kept, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.core import templating
from dslaunch.core.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(templating, "template_root", lambda: tmp_path)
    return tmp_path


def test_shipped_files_are_there() -> None:
    names = set(templating.shipped_files())
    assert "deepspeed/ds_config.json.j2" in names
    assert "hostfiles/two-nodes" in names


def test_values_keep_their_type(root: Path) -> None:
    (root / "t.j2").write_text('{"a": {{ a | json }}, "b": {{ b | json }}, "c": {{ c | json }}}')
    text = templating.render_template("t.j2", {"a": 1e-05, "b": True, "c": "x\"<é'\n"})
    assert text == '{"a": 1e-05, "b": true, "c": "x\\"<é\'\\n"}'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{\n{{ nothing | json }}", "t.j2:2: 'nothing' is undefined"),
        ("{\n\n{{ batch.nothing }}", "t.j2:3: "),
        ("{\n{% if %}", "t.j2:2: "),
        ("{% include 'gone.j2' %}", "gone.j2 not found"),
    ],
)
def test_errors_name_file_and_line(root: Path, text: str, part: str) -> None:
    (root / "t.j2").write_text(text)
    with pytest.raises(ConfigError) as caught:
        templating.render_template("t.j2", {"batch": {}})
    assert part in caught.value.message


def test_a_missing_template_is_named(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"template none\.j2 not found"):
        templating.render_template("none.j2", {})
