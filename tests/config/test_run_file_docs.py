"""docs/run-file.md and the JSON schema are current, complete and agree with what is accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dslaunch.config import run_file_docs
from dslaunch.config.problems import model_in
from dslaunch.config.spec import RunSpec
from dslaunch.config.synonyms import _KEYS, _NAMES
from dslaunch.core.errors import ConfigError
from tests.config.build import SMALL, load

REPO_ROOT = Path(__file__).resolve().parents[2]


def all_keys(model: Any = RunSpec, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field
        if (inner := model_in(field.annotation)) is not None:
            found |= all_keys(inner, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize(
    ("path", "render"),
    [
        (run_file_docs.MARKDOWN, run_file_docs.render_markdown),
        (run_file_docs.JSON_SCHEMA, run_file_docs.render_json_schema),
    ],
)
def test_the_documents_are_current(path: Path, render: Any) -> None:
    assert (REPO_ROOT / path).read_text(encoding="utf-8") == render(), (
        "run: python -m dslaunch.config.run_file_docs"
    )


def test_every_key_is_described_and_documented() -> None:
    text = run_file_docs.render_markdown()
    assert set(run_file_docs.ORDER) == set(RunSpec.model_fields)
    for key, field in all_keys().items():
        assert field.description, key
        shared = key.replace("data.eval.", "data.train.").replace("offload_param.", "offload_optimizer.")
        assert f"`{shared}`" in text or f"\n## {shared}\n" in text, key


def test_the_smallest_run_file_of_the_document_is_one() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", run_file_docs.render_markdown(), re.DOTALL)
    assert load(example).spec.data.train[0].path == "train.jsonl"


def test_documents_are_written_where_they_belong(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    assert run_file_docs.write_documents(tmp_path) == [run_file_docs.MARKDOWN, run_file_docs.JSON_SCHEMA]
    assert json.loads((tmp_path / run_file_docs.JSON_SCHEMA).read_text())["title"] == "dslaunch run file"


ACCEPTED = [
    SMALL,
    "model: {path: m}\ndata: {train: [a, {path: b, weight: 1}], eval: {path: c}}\nx-mine: 3\n",
    SMALL + "adapter: {target_modules: q_proj, modules_to_save: [a]}\noutput: {report_to: wandb}\n",
    SMALL + "adapter: null\ncluster: {gpu: [a100, v100]}\nlaunch: {secret_env: A}\nfp16: {loss_scale: 12}\n",
    SMALL + "cluster: {gpu: {a: a100, '*': v100}, inventory: i}\n",
    SMALL + "cluster: {gpu: a100}\nfp16: {loss_scale: dynamic}\noptimizer: {params: {betas: [0.9, 0.99]}}\n",
    (REPO_ROOT / "examples/quickstart.yaml").read_text(encoding="utf-8"),
]
REFUSED = [
    "model: m\n",
    SMALL + "modle: m\n",
    SMALL + "optimizer: {lr: -1}\n",
    SMALL + "optimizer: {params: {betas: 0.9}}\n",
    SMALL + "zero_optimization: {stage: 4}\n",
    SMALL + "fp16: {loss_scale: auto}\n",
    SMALL + "cluster: {gpu: {a: 5}}\n",
    SMALL + "output: {report_to: [x]}\n",
    SMALL + "launch: {env: {A: 1}}\n",
    "model: m\ndata: {train: [{path: b, wieght: 1}]}\n",
    "model: m\ndata: {train: 3}\n",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_the_json_schema_accepts_what_we_accept(text: str) -> None:
    load(text)
    jsonschema.Draft202012Validator(json.loads(run_file_docs.render_json_schema())).validate(
        yaml.safe_load(text)
    )


@pytest.mark.parametrize("text", REFUSED)
def test_the_json_schema_refuses_what_we_refuse(text: str) -> None:
    with pytest.raises(ConfigError):
        load(text)
    validator = jsonschema.Draft202012Validator(json.loads(run_file_docs.render_json_schema()))
    assert not validator.is_valid(yaml.safe_load(text))


def test_what_users_know_from_elsewhere_leads_to_keys_that_exist() -> None:
    keys = all_keys()
    for theirs, ours in {**_KEYS, **_NAMES}.items():
        assert ours in keys, theirs
        assert theirs not in keys
