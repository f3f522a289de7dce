"""Reading has a bound, and so has computing, in any thread; afterwards everything is as before."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest

from dslaunch.core import bounded as module
from dslaunch.core.bounded import bounded, read_bounded


def test_a_large_or_endless_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_READ", 100)
    (tmp_path / "fits").write_bytes(b"a" * 100)
    assert read_bounded(tmp_path / "fits") == b"a" * 100
    (tmp_path / "large").write_bytes(b"a" * 101)
    for path in (tmp_path / "large", Path("/dev/zero")):
        with pytest.raises(OSError, match="more than 16 MiB"):
            read_bounded(path)


def test_a_smaller_limit_of_the_process_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    low = module._address_space() + 2**27
    resource.setrlimit(resource.RLIMIT_AS, (low, before[1]))
    try:
        with bounded(2**30, 1.0):
            assert resource.getrlimit(resource.RLIMIT_AS)[0] == low
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == low
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_memory_is_bounded_in_another_thread() -> None:
    seen: list[str] = []

    def take() -> None:
        try:
            with bounded(2**26, 1.0):
                bytearray(2**28)
        except MemoryError:
            seen.append("bounded")

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert seen == ["bounded"]
