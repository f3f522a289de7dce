"""A model named by its hub id, read from the hub's own cache on disk: nothing is downloaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.core.plan import ModelPlan, to_json
from tests.support.tiny import make_tiny_model_dir

NAME = "some-org/tiny-llama"
OLD, NEW = "0" * 40, "1" * 40

LOAD = """
import json, sys, torch
from dslaunch.core.errors import DslaunchError
from dslaunch.core.plan import ModelPlan, from_json
from dslaunch.train.model import load_base_model, load_tokenizer
plan = from_json(ModelPlan, json.loads(sys.argv[1]))
try:
    tokenizer = load_tokenizer(plan, torch.float32)
    model = load_base_model(plan, torch.float32)
except DslaunchError as error:
    print(error.format(), file=sys.stderr)
    sys.exit(error.exit_code)
print(len(tokenizer), float(model.get_input_embeddings().weight.double().sum()))
"""


@pytest.fixture(scope="module")
def hub_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF_HOME with one repository of two revisions, laid out as huggingface_hub lays it out."""
    home = tmp_path_factory.mktemp("huggingface")
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    for revision, seed in ((OLD, 1), (NEW, 2)):
        make_tiny_model_dir(repository / "snapshots" / revision, seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEW)
    (repository / "refs" / "v1").write_text(OLD)
    return home


def _load(home: Path, plan: ModelPlan) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(to_json(plan))],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_hub_id_and_its_revision_are_read_from_the_cache(hub_home: Path) -> None:
    main = _load(hub_home, ModelPlan(path=NAME, kind="hub"))
    first = _load(hub_home, ModelPlan(path=NAME, kind="hub", revision="v1"))
    assert (main.returncode, first.returncode) == (0, 0), main.stderr + first.stderr
    local = hub_home / "hub" / "models--some-org--tiny-llama" / "snapshots" / NEW
    same = _load(hub_home, ModelPlan(path=str(local), kind="directory"))
    assert main.stdout == same.stdout
    assert main.stdout != first.stdout


def test_a_repository_with_pickles_only_is_refused(hub_home: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    home = tmp_path / "home"
    shutil.copytree(hub_home, home)
    snapshot = home / "hub" / "models--some-org--tiny-llama" / "snapshots" / NEW
    torch.save(load_file(snapshot / "model.safetensors"), snapshot / "pytorch_model.bin")
    (snapshot / "model.safetensors").unlink()
    refused = _load(home, ModelPlan(path=NAME, kind="hub"))
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert NAME in refused.stderr


def test_an_unknown_hub_id_is_one_sentence(hub_home: Path) -> None:
    unknown = _load(hub_home, ModelPlan(path="some-org/not-there", kind="hub"))
    assert unknown.returncode in (2, 3)
    assert unknown.stderr.startswith("Error: ")
    assert "some-org/not-there" in unknown.stderr
    assert "Traceback" not in unknown.stderr
