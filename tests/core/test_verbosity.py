"""One number in the environment says how much is said."""

from __future__ import annotations

import pytest

from dslaunch.core.verbosity import NORMAL, QUIET, VARIABLE, VERBOSE, verbosity


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("", NORMAL),
        ("0", NORMAL),
        (" ", NORMAL),
        ("1", VERBOSE),
        ("2", VERBOSE),
        ("yes", VERBOSE),
        ("-1", QUIET),
    ],
)
def test_levels(text: str, level: int) -> None:
    assert verbosity({VARIABLE: text}) == level


def test_nothing_is_normal() -> None:
    assert verbosity({}) == NORMAL
