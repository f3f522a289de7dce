"""A model named by its hub id, read from the hub's own cache on disk: nothing is downloaded."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from dslaunch.core.plan import ModelPlan, to_json
from tests.support.python import run_python
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


ASK = """
import sys
from dslaunch.core.errors import DslaunchError
from dslaunch.train.hub import check_hub_model
try:
    check_hub_model(sys.argv[1], None)
except DslaunchError as error:
    print(error.format(), file=sys.stderr)
    sys.exit(error.exit_code)
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
    env = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return run_python("-c", LOAD, json.dumps(to_json(plan)), env=env)


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


def test_without_the_hub_only_what_is_in_the_cache_can_be_had(hub_home: Path) -> None:
    unknown = _load(hub_home, ModelPlan(path="some-org/not-there", kind="hub"))
    assert unknown.returncode == 3
    assert unknown.stderr.startswith(
        "Error: some-org/not-there is no directory here and not in the hub's cache"
    )
    assert "hint: on a machine with network: hf download some-org/not-there" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def _ask(home: Path, name: str, endpoint: str) -> subprocess.CompletedProcess[str]:
    env = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint}
    return run_python("-c", ASK, name, env=env, timeout_s=60)


def test_what_is_in_the_cache_is_not_asked_for(hub_home: Path) -> None:
    assert _ask(hub_home, NAME, "http://127.0.0.1:1").returncode == 0


def test_a_hub_that_gives_no_answer_is_not_waited_for(hub_home: Path) -> None:
    silent = _ask(hub_home, "some-org/not-there", "http://127.0.0.1:1")
    assert silent.returncode == 3
    assert "the hub gives no answer: " in silent.stderr
    assert "Connection refused" in silent.stderr
    assert "Retrying" not in silent.stderr


class _Hub(http.server.BaseHTTPRequestHandler):
    """Knows no model but a gated one, and says so in the hub's own headers."""

    def do_GET(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some-org/not-there", "some-org/not-there is no directory here, and the hub has no such model"),
        ("some-org/gated", "the hub gives some-org/gated only to users that were granted access"),
        ("what is this", "what is this is no directory here, and the hub has no such model"),
    ],
)
def test_a_hub_that_says_no(hub_home: Path, name: str, message: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        refused = _ask(hub_home, name, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"Error: {message}\n")
    assert "HF_TOKEN" in refused.stderr
