"""The wheel holds what it must, nothing else, and works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]
FLAGS = [
    "--zero-stage", "3", "--precision", "bf16", "--num-nodes", "2", "--num-gpus-per-node", "4",
    "--train-batch-size", "64", "--lr", "2e-5",
]  # fmt: skip


def run(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, argv)),
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout as it is, with the installed hatchling: no network."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--wheel-dir", folder, REPO_ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, in a folder far from any checkout."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target]
    run(*pip, wheel, cwd=target)
    return target


def source_files(folder: str) -> set[str]:
    root = REPO_ROOT / folder
    kept = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(REPO_ROOT).as_posix() for path in kept}


def test_wheel_holds_the_package_templates_and_hostfiles(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    templates, hostfiles = source_files("templates"), source_files("hostfiles")
    assert templates
    assert hostfiles
    data = {f"dslaunch/_data/{name}" for name in templates | hostfiles}
    assert names == source_files("dslaunch") | data


def test_installed_wheel_runs_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(installed)}
    python = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    where = run(*python, "-c", "import dslaunch; print(dslaunch.__file__)", cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(installed)
    from_wheel = run(*python, "-m", "dslaunch", "gen-config", *FLAGS, cwd=tmp_path, env=env)
    from_checkout = run(sys.executable, "-m", "dslaunch", "gen-config", *FLAGS, cwd=REPO_ROOT)
    assert from_wheel == from_checkout
    assert '"stage": 3' in from_wheel


def test_installed_wheel_shows_its_templates(installed: Path, tmp_path: Path) -> None:
    listed = run(
        sys.executable, "-m", "dslaunch", "template", "list", cwd=tmp_path, env={"PYTHONPATH": str(installed)}
    )
    assert "deepspeed" in listed


def test_console_script_is_declared(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "dslaunch = dslaunch.cli.main:entry" in archive.read(name).decode()
