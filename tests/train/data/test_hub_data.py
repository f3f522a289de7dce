"""A data set named by its hub id, read from datasets' own cache on disk: nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dslaunch.core.plan import DataSource, to_json
from tests.support.plans import write_questions
from tests.support.python import run_python
from tests.support.tiny import make_tiny_tokenizer

NAME = "some-org/questions"
OLD, NEW = "0" * 40, "1" * 40

PREPARE = """
import json, sys
from pathlib import Path
from transformers import AutoTokenizer
from dslaunch.core.errors import DslaunchError
from dslaunch.core.plan import DataSource, from_json
from dslaunch.train.data.dataset import TokenizingOptions, prepare_dataset
source, tokenizer, cache = from_json(DataSource, json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
try:
    options = TokenizingOptions(
        tokenizer=AutoTokenizer.from_pretrained(tokenizer), max_length=256, cache_dir=cache,
        max_dropped_fraction=0.0, seed=0,
    )
    data = prepare_dataset([source], options)
except DslaunchError as error:
    print(error.format(), file=sys.stderr)
    sys.exit(error.exit_code)
print([data[i].input_ids.tolist() for i in range(len(data))])
"""

# datasets' own builder of JSON data, in its own layout; only the hub's name is put in by hand.
BUILD = """
import sys
from datasets.packaged_modules.json.json import Json
train, test, cache, revision = sys.argv[1:]
builder = Json(
    cache_dir=cache, dataset_name="questions", hash=revision, data_files={"train": [train], "test": [test]}
)
builder.download_and_prepare()
print(builder.cache_dir)
"""


def offline(home: Path) -> dict[str, str]:
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def put_into_cache(home: Path, revision: str, *, train: Path, test: Path) -> None:
    """``NAME`` at ``revision`` as a first, connected, load_dataset leaves it in HF_HOME."""
    built = run_python("-c", BUILD, train, test, home / "built", revision, env=offline(home))
    assert built.returncode == 0, built.stderr
    target = home / "datasets" / NAME.replace("/", "___") / "default" / "0.0.0" / revision
    shutil.copytree(built.stdout.splitlines()[-1], target)


def prepare(root: Path, path: str, *, kind: str = "hub", split: str = "train") -> tuple[int, str, str]:
    """(exit code, the samples' tokens, the error) of this source with the tokenizer and cache in ``root``."""
    source = DataSource(path=path, kind=kind, split=split)  # type: ignore[arg-type]
    words = (json.dumps(to_json(source)), root / "tokenizer", root / "tokens")
    done = run_python("-c", PREPARE, *words, env=offline(root / "home"))
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for name, count in (("train", 7), ("test", 3), ("newer", 9)):
        write_questions(tmp_path / f"{name}.jsonl", count)
    put_into_cache(tmp_path / "home", OLD, train=tmp_path / "train.jsonl", test=tmp_path / "test.jsonl")
    return tmp_path


def test_a_hub_id_gives_what_its_files_give(root: Path) -> None:
    for split in ("train", "test"):
        code, tokens, error = prepare(root, NAME, split=split)
        assert code == 0, error
        assert tokens == prepare(root, str(root / f"{split}.jsonl"), kind="file")[1]
    put_into_cache(root / "home", NEW, train=root / "newer.jsonl", test=root / "test.jsonl")
    # A newer revision was fetched: the tokens of the older one are not taken for it.
    assert prepare(root, NAME)[1] == prepare(root, str(root / "newer.jsonl"), kind="file")[1]


def test_an_unknown_id_or_split_is_one_sentence(root: Path) -> None:
    code, _, error = prepare(root, NAME, split="validation")
    assert code == 2
    assert f"Error: data set '{NAME}', split 'validation': " in error
    assert "train" in error and "test" in error  # the splits that there are
    code, _, error = prepare(root, "some-org/not-there")
    assert code == 3
    assert "Error: data set 'some-org/not-there' could not be fetched: " in error
    assert "hint: download it on a machine with network" in error
