"""A directory that appears whole, replaces another whole, and leaves nothing of a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.train.publish import new_directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("locked", [False, True])
def test_it_replaces_what_had_the_name(tmp_path: Path, locked: bool) -> None:
    target = tmp_path / "out"
    for text in ("one", "two"):
        with new_directory(target, locked=locked) as scratch:
            (scratch / text).write_text(text)
            assert not (target / text).exists()
        assert names(target) == [text]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("locked", [False, True])
def test_a_failure_changes_nothing(tmp_path: Path, locked: bool) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()

    def fail_half_way() -> None:
        with new_directory(target, locked=locked) as scratch:
            (scratch / "new").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert names(tmp_path) == ["out"] and names(target) == ["old"]


def test_a_term_in_an_export_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from dslaunch.cli.export import cancelled_by_term\n"
        "from dslaunch.train.publish import new_directory\n"
        "with cancelled_by_term(), new_directory(Path(sys.argv[1])) as scratch:\n"
        "    (scratch / 'half').touch(); os.kill(os.getpid(), signal.SIGTERM)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "out")]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (143, "cancelled\n")
    assert names(tmp_path) == []


def test_under_a_lock_the_leftover_of_any_process_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".out.new"
    leftover.mkdir()
    (leftover / "half").touch()
    with new_directory(tmp_path / "out", locked=True) as scratch:
        assert scratch == leftover and names(scratch) == []
    assert names(tmp_path) == ["out"]
