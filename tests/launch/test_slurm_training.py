"""Real training by DeepSpeed on the nodes of a Slurm job, by the very script that the documentation shows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launching import TIMEOUT_S
from tests.launch.training import losses, make_run
from tests.testbed.slurm import SlurmBed

pytestmark = pytest.mark.needs("root", "slurm", "namespaces")

PAGE = Path(__file__).resolve().parents[2] / "docs/launching.md"


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmBed]:
    with SlurmBed([1, 1], tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def documented_script() -> str:
    found = re.search(r"```bash\n#!/bin/bash\n(#SBATCH.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def test_two_nodes_train_as_two_ranks_of_one_do(
    bed: SlurmBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops_dir: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    # These nodes have less than the documentation's.
    job = bed.submit(documented_script(), "--gpus-per-node=1", "--nodes=2")
    code, _, err = job.wait(4 * TIMEOUT_S)
    assert code == 0, err
    assert "by slurm" in err
    run_dir = next(Path("runs").iterdir())
    words = ["run.yaml", "--num-gpus-per-node", "2", "--run-dir", "one-host"]
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", "launch", *words],
        capture_output=True, text=True, timeout=4 * TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(losses(str(run_dir))) == 3
    assert losses(str(run_dir)) == losses("one-host")
    assert [bed.programs(name) for name in bed.names] == [[], []]
