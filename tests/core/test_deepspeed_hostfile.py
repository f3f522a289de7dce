"""Hosts for the deepspeed command: what its own parser makes of them, and what is lost and said."""

from __future__ import annotations

import shlex

import pytest

from dslaunch.core.deepspeed_hostfile import render_deepspeed_hostfile
from dslaunch.core.hostfile import parse_hostfile


def read_by_deepspeed(text: str, arguments: tuple[str, ...]) -> dict[str, list[int]]:
    """Host -> slots, as the deepspeed command of this installation resolves them."""
    from deepspeed.launcher.runner import _parse_hostfile, parse_args, parse_inclusion_exclusion

    parsed = parse_args([*arguments, "script.py"])
    pool = _parse_hostfile(text.splitlines(keepends=True))
    return dict(parse_inclusion_exclusion(pool, parsed.include, parsed.exclude))


@pytest.mark.parametrize(
    ("hostfile", "text", "arguments", "resolved"),
    [
        ("a slots=2\nb slots=1\n", "a slots=2\nb slots=1\n", "", {"a": [0, 1], "b": [0]}),
        ("u@a slots=2", "u@a slots=2\n", "", {"u@a": [0, 1]}),
        ("a:22 slots=1\nb:22 slots=1", "a slots=1\nb slots=1\n", "--ssh_port 22", {"a": [0], "b": [0]}),
        ("[fe80::1] slots=2", "fe80::1 slots=2\n", "", {"fe80::1": [0, 1]}),
        (
            "a slots=1,3\nb slots=2",
            "a slots=4\nb slots=2\n",
            "--include a:1,3@b",
            {"a": [1, 3], "b": [0, 1]},
        ),
        ("a slots=3,", "a slots=4\n", "--include a:3", {"a": [3]}),
    ],
)
def test_nothing_is_lost(hostfile: str, text: str, arguments: str, resolved: dict[str, list[int]]) -> None:
    hosts = parse_hostfile(hostfile, "hosts")
    rendered = render_deepspeed_hostfile(hosts)
    assert (rendered.text, shlex.join(rendered.arguments), rendered.lost) == (text, arguments, ())
    assert read_by_deepspeed(rendered.text, rendered.arguments) == resolved


@pytest.mark.parametrize(
    ("hostfile", "resolved", "lost"),
    [
        (
            "a slots=GPU-1,MIG-2\nb slots=2",
            {"a": [0, 1], "b": [0, 1]},
            "a: DeepSpeed numbers devices and cannot be told GPU-1, MIG-2;"
            " its ranks take the first ones that it sees",
        ),
        (
            "a slots=3,1",
            {"a": [1, 3]},
            "a: DeepSpeed numbers its ranks by rising slot, not 3,1",
        ),
        (
            "a slots=1\nb:2222 slots=1\nc:2223 slots=1",
            {"a": [0], "b": [0], "c": [0]},
            "b and 1 more: set Port 2222 in ~/.ssh/config, DeepSpeed has one for all",
        ),
        (
            "u@a slots=1,2",
            {"a": [1, 2]},
            "a: set User u in ~/.ssh/config, --include has no place for it",
        ),
    ],
)
def test_what_is_lost_is_said(hostfile: str, resolved: dict[str, list[int]], lost: str) -> None:
    hosts = parse_hostfile(hostfile, "hosts")
    rendered = render_deepspeed_hostfile(hosts)
    assert rendered.lost == (lost,)
    found = read_by_deepspeed(rendered.text, rendered.arguments)
    assert found == resolved
    assert {name: len(slots) for name, slots in found.items()} == {h.name: len(h.slots) for h in hosts}


def test_include_and_an_ipv6_address() -> None:
    rendered = render_deepspeed_hostfile(parse_hostfile("[fe80::1] slots=1,2", "hosts"))
    assert rendered.lost == ("fe80::1: --include cannot name an IPv6 address; give the host a name",)
