"""The lock excludes, and dies with its holder."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dslaunch.train.data import file_lock
from dslaunch.train.data.file_lock import exclusive, is_held

HOLD = """
import sys, time
from pathlib import Path
from dslaunch.train.data.file_lock import exclusive
with exclusive(Path(sys.argv[1]), "holding"):
    print("held", flush=True)
    time.sleep(120)
"""


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            assert is_held(path)
            entered = threading.Event()

            def enter() -> None:
                with exclusive(path, "waiting"):
                    entered.set()

            waiter = threading.Thread(target=enter)
            waiter.start()
            assert not entered.wait(0.3)
        finally:
            holder.kill()
    waiter.join(30)
    assert entered.is_set()
    assert not is_held(path)


def test_a_long_wait_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(file_lock, "_SAY_AFTER_S", 0.0)
    path = tmp_path / "x.lock"
    release = threading.Event()
    held = threading.Event()

    def hold() -> None:
        with exclusive(path, "first"):
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    threading.Timer(0.3, release.set).start()
    with exclusive(path, "tokenising d.jsonl"):
        pass
    holder.join(30)
    assert capsys.readouterr().err.startswith("waiting for another process: tokenising d.jsonl (")


def test_nobody_holds_a_lock_that_was_never_taken(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "none.lock")
