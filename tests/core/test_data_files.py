"""What is read as data, and what the message about it says."""

from __future__ import annotations

import re

from dslaunch.core.data_files import DATA_SUFFIXES, OTHER_SUFFIXES, describe_data_suffixes, is_data_file


def test_the_description_names_every_ending_that_is_read() -> None:
    named = set(re.findall(r"\.\w+", describe_data_suffixes()))
    assert named == {f".{part}" for suffix in DATA_SUFFIXES for part in suffix.split(".")[1:]}


def test_endings_in_any_case() -> None:
    assert all(is_data_file(f"x{suffix.upper()}") for suffix in DATA_SUFFIXES)
    assert not any(is_data_file(f"x{suffix}") for suffix in OTHER_SUFFIXES)
    assert not is_data_file("jsonl")
