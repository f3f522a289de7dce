"""dslaunch explain: keys in words, and the course of the loss scale."""

from __future__ import annotations

import json

import pytest

from dslaunch.cli.explain import parse_steps
from dslaunch.cli.main import main
from dslaunch.config.schema import key_table
from dslaunch.config.schema.other_names import OTHER_NAMES
from dslaunch.core.errors import ConfigError

Capture = pytest.CaptureFixture[str]


def test_a_key(capsys: Capture) -> None:
    assert main(["explain", "fp16.initial_scale_power"]) == 0
    out = capsys.readouterr().out
    assert "65536" in out and "default   16" in out


def test_a_name_that_several_sections_have(capsys: Capture) -> None:
    assert main(["explain", "pin_memory", "--json"]) == 0
    keys = [key["key"] for key in json.loads(capsys.readouterr().out)["keys"]]
    assert len(keys) == 3 and all(key.endswith(".pin_memory") for key in keys)


def test_every_key_can_be_explained(capsys: Capture) -> None:
    for path in key_table():
        assert main(["explain", path]) == 0
        assert path in capsys.readouterr().out


def test_an_unknown_key(capsys: Capture) -> None:
    assert main(["explain", "gradient_cliping"]) == 2
    assert "did you mean gradient_clipping?" in capsys.readouterr().err


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_of_another_tool(capsys: Capture, name: str) -> None:
    own = OTHER_NAMES[name]
    assert name not in key_table(), "DeepSpeed has a key of that name: explain shows that one"
    assert main(["explain", name]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == own
    assert err == f"{name} of other tools is {own} in a DeepSpeed config\n"
    assert main(["explain", name, "--json"]) == 0
    (key,) = json.loads(capsys.readouterr().out)["keys"]
    assert own.startswith(key["key"])


def test_the_list(capsys: Capture) -> None:
    assert main(["explain", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(key_table())
    assert main(["explain", "fp16", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(key.split(".")[0] == "fp16" for key in key_table())
    assert all(line.startswith("fp16") for line in lines)


def test_an_argument_of_an_optimizer(capsys: Capture) -> None:
    assert main(["explain", "optimizer.params.betas"]) == 0
    out = capsys.readouterr().out
    assert "AdamW" in out
    assert "0.9, 0.999" in out
    assert "0.9 looks back about 10" in out
    assert main(["explain", "warmup_num_steps", "--json"]) == 0
    (key,) = json.loads(capsys.readouterr().out)["keys"]
    assert (key["key"], key["default"]) == ("scheduler.params.warmup_num_steps", "1000")
    assert key["taken_by"] == ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


@pytest.mark.parametrize("flag", [["--steps", "3"], ["--overflow-at", ""], ["--set", "fp16.hysteresis=1"]])
def test_what_shapes_the_course_of_the_scale_is_for_that_alone(flag: list[str], capsys: Capture) -> None:
    assert main(["explain", "stage", *flag]) == 2
    assert "--overflow-at, --steps and --set go with `dslaunch explain loss-scale`" in capsys.readouterr().err
    assert main(["explain", "loss-scale", "--list"]) == 2


def test_the_loss_scale(capsys: Capture) -> None:
    argv = ["explain", "loss-scale", "--overflow-at", "1,2,3,40", "--steps", "60"]
    assert main([*argv, "--set", "fp16.loss_scale_window=10"]) == 0
    out = capsys.readouterr().out
    assert "starts at 2^16 = 65536" in out
    assert "step     2  scale 65536       overflow, step skipped; the scale is halved to 32768" in out
    plot = [line for line in out.splitlines() if line.endswith("##") or " |" in line]
    skipped = next(line.partition("|")[2] for line in plot if "skipped |" in line)
    assert [column + 1 for column, mark in enumerate(skipped) if mark == "x"] == [1, 2, 3, 40]


def test_an_overflow_after_the_last_step_is_not_swallowed(capsys: Capture) -> None:
    argv = ["explain", "loss-scale", "--overflow-at", "70"]
    assert main([*argv, "--steps", "60"]) == 2
    assert "step 70 is not among the 60 of --steps" in capsys.readouterr().err
    assert main([*argv, "--set", "fp16.initial_scale_power=20"]) == 0
    assert "step    70  scale 1048576     overflow, step skipped" in capsys.readouterr().out


def test_the_loss_scale_as_json(capsys: Capture) -> None:
    settings = ["--set", "fp16.initial_scale_power=8", "--set", "fp16.hysteresis=1"]
    assert main(["explain", "loss-scale", "--overflow-at", "1-20", "--steps", "30", *settings, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["scale"] for step in steps] == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert steps[-1]["event"] == "stopped"


def test_a_long_course_fits_the_line(capsys: Capture) -> None:
    assert main(["explain", "loss-scale", "--overflow-at", "5000", "--steps", "10000"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 140


@pytest.mark.parametrize(
    "setting",
    [
        "fp16.hysteresis=0", "fp16.hysteresis=two", "fp16.nothing=1", "hysteresis", "fp16.min_loss_scale=-1",
        "fp16.initial_scale_power=64", "fp16.loss_scale=NaN", "fp16.loss_scale=1e400",
        f"fp16.loss_scale=1{'0' * 400}", f"fp16.min_loss_scale=1{'0' * 400}",
    ],
)  # fmt: skip
def test_settings_are_checked_as_a_config_is(setting: str, capsys: Capture) -> None:
    assert main(["explain", "loss-scale", "--set", setting]) == 2
    assert setting.partition("=")[0] in capsys.readouterr().err


def test_a_scale_past_the_largest_float(capsys: Capture) -> None:
    argv = ["explain", "loss-scale", "--set", "fp16.loss_scale_window=1", "--set", "fp16.min_loss_scale=1"]
    argv += ["--set", "fp16.initial_scale_power=63", "--steps", "964"]
    assert main(argv) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("#")]
    assert rows[0].split()[0] == "inf"
    assert main([*argv, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["steps"]
    assert [step["scale"] for step in steps[-4:]] == [2.0**1022, 2.0**1023, None, None]


def test_an_empty_key(capsys: Capture) -> None:
    assert main(["explain", ""]) == 2
    assert main(["explain", " ", "--list"]) == 2
    assert "KEY is empty" in capsys.readouterr().err


def test_steps_and_ranges() -> None:
    assert parse_steps("1, 3,5-7") == {1, 3, 5, 6, 7}
    assert parse_steps("") == frozenset()
    for text in ("0", "a", "3-1", "-1", "1-2-3"):
        with pytest.raises(ConfigError):
            parse_steps(text)


def test_flags_of_the_loss_scale_need_it(capsys: Capture) -> None:
    assert main(["explain", "fp16", "--overflow-at", "1"]) == 2
    assert main(["explain"]) == 2
