"""The status of a run from its files, in every state that a run can be left in."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.observe.run_status import RunStatus, is_over, load_status

START = {"kind": "launch_start", "time": "2026-01-02T03:04:05.000Z"}
UP = {"kind": "host_up", "host": "a"}
RANKS = [{"kind": "rank_start", "rank": rank, "host": "a"} for rank in (0, 1)]
FAILED = {"kind": "first_failure", "rank": 1, "host": "a", "how": "exited with code 9"}


def end(code: int, **more: Any) -> dict[str, Any]:
    return {"kind": "launch_end", "time": "2026-01-02T03:05:05.000Z", "exit_code": code, **more}


def trained(what: str) -> dict[str, Any]:
    """What our trainer itself says, under whichever launcher."""
    return {"kind": f"train_{what}", "time": "2026-01-02T03:06:05.000Z", "step": 1, "total_steps": 4}


def write_lines(path: Path, rows: list[dict[str, Any]], tail: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def run(tmp_path: Path, events: list[dict[str, Any]], metrics: list[dict[str, Any]] | None = None) -> Path:
    path = tmp_path / "r"
    path.mkdir()
    hosts = [{"name": "a", "slots": ["0", "1"]}]
    (path / "plan.json").write_text(json.dumps({"name": "x", "launch": {"topology": {"hosts": hosts}}}))
    write_lines(path / "events.jsonl", events, tail='{"kind": "rank_st')  # one is being written
    if metrics is not None:
        write_lines(path / "metrics.jsonl", metrics)
    return path


@contextmanager
def held(path: Path) -> Iterator[None]:
    with (path / ".lock").open("w") as lock:
        lock.write("process 7 on node-1\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_while_a_launch_holds_the_directory(tmp_path: Path) -> None:
    path = run(tmp_path, [])
    with held(path):
        assert load_status(path).state == "starting"
        write_lines(path / "events.jsonl", [START, UP])
        assert (load_status(path).state, load_status(path).hosts_up) == ("starting", 1)
        write_lines(path / "events.jsonl", [START, UP, *RANKS])
        status = load_status(path)
    assert (status.state, status.ranks_up, status.world_size) == ("running", 2, 2)
    assert status.holder == "process 7 on node-1"


def test_what_the_failed_rank_said_is_trouble(tmp_path: Path) -> None:
    said = {"kind": "rank_error", "rank": 1, "exit_code": 3, "message": "no model x"}
    other = {**said, "rank": 0, "message": "this rank lost the connection to another one"}
    status = load_status(run(tmp_path, [START, UP, *RANKS, other, said, FAILED, end(3)]))
    assert status.trouble == ("rank 1 on a failed first: it exited with code 9", "no model x")


def test_what_a_rank_said_in_an_earlier_start_is_over(tmp_path: Path) -> None:
    said = {"kind": "rank_error", "rank": 1, "exit_code": 3, "message": "no model x"}
    events = [START, UP, *RANKS, said, FAILED, end(3), START, UP, *RANKS, FAILED, end(9)]
    status = load_status(run(tmp_path, events))
    assert status.trouble == ("rank 1 on a failed first: it exited with code 9",)


def test_under_another_launcher_a_rank_says_it_alone(tmp_path: Path) -> None:
    said = {"kind": "rank_error", "rank": 1, "exit_code": 3, "message": "no room"}
    status = load_status(run(tmp_path, [trained("start"), said, {**said, "rank": 0}]))
    assert (status.trouble, status.failed_rank) == (("rank 1: no room",), 1)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "not started"),
        ([START, UP, *RANKS], "gone"),
        ([START, UP, *RANKS, end(0)], "done"),
        ([START, UP, *RANKS, end(75)], "stopped"),
        ([START, UP, *RANKS, end(143)], "cancelled"),
        ([START, UP, *RANKS, FAILED, end(143)], "failed"),  # a rank that was killed by TERM
        ([START, UP, *RANKS, FAILED, end(9)], "failed"),
        ([START, end(3, refused="host a: no program x; nothing was started")], "failed"),
        ([START, UP, *RANKS, FAILED, end(9), START, UP, *RANKS, end(0)], "done"),
        ([trained("start")], "unknown"),
        ([trained("start"), trained("end")], "done"),
        ([trained("start"), trained("stopped")], "stopped"),
        ([START, UP, *RANKS, trained("start"), FAILED, end(9)], "failed"),
        ([START, UP, *RANKS, trained("start"), trained("end")], "gone"),
        ([START, UP, *RANKS, FAILED, end(9), {**trained("start"), "kind": "resumed"}], "unknown"),
    ],
)
def test_afterwards(tmp_path: Path, events: list[dict[str, Any]], state: str) -> None:
    assert load_status(run(tmp_path, events)).state == state


def test_what_went_wrong_is_that_of_the_last_start_and_the_time_that_of_the_launch(tmp_path: Path) -> None:
    begun, waits = [START, UP, *RANKS, FAILED, end(9)], {"kind": "restart", "number": 1}
    again = {**START, "restart": 1, "time": "2026-01-02T03:05:07.000Z"}
    first = load_status(run(tmp_path, [*begun, waits]))  # and was cancelled while it did
    assert first.trouble == ("rank 1 on a failed first: it exited with code 9",)
    assert (first.failed_rank, first.exit_code, first.restarts, first.restarted) == (1, 9, 0, None)
    write_lines(tmp_path / "r/events.jsonl", [*begun, waits, again, UP, *RANKS])
    second = load_status(tmp_path / "r")
    assert (second.trouble, second.failed_rank, second.restarts) == ((), None, 1)
    assert (second.started, second.restarted) == (START["time"], again["time"])
    resumed = {**START, "restart": 0, "time": "2026-01-02T04:00:00.000Z"}  # by another launch
    write_lines(tmp_path / "r/events.jsonl", [*begun, waits, again, UP, *RANKS, end(9), resumed, UP])
    third = load_status(tmp_path / "r")
    assert (third.started, third.restarts, third.restarted) == (resumed["time"], 0, None)


def training(tmp_path: Path, *rows: dict[str, Any]) -> RunStatus:
    events = [START, UP, *RANKS, {**trained("start"), "total_steps": 100}]
    return load_status(
        run(tmp_path, events, [{"time": START["time"], "kind": "train", **row} for row in rows])
    )


def test_progress_and_the_time_to_go(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 10, "loss": 2.0, "skipped": True, "seconds": 30.0},
        {"step": 20, "loss": 1.5, "skipped": False, "seconds": 20.0, "loss_scale": 64.0, "lr": 1e-4},
        {"kind": "eval", "step": 20, "loss": 1.25},
    ]
    progress = training(tmp_path, *rows).progress
    assert progress is not None
    assert (progress.step, progress.total_steps, progress.loss, progress.eval_loss) == (20, 100, 1.5, 1.25)
    assert (progress.skipped_steps, progress.loss_scale, progress.lr) == (1, 64.0, 1e-4)
    assert progress.seconds_left == 160.0  # 20 s for the last 10 steps, 80 steps to go


def test_a_loss_that_is_not_finite_stays_strict_json(tmp_path: Path) -> None:
    status = training(tmp_path, {"step": 1, "loss": "nan", "seconds": 1.0})
    text = json.dumps(status.to_json(), allow_nan=False)
    assert json.loads(text)["progress"]["loss"] == "nan"


def save(path: Path, step: int, text: str = "abc") -> Path:
    """A checkpoint with one file of ``text``, of whose size the manifest says 3."""
    saved = path / f"checkpoints/step-{step}"
    saved.mkdir(parents=True)
    (saved / "a.pt").write_text(text)
    settings = {
        "step": step, "world_size": 1, "zero_stage": 0, "precision": "fp32", "deepspeed_version": "0",
        "trainable_only": False, "trainable": {}, "extra": {}, "schema_version": 1,
        "files": {"a.pt": {"size": 3, "sha256": ""}},
    }  # fmt: skip
    (saved / "manifest.json").write_text(json.dumps(settings))
    return saved


def test_damaged_checkpoints_newer_than_the_newest_whole_one(tmp_path: Path) -> None:
    path = run(tmp_path, [START])
    save(path, 1, "a")  # nobody would come to this one
    save(path, 2)
    save(path, 3, "ab")
    (save(path, 4) / "manifest.json").unlink()
    status = load_status(path)
    assert status.checkpoints == (1, 2, 3, 4)
    assert list(status.damaged) == [4, 3]
    assert "step-4 has no manifest.json" in status.damaged[4]
    assert status.damaged[3] == "a.pt has 2 bytes, the manifest says 3"
    assert json.loads(json.dumps(status.to_json()))["damaged"]["3"] == status.damaged[3]


def test_checkpoints_in_their_order(tmp_path: Path) -> None:
    path = run(tmp_path, [START])
    for name in ("step-10", "step-9", "step-100", "step-x", "tmp-step-11"):
        (path / "checkpoints" / name).mkdir(parents=True)
    assert load_status(path).checkpoints == (9, 10, 100)


def test_where_there_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="run directory not found: /") as caught:
        load_status(tmp_path / "runn")
    assert caught.value.hint == f"did you mean {tmp_path / 'run'}?"
    with pytest.raises(ConfigError, match="holds no run: there is no plan") as caught:
        load_status(tmp_path / "run")
    assert caught.value.hint == "give the directory that `dslaunch launch` named, which holds plan.json"
    (tmp_path / "run/diagnosis.json").touch()
    with pytest.raises(ConfigError) as caught:
        load_status(tmp_path / "run")
    assert caught.value.hint is not None and f"`dslaunch diagnose {tmp_path / 'run'}`" in caught.value.hint
    (tmp_path / "run/base").mkdir()
    (tmp_path / "run/base/plan.json").touch()
    with pytest.raises(ConfigError) as caught:
        load_status(tmp_path / "run")
    assert caught.value.hint == f"it holds {tmp_path / 'run/base'}"
    for number in range(10):
        (tmp_path / f"run/base-{number}").mkdir()
        (tmp_path / f"run/base-{number}/plan.json").touch()
    with pytest.raises(ConfigError) as caught:
        load_status(tmp_path / "run")
    assert caught.value.hint is not None and caught.value.hint.count("/run/base-") == 8
    assert caught.value.hint.startswith("it holds 11 runs, among them ")
    for launch in (3, {"topology": [1]}, {"topology": {"hosts": [{"name": "a"}]}}):
        (tmp_path / "run/plan.json").write_text(json.dumps({"launch": launch}))
        with pytest.raises(ConfigError, match="topology is not that of a plan"):
            load_status(tmp_path / "run")
    (tmp_path / "run/plan.json").write_text("[")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_status(tmp_path / "run")


def test_lines_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    whole: list[dict[str, Any]] = [START, UP, *RANKS, FAILED, end(9)]
    time, others = START["time"], [{"kind": kind} for kind in (None, 7, [], {}, "some-later-kind")]
    full: list[dict[str, Any]] = [
        *whole,
        {"kind": "restart", "number": 1},
        {"kind": "host_lost", "host": "a", "how": "it is silent"},
        {"kind": "rank_exit", "rank": 1},
        {"kind": "rank_error", "rank": 1, "message": "no"},
        *({"kind": kind, "time": time} for kind in ("train_start", "resumed", "train_end", "train_stopped")),
    ]
    read = ("time", "host", "rank", "how", "exit_code", "number", "message")
    broken = [
        {key: other if key == name else value for key, value in event.items() if (key, other) != (name, None)}
        for event in full
        for name in set(read) & {*event} - ({"host"} if event["kind"] == "rank_start" else set())
        for other in (None, [], {"a": 1}, 7 if isinstance(event[name], str) else "7")
    ]
    path = run(tmp_path, whole)
    wanted = load_status(path)
    write_lines(path / "events.jsonl", [*whole, *broken, *others])
    write_lines(path / "metrics.jsonl", [{"kind": "train"}, {"kind": "train", "step": "x", "time": 1}, {}])
    assert load_status(path) == wanted


def test_what_follows_a_run_ends_with_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run(tmp_path, [])
    assert is_over(path)  # not started
    with held(path):
        assert not is_over(path)
        write_lines(path / "events.jsonl", [START, UP, *RANKS, FAILED, end(9)])
        assert not is_over(path)  # it is about to start again
    assert is_over(path)
    write_lines(path / "events.jsonl", [trained("start")])
    assert is_over(path)  # under another launcher: none of ours writes logs


@pytest.mark.parametrize(("events", "over"), [([], True), ([START], False), ([START, end(9)], True),
                                              ([START, end(9), START, UP], False)])  # fmt: skip
def test_where_locks_cannot_tell_its_events_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[dict[str, Any]], over: bool
) -> None:
    def refuse(path: Path) -> bool:
        raise OSError(95, "no locks here")

    monkeypatch.setattr("dslaunch.observe.run_status.is_held", refuse)
    assert is_over(run(tmp_path, events)) is over


def test_after_a_time_out_it_says_where_the_ranks_were(tmp_path: Path) -> None:
    places = ["rank 1 on a: in read", "rank 0 on a: waiting in all_reduce"]
    status = load_status(run(tmp_path, [START, UP, *RANKS, FAILED, end(9, places=places)]))
    assert status.trouble == ("rank 1 on a failed first: it exited with code 9", *places)


@pytest.mark.parametrize("code", [129, 130, 142, 143])
def test_a_cancel_is_known_by_its_code(tmp_path: Path, code: int) -> None:
    assert load_status(run(tmp_path, [START, UP, *RANKS, end(code)])).state == "cancelled"
