"""Errors as the user reads them."""

from __future__ import annotations

import pytest

from dslaunch.core.errors import one_line


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
