"""Host patterns: ranges as Slurm writes them, and the shell's * and ?."""

from __future__ import annotations

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.host_pattern import host_matcher


@pytest.mark.parametrize(
    ("pattern", "fits", "others"),
    [
        ("node-[1-4,7]", ["node-1", "node-4", "node-7"], ["node-5", "node-01", "node-" + "1" * 9999]),
        ("n[01-16]", ["n01", "n16"], ["n1", "n17", "n001"]),
        ("n[8-12]", ["n8", "n10", "n12"], ["n08", "n13"]),
        ("rack[1-2]n[3, 5]", ["rack1n3", "rack2n5"], ["rack1n4", "rack3n3"]),
        ("a100-*", ["a100-", "a100-x.y"], ["a10-1"]),
        ("n?", ["n1", "nx"], ["n", "n12"]),
        ("a.b+c", ["a.b+c"], ["aXb+c", "a.bbc"]),
        ("*", ["anything", "10.0.0.1"], []),
    ],
)  # fmt: skip
def test_which_hosts_a_pattern_fits(pattern: str, fits: list[str], others: list[str]) -> None:
    matches = host_matcher(pattern)
    assert [name for name in fits + others if matches(name)] == fits


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("n[", "[ without"),
        ("n]", "] without"),
        ("n[1-4", "[ without"),
        ("n[a-c]", "a-c is no number or range"),
        ("n[]", "[] is no number or range"),
        ("n[4-1]", "4-1 is no"),
        ("n[1,,2]", "[1,,2] is no"),
    ],
)
def test_what_is_no_pattern(pattern: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        host_matcher(pattern)
    assert part in caught.value.message
    assert "node-[1-4,7]" in (caught.value.hint or "")
