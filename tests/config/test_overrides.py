"""--set and flags over a run file: what they reach, what they unset, what they cannot mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.config.load import load_flags, load_run_file
from dslaunch.config.overrides import Override, parse_override
from dslaunch.core.errors import ConfigError
from tests.config.build import SMALL, load, only, problems


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr=1e-4", 1e-4),
        ("optimizer.lr = 3", 3.0),
    ],
)
def test_set_replaces_a_value(override: str, value: float) -> None:
    loaded = load(SMALL + "optimizer: {lr: 5.0e-5, type: SGD}\n", override)
    assert loaded.spec.optimizer.lr == value
    assert loaded.spec.optimizer.type == "SGD"
    assert loaded.positions["optimizer.lr"] == "--set"
    assert loaded.notes == ()


def test_set_reaches_sections_lists_and_shorthands() -> None:
    text = "model: m\ndata: {train: [a, {path: b}]}\n"
    loaded = load(
        text,
        "model.revision=main",
        "data.train[0].weight=2",
        "data.train[1].path=c",
        "data.eval=[d, e]",
        "adapter.r=8",
        "launch.env.GREETING='a=b c'",
    )
    spec = loaded.spec
    assert (spec.model.path, spec.model.revision) == ("m", "main")
    assert [(s.path, s.weight) for s in spec.data.train] == [("a", 2.0), ("c", None)]
    assert [s.path for s in spec.data.eval] == ["d", "e"]
    assert spec.adapter is not None
    assert spec.adapter.r == 8
    assert spec.launch.env == {"GREETING": "a=b c"}


def test_set_null_unsets() -> None:
    assert load(SMALL + "adapter: {r: 4}\n", "adapter=null").spec.adapter is None
    text = SMALL.replace("{train: org/data}", "{train: org/data, eval: org/held-out}")
    assert load(text, "data.eval=null").spec.data.eval == ()
    assert load(SMALL, "data.eval=null").spec.data.eval == ()
    loaded = load(SMALL + "seed: 7\noptimizer:\n  lr: 0.1\n", "seed=null", "optimizer.lr=~")
    assert (loaded.spec.seed, loaded.spec.optimizer.lr) == (42, None)
    assert "seed" not in loaded.positions
    assert only(SMALL, "model=null")[0] == "run.yaml: model is missing"
    found, hint = only(SMALL + "adapter: {r: 4}\n", "adapter=")
    assert (found, hint) == (
        "--set: adapter has no value after the =",
        "write --set adapter=null for the default, --set 'adapter=\"\"' for empty text",
    )


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr.x=3", "optimizer.lr is 0.5 (run.yaml:4)"),
        ("model.path.x=3", "model.path is org/model (run.yaml:1)"),
    ],
)
def test_set_never_goes_through_a_plain_value(override: str, value: str) -> None:
    found, hint = only(SMALL + "optimizer: {lr: 0.5}\n", override)
    key = override.partition("=")[0]
    assert found == f"--set: {key}: {value}, with no keys below it"
    assert hint == f"write --set {key.removesuffix('.x')}=..."


def test_set_does_not_hide_the_problems_of_the_file() -> None:
    found = problems(SMALL + "seed: x\n", "optimizer.lr", "train_batch_size.x=1")
    assert [message for message, _ in found] == [
        "--set 'optimizer.lr' is not of the form key=value",
        "--set: train_batch_size.x: train_batch_size is 8 (run.yaml:3), with no keys below it",
        "run.yaml:4: seed: x is not a whole number",
    ]


def test_what_set_adds_is_not_blamed_on_the_file() -> None:
    found, _ = only(SMALL + "optimizer: {type: SGD}\n", "optimizer.params=3")
    assert found.startswith("--set: optimizer.params: 3")
    assert only(SMALL, "adapter.r.x=3")[0] == "--set: adapter.r: a mapping is not a whole number"


def test_set_writes_a_shorthand_out_and_keeps_its_line() -> None:
    loaded = load(SMALL, "model.revision=main", "data.train[0].weight=2")
    assert loaded.positions["model.path"] == "run.yaml:1"
    assert loaded.positions["model.revision"] == "--set"
    assert loaded.where("data.train[0].path") == "run.yaml:2: "
    assert loaded.where("data.train[0].weight") == "--set: "
    spec = load("model: m\ndata:\n  train: {path: a, split: s}\n", "data.train[0].path=x").spec
    assert [(s.path, s.split) for s in spec.data.train] == [("x", "s")]
    spec = load("model: m\ndata: {train: a}\n", "data.train[0].path=x").spec
    assert [s.path for s in spec.data.train] == ["x"]


def test_the_place_of_a_single_source_set_without_a_list() -> None:
    loaded = load("model: m\ndata:\n  train: {path: a}\n", "data.train.path=x")
    assert (loaded.where("data.train[0].path"), loaded.line("data.train[0].path")) == ("--set: ", 0)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("optimizer.lr", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("a..b=3", "not of the form key=value"),
        ("data.train[x]=3", "not of the form key=value"),
        ("optimizer.lrr=3", "--set: unknown key optimizer.lrr; did you mean lr?"),
        ("seed=x", "--set: seed: x is not a whole number"),
        (
            "optimizer.lr='1e-4'",
            '--set: optimizer.lr: "1e-4" is text because it is quoted; a number is meant',
        ),
        ("seed='1'", '--set: seed: "1" is text because it is quoted; a whole number is meant'),
        ("optimizer.lr=", "--set: optimizer.lr has no value after the ="),
        ("optimizer.lrr=null", "--set: unknown key optimizer.lrr; did you mean lr?"),
        ("optimizer.lr.x=3", "--set: optimizer.lr: a mapping is not a number"),
        ("data.train.path=x", "--set: data.train.path: data.train is a list (run.yaml:2)"),
        ("data[0]=x", "--set: data[0]: data is a section (run.yaml:2)"),
        ("data.eval[0].path=x", "there is no entry [0]: data.eval has 0"),
        ("name=no", "--set: name: YAML reads no as false"),
        ("data.train[3].path=x", "there is no entry [3]"),
        ("seed={", "--set: seed: '{' is not readable as YAML"),
        ("optimizer={lr: 1, lr: 2}", "optimizer.lr is given twice"),
    ],
)
def test_set_is_checked_like_the_file(override: str, part: str) -> None:
    assert part in only("model: m\ndata: {train: [a]}\n", override)[0]


def test_flags_beat_set_and_name_themselves() -> None:
    flags = [Override(("cluster", "num_nodes"), 0, "--num-nodes")]
    with pytest.raises(ConfigError, match=r"--num-nodes: cluster\.num_nodes: 0 is not > 0"):
        load_run_file(Path("run.yaml"), ("cluster.num_nodes=2",), flags, text=SMALL)


def test_a_flag_for_the_length_replaces_the_files_own() -> None:
    spec = load(SMALL + "num_train_epochs: 3\n", "max_steps=10").spec
    assert (spec.num_train_epochs, spec.max_steps) == (None, 10)


def test_flags_alone_need_no_model() -> None:
    spec = load_flags(("optimizer.lr=1e-4",), [Override(("train_batch_size",), 8, "--train-batch-size")]).spec
    assert (spec.model, spec.optimizer.lr, spec.train_batch_size) == (None, 1e-4, 8)
    with pytest.raises(ConfigError, match="unknown key data"):
        load_flags(("data.train=x",))


def test_parse_override_keeps_the_rest_of_the_text() -> None:
    path, tree = parse_override("launch.env.A=x=y z")
    assert path == ("launch", "env", "A")
    assert tree.value[""] == "x=y z"
