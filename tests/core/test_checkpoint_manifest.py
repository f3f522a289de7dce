"""What is read of a checkpoint's directory without its tensors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.checkpoint_manifest import (
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    candidates,
    find_fault,
    hash_files,
    latest_checkpoint,
    list_files,
    read_manifest,
)
from dslaunch.core.errors import ConfigError

SAVED = Manifest(
    step=2, world_size=2, zero_stage=3, precision="bf16", deepspeed_version="0.19.8", trainable_only=True,
    trainable={"w": (3, 1)}, extra={"a": [1]}, files={}, weight_sums=((1.5, 2.0), None),
)  # fmt: skip


def write(root: Path, step: int, **more: Any) -> Path:
    """``root/step-N`` with a file in a folder and a manifest, whose fields ``more`` replaces."""
    path = root / f"step-{step}"
    (path / "rng").mkdir(parents=True)
    (path / "rng" / "a").write_text("content")
    files = hash_files(path, list_files(path), sync=True)
    values = dataclasses.replace(SAVED, step=step, files=files).to_json()
    (path / MANIFEST).write_text(json.dumps({**values, **more}))
    return path


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    found = read_manifest(path)
    content = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    assert found == dataclasses.replace(SAVED, files={"rng/a": FileEntry(size=7, sha256=content)})
    assert find_fault(path, found, found.files) is None
    values = json.loads((path / MANIFEST).read_text())
    older = {key: value for key, value in values.items() if key not in ("weight_sums", "engine")}
    (path / MANIFEST).write_text(json.dumps(older))
    assert read_manifest(path) == dataclasses.replace(found, weight_sums=(), engine="deepspeed")


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_a_manifest_of_another_version_is_refused(tmp_path: Path, version: Any) -> None:
    with pytest.raises(ConfigError, match=f"schema_version is {version!r}, this dslaunch reads 1"):
        read_manifest(write(tmp_path, 2, schema_version=version))


def test_what_is_longer_than_it_was_is_a_fault_also_where_its_content_is_not_looked_at(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, 2)
    (path / "rng" / "a").write_text("content and more")
    assert find_fault(path, read_manifest(path), []) == "rng/a has 16 bytes, the manifest says 7"


def test_the_one_that_latest_names_is_the_first_then_the_newest(tmp_path: Path) -> None:
    assert candidates(tmp_path / "none") == [] and latest_checkpoint(tmp_path) is None
    for step in (2, 10, 9):
        write(tmp_path, step)
    (tmp_path / "step-11").touch()
    (tmp_path / "other").mkdir()
    for named, steps in ((b"step-9\n", [9, 10, 2]), (b"step-7", [10, 9, 2]), (b"\xff\xfe", [10, 9, 2])):
        (tmp_path / LATEST).write_bytes(named)
        assert candidates(tmp_path) == [tmp_path / f"step-{step}" for step in steps]
    (tmp_path / "step-10" / MANIFEST).write_text("{")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-9"
