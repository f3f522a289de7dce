"""Whether a user's script will make DeepSpeed compile, told from its words and from what is built."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import local_topology
from dslaunch.launch import jit_cache
from dslaunch.launch.jit_cache import find_op_to_build, torch_extensions_dir

OP = "deepspeed_shm_comm"


def plan(cwd: Path, *argv: str, **more: Any) -> LaunchPlan:
    values = {"topology": local_topology(2), "run_dir": "/r", "cwd": str(cwd), "device_type": "cpu", **more}
    return LaunchPlan(argv=argv, **values)


def test_a_script_that_names_deepspeed_builds_it_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\n")
    ops = tmp_path / "ops"
    launch, environ = plan(tmp_path, "python", "train.py"), {"TORCH_EXTENSIONS_DIR": str(ops)}
    assert find_op_to_build(launch, environ) == ops
    (ops / OP).mkdir(parents=True)
    (ops / OP / f"{OP}.so").touch()
    assert find_op_to_build(launch, environ) is None
    other = plan(tmp_path, "python", "train.py", env={"TORCH_EXTENSIONS_DIR": "elsewhere"})
    assert find_op_to_build(other, environ) == Path("elsewhere"), "the plan's own beats the environment"


def test_without_a_choice_it_is_in_our_cache(tmp_path: Path) -> None:
    found = find_op_to_build(plan(tmp_path, "python", "-c", "import deepspeed"), {})
    assert found is not None
    assert found.parent.name == "torch_extensions"


def test_every_cuda_torch_and_deepspeed_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an environment that is not ours, as its files tell; nothing of it is started."""
    python, packages = tmp_path / "bin/python", tmp_path / "lib/python3.12/site-packages"
    for path in (python, packages / "torch/version.py"):
        path.parent.mkdir(parents=True)
        path.touch()

    def folder() -> Path:
        jit_cache._key.cache_clear()  # in one process an environment does not change
        return torch_extensions_dir(str(python), {"DSLAUNCH_CACHE": "/c"}, "/")

    def become(torch: str, deepspeed: str, version: str) -> Path:
        for old in packages.glob("*.dist-info"):
            old.rmdir()
        for name, number in (("torch", torch), ("deepspeed", deepspeed)):
            (packages / f"{name}-{number}.dist-info").mkdir()
        (packages / "torch/version.py").write_text(version)
        return folder()

    cuda = "cuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"
    found = [
        become("2.9.0", "0.19.8", "cuda: Optional[str] = None\n"),
        become("2.9.0", "0.19.8", cuda),
        become("2.9.0", "0.19.8", cuda.replace("12.4", "12.8")),
        become("2.9.0", "0.19.8", "cuda = None\nhip = '12.4'\n".replace("12.4", "6.4")),
        become("2.9.1", "0.19.8", cuda),
        become("2.9.0", "0.19.9", cuda),
    ]
    assert len(set(found)) == len(found)
    assert become("2.9.0", "0.19.8", cuda) == found[1]
    monkeypatch.setattr(jit_cache, "cpu_model", lambda: "another CPU")
    assert folder() != found[1]
    jit_cache._key.cache_clear()


def test_the_cuda_of_our_own_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch_extensions_dir(sys.executable, {}, "/")
    assert found == torch_extensions_dir(sys.executable, {}, "/")
    jit_cache._key.cache_clear()
    monkeypatch.setattr(jit_cache, "_CUDA", re.compile("^__version__ = '([^']+)'", re.MULTILINE))
    assert torch_extensions_dir(sys.executable, {}, "/") != found
    jit_cache._key.cache_clear()


@pytest.mark.parametrize(
    ("argv", "more"),
    [
        (("python", "other.py"), {}),
        (("python", "missing.py"), {}),
        (("echo", "hi"), {}),
        (("python", "-c", "import deepspeed"), {"device_type": "cuda"}),
        (("python", "-c", "import deepspeed"), {"via": "ssh"}),
    ],
)
def test_nothing_is_said_of_other_commands(
    tmp_path: Path, argv: tuple[str, ...], more: dict[str, Any]
) -> None:
    (tmp_path / "other.py").write_text("import torch\n")
    assert find_op_to_build(plan(tmp_path, *argv, **more), {}) is None
