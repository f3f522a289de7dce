"""Whether a user's script will make DeepSpeed compile, told from its words and from what is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import local_topology
from dslaunch.launch.jit_cache import find_op_to_build

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
