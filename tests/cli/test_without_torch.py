"""The light install (`pip install .`): what trains says in one sentence that its packages are missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.core.packages import HOW_TO_INSTALL

REPO_ROOT = Path(__file__).resolve().parents[2]
LIGHT = (
    "click", "jinja2", "markupsafe", "yaml", "pydantic", "pydantic_core", "annotated_types",
    "typing_extensions", "typing_inspection",
)  # fmt: skip
RUN = "model: m\ndata: {train: d.jsonl}\ntrain_batch_size: 2\nprecision: fp32\n"
RECORD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with dslaunch and the packages of the light install, and nothing else."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "dslaunch").symlink_to(REPO_ROOT / "dslaunch")
    for name in LIGHT:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        file = Path(spec.origin)
        found = file.parent if file.name == "__init__.py" else file
        (folder / found.name).symlink_to(found)
    return folder


def run(light: Path, cwd: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """``python -m`` without site-packages (-S), as it is where they were never installed."""
    return subprocess.run(
        [sys.executable, "-S", "-m", *argv], cwd=cwd, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(light), "DS_ACCELERATOR": "cpu", **environ},
    )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run file with its data and model, a run with a checkpoint, an adapter: what is looked at first."""
    (tmp_path / "run.yaml").write_text(RUN + "cluster: {num_gpus_per_node: 1}\n")
    (tmp_path / "d.jsonl").write_text(RECORD * 2)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "r" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    return tmp_path


@pytest.mark.parametrize(
    "line", ["launch run.yaml --run-dir new", "export r -o out", "generate a --prompt hi"]
)
def test_a_verb_that_trains_or_loads_names_the_packages(light: Path, place: Path, line: str) -> None:
    done = run(light, place, "dslaunch", *line.split())
    assert done.returncode == 3, done.stderr
    missing, _, where = done.stderr.partition("Error: ")[2].partition(" are not installed for ")
    assert {"torch", "deepspeed", "transformers", "peft"} < set(missing.split(", "))
    assert where.startswith(sys.executable)
    assert done.stderr.endswith(f"hint: {HOW_TO_INSTALL}\n")
    assert "our bug" not in done.stderr
    assert done.stdout == ""
    assert not (place / "new").exists()


def test_a_rank_says_it_too(light: Path, place: Path) -> None:
    """As where another Python's ranks, or another host's, lack them."""
    dry_run = [
        sys.executable,
        "-m",
        "dslaunch",
        "launch",
        "run.yaml",
        "--run-dir",
        "p",
        "--dry-run",
        "--json",
    ]
    made = subprocess.run(dry_run, cwd=place, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    (place / "p").mkdir()
    (place / "p" / "plan.json").write_text(json.dumps(json.loads(made.stdout)["plan"]))
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    done = run(light, place, "dslaunch.train.worker", "--plan", "p/plan.json", **ranks)
    assert done.returncode == 3, done.stderr
    assert f"not installed for {sys.executable}\n\nhint: {HOW_TO_INSTALL}\n" in done.stderr
