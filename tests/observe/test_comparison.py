"""Two runs side by side, from directories as runs leave them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.comparison_table import comparison_lines
from dslaunch.core.errors import ConfigError
from dslaunch.observe.comparison import Comparison, Pair, compare_runs

HOSTS = [{"name": "a", "slots": ["0", "1"]}]


def row(step: Any, loss: Any, norm: Any = 1.0, scale: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train", "time": "2026-01-02T03:04:06.000Z", "step": step, "loss": loss, "grad_norm": norm,
        "loss_scale": scale, "skipped": False, "num_tokens": 100, "seconds": 2.0, "data_digest": f"d{step}",
        **more,
    }  # fmt: skip


def write(
    path: Path, rows: list[dict[str, Any]], events: tuple[dict[str, Any], ...] = (), **plan: Any
) -> Path:
    path.mkdir()
    whole = {"name": path.name, "launch": {"topology": {"hosts": HOSTS}}, "precision": "bf16", **plan}
    (path / "plan.json").write_text(json.dumps(whole))
    for name, lines in (("metrics", rows), ("events", events)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def both(tmp_path: Path, base: list[dict[str, Any]], changed: list[dict[str, Any]]) -> Comparison:
    return compare_runs(
        write(tmp_path / "base", base, engine="deepspeed", zero_stage=2),
        write(tmp_path / "changed", changed, engine="torch", zero_stage=0),
    )


def test_steps_are_laid_side_by_side_and_the_largest_difference_is_found(tmp_path: Path) -> None:
    found = both(
        tmp_path,
        [row(1, 4.0), row(2, 3.0), row(3, 2.0)],
        [row(1, 4.0), row(2, 2.5, norm=3.0), row(3, 2.25), row(4, 9.0)],
    )
    assert found.steps[2]["loss"] == Pair(3.0, 2.5)
    assert found.steps[4]["loss"] == Pair(None, 9.0)
    largest = found.to_json()["largest"]
    assert largest["loss"] == {"step": 2, "absolute": 0.5, "relative": pytest.approx(0.5 / 3)}
    assert largest["grad_norm"] == {"step": 2, "absolute": 2.0, "relative": pytest.approx(2 / 3)}
    assert found.first_other_data() is None  # of step 4 one has none
    text = "\n".join(comparison_lines(found))
    assert "loss: largest difference 0.5 (17 %) at step 2" in text
    assert "   2   3.000000      2.500000   -0.500000          1             3" in text
    assert "scale" not in text


def test_of_differences_alike_the_first_is_named_and_nothing_is_divided_by_0(tmp_path: Path) -> None:
    base = [row(step, 1.0, norm=0.0) for step in (1, 2, 3)]
    found = both(tmp_path, base, [row(1, 1.0, norm=0.0), row(2, 2.0, norm=0.0), row(3, 2.0, norm=0.0)])
    assert found.largest("loss") == (2, 1.0, 0.5)
    assert found.largest("grad_norm") == (1, 0.0, 0.0)


def test_what_is_not_finite_is_shown_and_not_measured(tmp_path: Path) -> None:
    found = both(tmp_path, [row(1, 1.0), row(2, "nan")], [row(1, 1.0), row(2, 7.0)])
    largest = found.largest("loss")
    assert largest is not None and largest.absolute == 0.0
    report = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert report["steps"][1]["loss"] == {"base": "nan", "changed": 7.0}
    assert "   2        nan      7.000000         nan" in "\n".join(comparison_lines(found))


def test_scale_and_skipped_steps(tmp_path: Path) -> None:
    scales = [row(1, 1.0, "inf", 8.0, skipped=True), row(2, 1.0, scale=4.0), row(3, 1.0, scale=8.0)]
    found = both(tmp_path, scales, [row(step, 1.0, scale=16.0) for step in (1, 2, 3)])
    assert (found.base.num_skipped, found.changed.num_skipped) == (1, 0)
    lines = comparison_lines(found)
    (course,) = [line for line in lines if line.startswith("loss scale ")]
    assert re.split(" {2,}", course)[-2:] == ["8 to 8, fell 1 x, grew 1 x", "16 throughout"]
    assert (
        "   1   1.000000      1.000000   +0.000000  inf skipped             1           8             16"
        in lines
    )
    assert "loss: the same at every step" in lines


def test_other_data_is_told(tmp_path: Path) -> None:
    found = both(tmp_path, [row(1, 1.0), row(2, 1.0)], [row(1, 1.0), row(2, 1.0, data_digest="other")])
    assert found.to_json()["first_other_data"] == 2
    assert "differ from step 2 on: losses cannot be compared" in "\n".join(comparison_lines(found))


def test_speed_leaves_the_first_step_out_and_a_step_done_again_counts_once(tmp_path: Path) -> None:
    slow = row(1, 1.0, seconds=50.0)
    base = both(tmp_path, [slow, row(2, 9.0), row(2, 1.0), row(3, 1.0)], [slow]).base
    assert (base.tokens_per_s, base.rows[2]["loss"]) == (50.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "speed"),
    [
        ([row(1, 1.0, seconds=50.0)], 2.0),
        ([row(1, 1.0), row(2, 1.0, seconds=3.0)], 33.3),
        ([row(1, 1.0), row(2, 1.0, seconds=0.0)], None),
        ([row(1, 1.0), row(2, 1.0), row(3, 1.0, num_tokens=None)], None),
        ([], None),
    ],
)
def test_an_only_step_has_its_own_speed_and_what_is_not_known_none(
    tmp_path: Path, rows: list[dict[str, Any]], speed: float | None
) -> None:
    assert both(tmp_path, rows, []).base.tokens_per_s == speed


def test_peak_memory_is_the_devices_else_that_of_the_fullest_rank_of_the_last_start(tmp_path: Path) -> None:
    sizes = ((0, 7), (1, 9), (2, 8), (3, None))
    ends = [{"kind": "rank_exit", "rank": rank, "max_rss_bytes": size} for rank, size in sizes]
    events = ({"kind": "rank_exit", "rank": 0, "max_rss_bytes": 99}, {"kind": "launch_start"}, *ends)
    on_device = [row(step, 1.0, peak_memory_bytes=size) for step, size in ((1, 5), (2, 6), (3, 4))]
    found = compare_runs(
        write(tmp_path / "base", [row(1, 1.0, peak_memory_bytes=None)], events),
        write(tmp_path / "changed", on_device, events),
    )
    assert (found.base.peak_memory_bytes, found.base.peak_memory_of) == (9, "process")
    assert (found.changed.peak_memory_bytes, found.changed.peak_memory_of) == (6, "device")


def test_settings_that_differ(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"optimizer": {"lr": 1.0, "params": {"eps": 2}}}
    shared |= {"origins": {"a": 1}, "ds_config": {"b": 1}}
    shared["launch"] = {"topology": {"hosts": HOSTS}, "argv": ["a"], "run_dir": "/a"}
    other: dict[str, Any] = {"optimizer": {"lr": 1.0, "params": {}}, "engine": "torch"}
    other |= {"origins": {"a": 2}, "ds_config": {"b": 2}}
    other["launch"] = {"topology": {"hosts": HOSTS}, "argv": ["b"], "run_dir": "/b"}
    found = compare_runs(
        write(tmp_path / "base", [], **shared), write(tmp_path / "changed", [], **other)
    ).to_json()["differences"]
    assert found == [
        {"key": "name", "base": "base", "changed": "changed"},
        {"key": "optimizer.params.eps", "base": 2, "changed": None},
        {"key": "engine", "base": None, "changed": "torch"},
    ]


def test_what_became_of_each_side(tmp_path: Path) -> None:
    time = "2026-01-02T03:04:06.000Z"
    note = {"kind": "note", "message": "a clock is wrong"}
    how = {"rank": 1, "host": "a", "how": "exited with code 9"}
    events: tuple[dict[str, Any], ...] = (
        {"kind": "launch_start", "time": time}, note, note, {"kind": "other", "message": "no note"},
        {"kind": "first_failure", **how}, {"kind": "launch_end", "time": time, "exit_code": 9},
    )  # fmt: skip
    evals = [{"kind": "eval", "step": step, "loss": loss} for step, loss in ((2, "inf"), (1, 3.5))]
    autocast = {"engine": "deepspeed", "zero_stage": 3, "torch_autocast": "bf16"}
    found = compare_runs(
        write(tmp_path / "base", [row(1, 1.0), *evals, row("2", 1.0)], events, **autocast),
        write(tmp_path / "changed", [], engine="torch", zero_stage=0),
    ).to_json()
    base, changed = found["base"], found["changed"]
    assert (base["state"], base["exit_code"], base["num_steps"]) == ("failed", 9, 1)
    assert base["trouble"] == ["rank 1 on a failed first: it exited with code 9"]
    assert base["eval"] == [{"step": 1, "loss": 3.5}, {"step": 2, "loss": "inf"}]
    assert base["notes"] == ["a clock is wrong"]
    assert (base["zero_stage"], base["weights_in_fp32"]) == (3, True)
    assert (changed["zero_stage"], changed["weights_in_fp32"]) == (None, True)
    (tmp_path / "base" / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"plan\.json is not JSON"):
        compare_runs(tmp_path / "base", tmp_path / "changed")


@pytest.mark.parametrize(("precision", "in_fp32"), [("fp32", True), ("bf16", False)])
def test_weights_of_deepspeed_are_in_fp32_as_the_precision_says(
    tmp_path: Path, precision: str, in_fp32: bool
) -> None:
    path = write(tmp_path / "run", [], engine="deepspeed", precision=precision)
    assert compare_runs(path, path).base.weights_in_fp32 is in_fp32


def test_a_side_that_was_never_started(tmp_path: Path) -> None:
    (tmp_path / "changed").mkdir()
    found = compare_runs(write(tmp_path / "base", [row(1, 1.0)]), tmp_path / "changed")
    report = found.to_json()
    assert (report["changed"]["state"], report["changed"]["num_steps"]) == ("not started", 0)
    assert report["differences"] == []
    lines = comparison_lines(found)
    (ended,) = [line for line in lines if line.startswith("ended")]
    assert ended.endswith("not started")
    assert "   1   1.000000             -           -          1             -" in lines


def test_of_a_long_course_some_steps_are_shown_and_the_widest_is_among_them(tmp_path: Path) -> None:
    base = [row(step, 1.0) for step in range(1, 1001)]
    changed = [row(step, 5.0 if step == 437 else 1.0) for step in range(1, 1001)]
    lines = comparison_lines(both(tmp_path, base, changed))
    shown = [int(line.split()[0]) for line in lines if line.lstrip()[:1].isdigit() and "1.000000" in line]
    assert {1, 437, 1000} <= set(shown)
    assert len(shown) <= 41
    assert f"{len(shown)} of 1000 steps are shown; --json has all" in lines
