"""Errors as the user reads them."""

from __future__ import annotations

import pytest

from dslaunch.core.errors import DslaunchError, one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        ("1 error for Config\n  stage\n    must be < 4\n", "1 error for Config stage must be < 4"),
        ("", "ValueError"),
        ("  \n ", "ValueError"),
        ("x" * 20, "x" * 20),
        ("x" * 21, "x" * 19 + "…"),
    ],
)
def test_an_error_on_one_line(text: str, line: str) -> None:
    assert one_line(ValueError(text), limit=20 if "x" in text else 300) == line


def test_a_traceback_ends_with_the_hint_and_what_was_added() -> None:
    error = DslaunchError("no", hint="first")
    error.add_note("more")
    error.hint = "second"
    assert error.__notes__ == ["hint: second", "more"]
