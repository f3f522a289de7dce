"""Locks between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dslaunch.core import file_lock
from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.core.file_lock import LocksUnsupported, LockTimeout, exclusive, is_held, poll

HOLD = (
    "import sys\nfrom pathlib import Path\nfrom dslaunch.core.file_lock import exclusive\n"
    "with exclusive(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()\n"
)


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that holds ``path`` until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_it_excludes_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = holder(path)
    try:
        assert is_held(path)
        with pytest.raises(LockTimeout) as caught, exclusive(path, timeout_s=0):
            pass
        assert caught.value.holder == f"process {other.pid} on {os.uname().nodename}"
        assert caught.value.message == f"{path} is held by {caught.value.holder}"
        assert isinstance(caught.value, EnvironmentNotReady)
    finally:
        other.communicate(timeout=30)
    assert not is_held(path)
    with exclusive(path, timeout_s=0):
        assert is_held(path)


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    other = holder(tmp_path / "lock")
    other.kill()
    other.communicate(timeout=30)
    with exclusive(tmp_path / "lock", timeout_s=0):
        assert is_held(tmp_path / "lock")


def test_it_waits_and_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(file_lock, "SAY_AFTER_S", 0.0)
    other = holder(tmp_path / "lock")
    assert other.stdin is not None
    said: list[str] = []

    def let_go(name: str, waited_s: float) -> None:
        said.append(name)
        other.communicate(timeout=30)

    with exclusive(tmp_path / "lock", on_wait=let_go):
        assert said == [f"process {other.pid} on {os.uname().nodename}"]
    again = holder(tmp_path / "lock")
    timer = threading.Timer(0.3, again.kill)
    timer.start()
    with exclusive(tmp_path / "lock"):
        again.communicate(timeout=30)
    timer.join()
    assert f"waiting for process {again.pid} on" in capsys.readouterr().err


def test_a_child_with_the_descriptor_goes_on_holding(tmp_path: Path) -> None:
    with exclusive(tmp_path / "lock") as fd:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[fd])
    try:
        assert is_held(tmp_path / "lock")
    finally:
        child.communicate(timeout=30)
    assert not is_held(tmp_path / "lock")


def test_other_children_do_not_hold_it(tmp_path: Path) -> None:
    with exclusive(tmp_path / "lock"):
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    try:
        assert not is_held(tmp_path / "lock")
    finally:
        child.communicate(timeout=30)


def test_a_file_system_without_locks_is_told_from_a_held_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(LocksUnsupported, match="No locks available"), exclusive(tmp_path / "lock"):
        pass


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), exclusive(tmp_path / "no" / "lock"):
        pass
    assert not is_held(tmp_path / "no" / "lock")


def test_polling_gives_up() -> None:
    assert not poll(lambda: False, timeout_s=0, on_wait=lambda waited_s: None)
    assert poll(lambda: True, timeout_s=0, on_wait=lambda waited_s: None)
