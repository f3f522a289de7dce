"""What a run needs beside the light install, and what is said where it is missing."""

from __future__ import annotations

import sys

import pytest

from dslaunch.core.packages import explain_missing_module, missing_packages


def test_none_is_missing_where_the_tests_run() -> None:
    assert missing_packages() == ()


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("torch", f"torch is not installed for {sys.executable}", "pip install '.[train]'"),
        ("einops", f"the Python module einops is not installed for {sys.executable}", "pip install einops"),
        ("peft.tuners.new", "the Python module peft.tuners.new is not", "constraints.txt"),
    ],
)
def test_a_missing_package_is_no_bug_of_ours(name: str, message: str, hint: str) -> None:
    error = explain_missing_module(ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert error is not None
    assert error.exit_code == 3
    assert error.message.startswith(message)
    assert hint in (error.hint or "")


@pytest.mark.parametrize("name", ["dslaunch.train.typo", None])
def test_a_missing_module_of_our_own_is(name: str | None) -> None:
    assert explain_missing_module(ModuleNotFoundError("No module", name=name)) is None
