"""Files replaced whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dslaunch.core import atomic


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    atomic.write_text(path, "new é")
    assert path.read_bytes() == "new é".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        atomic.write_text(pipe, "in the pipe")
        assert os.read(reader, 100) == b"in the pipe"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    atomic.write_text(link, "gone")
    assert link.is_symlink() and stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "ds_config.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    atomic.write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_mode_follows_the_umask_or_what_is_asked(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        atomic.write_text(tmp_path / "a", "x")
        atomic.write_text(tmp_path / "b", "x", mode=0o600)
        assert os.umask(0o027) == 0o027  # reading the umask has not changed it
    finally:
        os.umask(old)
    assert mode(tmp_path / "a") == 0o640
    assert mode(tmp_path / "b") == 0o600


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    atomic.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        atomic.write_json(path, {"a": float("nan")})
    target = tmp_path / "directory"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        atomic.write_bytes(target, b"x")
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert sorted(item.name for item in tmp_path.iterdir()) == ["directory", "x.json"]


def test_a_missing_folder_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic.write_text(tmp_path / "no" / "x", "x")
