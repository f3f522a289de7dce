"""A host that stands in a hostfile by name and by address."""

from __future__ import annotations

import os
import threading
import time

import pytest

from dslaunch.core.errors import HostfileError
from dslaunch.core.host_lookup import addresses_of, check_named_once
from dslaunch.core.hostfile import parse_hostfile

KNOWN = {"node1": ("10.0.0.1", "fd00::1"), "node2": ("10.0.0.2",)}


def check(text: str) -> list[str]:
    """Check a hostfile against KNOWN; returns the names that were looked up."""
    asked: list[str] = []

    def lookup(names: object) -> dict[str, tuple[str, ...]]:
        asked.extend(names)  # type: ignore[call-overload]
        return {name: KNOWN[name] for name in asked if name in KNOWN}

    check_named_once(parse_hostfile(text, "hosts"), "hosts", lookup)
    return asked


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("node1 slots=1\n10.0.0.1 slots=1", "node1 and 10.0.0.1"),
        ("[FD00:0::1] slots=1\nnode2 slots=1\nnode1 slots=1", "node1 and FD00:0::1"),
    ],
)
def test_a_name_and_its_address(text: str, pair: str) -> None:
    with pytest.raises(HostfileError, match=f"^hosts: {pair} are one host"):
        check(text)


def test_two_names_of_this_machine() -> None:
    own = os.uname().nodename
    for text in (f"{own} slots=1\nlocalhost slots=1", f"node1 slots=1\n{own} slots=1\n127.0.0.2 slots=1"):
        with pytest.raises(HostfileError, match=f"^hosts: {own} and .* are one host: this machine\n"):
            check(text)


def test_others_are_let_pass() -> None:
    assert check("node1 slots=1\n10.0.0.2 slots=1\nunknown slots=1") == ["node1", "unknown"]


@pytest.mark.parametrize("text", ["node1 slots=1\nnode2 slots=1", "10.0.0.1 slots=1\n10.0.0.2 slots=1"])
def test_nothing_is_looked_up_where_there_is_nothing_to_find(text: str) -> None:
    assert check(text) == []


def test_the_name_service_of_this_machine() -> None:
    found = addresses_of(["localhost", "name.invalid"], timeout_s=20)
    assert "127.0.0.1" in found["localhost"] or "::1" in found["localhost"]
    assert found["name.invalid"] == ()


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def silent(*args: object, **options: object) -> list[object]:
        over.wait(60)
        return []

    monkeypatch.setattr("socket.getaddrinfo", silent)
    start = time.monotonic()
    try:
        assert addresses_of([f"n{i}" for i in range(100)], timeout_s=0.2) == {}
        assert time.monotonic() - start < 10
    finally:
        over.set()  # no thread of this test outlives it by long
