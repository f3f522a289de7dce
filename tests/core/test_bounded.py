"""Reading has a bound, and so has computing, in any thread; afterwards everything is as before."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from dslaunch.core import bounded as module
from dslaunch.core.bounded import bounded, hint_of, open_regular, read_bounded


def test_a_large_or_endless_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_READ", 100)
    (tmp_path / "fits").write_bytes(b"a" * 100)
    assert read_bounded(tmp_path / "fits") == b"a" * 100
    (tmp_path / "large").write_bytes(b"a" * 101)
    for path in (tmp_path / "large", Path("/dev/zero")):
        with pytest.raises(OSError, match="more than 16 MiB"):
            read_bounded(path)


def test_a_pipe_is_read_and_never_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITER_WAIT_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe that nothing writes to") as raised:
        read_bounded(tmp_path / "pipe")
    assert hint_of(raised.value) == "start what writes to it first, or have it write a file and name that"
    read_end, write_end = os.pipe()  # as of <(command), which may be slow or through already
    slow = threading.Timer(0.5, lambda: (os.write(write_end, b"late"), os.close(write_end)))
    slow.start()
    assert read_bounded(Path(f"/dev/fd/{read_end}")) == b"late"
    slow.join()
    os.close(read_end)
    monkeypatch.setattr(module, "WRITER_WAIT_S", 30)
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"a" * 200_000,))
    writer.start()
    assert read_bounded(tmp_path / "pipe") == b"a" * 200_000
    writer.join()


def test_what_is_read_by_parts_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"text")
    with open_regular(tmp_path / "file") as stream:
        assert stream.read() == b"text"
    for path, why in [("pipe", "it is no regular file"), ("", "Is a directory"), ("none", "No such file")]:
        with pytest.raises(OSError, match=why):
            open_regular(tmp_path / path)
    with pytest.raises(IsADirectoryError) as raised:
        read_bounded(tmp_path)
    assert hint_of(raised.value) is None


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
