"""One log written in many ways, run directories, and logs that are long, cut or no logs at all."""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from dslaunch.cli.diagnose import diagnosis_lines
from dslaunch.core.errors import ConfigError
from dslaunch.core.events import JsonlWriter
from dslaunch.observe.diagnose.read import diagnose
from dslaunch.observe.diagnose.source import _without_escapes
from tests.observe.diagnose.logs import names, overflow_line, read, scales_by_step, zero_log
from tests.oracles.loss_scaler import Scaler


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_interleave_say_the_same_as_one(seed: int, tmp_path: Path) -> None:
    """Each rank says its lines in order, up to two steps late."""
    overflows = {1, 2, 3, 40, 90, 91}
    simulated = zero_log(overflows, 120)
    made = simulated.lines
    times = [sum(low < step < high for step in simulated.growths) for low, high in ((3, 40), (40, 90))]
    alone = read(tmp_path, made, loss_scale_window=10.0)
    draw = random.Random(seed)
    keyed = [(float(place), line) for place, line in enumerate(made)]
    for rank in range(1, 5):
        last = 0.0
        for place, line in enumerate(made):
            if "Rank 0" in line:
                last = max(last, place + draw.random() * 6)
                keyed.append((last, line.replace("Rank 0", f"Rank {rank}")))
    found = read(tmp_path, [line for _, line in sorted(keyed)], loss_scale_window=10.0)
    assert found.num_overflows == alone.num_overflows == 6
    for course in (found.course, alone.course):  # what comes after the last overflow depends on its very step
        assert [growth.times for growth in course.growths if growth.before_step] == times
        assert {scale for _, scale in course.points} >= set(simulated.scales[:92])
    assert names(found) == names(alone)


def test_ranks_without_a_name_are_counted_once(tmp_path: Path) -> None:
    """DeepSpeed 0.1 says no rank: four lines at once are one overflow, the same ones later another."""

    def burst(before: int, minute: int) -> list[str]:
        line = (
            f"[2026-03-01 10:{minute:02}:00,100] [INFO] [deepspeed] OVERFLOW! Skipping step. Attempted loss "
        )
        return [f"{line}scale: {before}, reducing to {before // 2}"] * 4

    found = read(tmp_path, [*burst(64, 0), *burst(32, 1), *burst(16, 2), *burst(16, 50)])
    assert found.num_overflows == 4


def test_stage_0_repeats_itself(tmp_path: Path) -> None:
    lines = []
    for iteration, before in ((0, 64), (1, 32), (30, 32)):
        block = [
            f"Grad overflow on iteration {iteration}",
            f"Reducing dynamic loss scale from {before} to {before / 2}",
            "[Rank 0] Overflow detected. Skipping step. "
            f"Attempted loss scale: {before}, reducing to {before / 2}",
        ]
        lines += [line for line in block for _ in range(3)]
        if iteration == 1:
            lines += [
                "No Grad overflow for 20 iterations",
                "Increasing dynamic loss scale from 16.0 to 32.0",
            ] * 3
    found = read(tmp_path, lines)
    assert found.course.overflow_steps == (1, 2, 31)
    assert found.course.settings["loss_scale_window"].value == 20
    assert found.course.growths == ()  # it was logged


def test_compressed_from_stdin_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = zero_log({1, 2, 3, 60}, 80)
    data = ("\n".join(made.lines) + "\n").encode()
    plain = read(tmp_path, data)
    packed = gzip.compress(data[:900]) + gzip.compress(data[900:])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(packed)))
    (tmp_path / "packed").write_bytes(packed)
    (tmp_path / "utf-16").write_text(data.decode(), encoding="utf-16")  # PowerShell's >
    (tmp_path / "a").write_bytes(b"\n".join(data.split(b"\n")[:90]) + b"\n")
    (tmp_path / "b").write_bytes(b"\n".join(data.split(b"\n")[90:]))
    for paths in (
        ["-"],
        [str(tmp_path / "utf-16")],
        [str(tmp_path / "packed")],
        [str(tmp_path / "a"), str(tmp_path / "b")],
    ):
        found = diagnose(paths)
        assert found.course == plain.course
        assert [(v.name, v.title) for v in found.verdicts] == [(v.name, v.title) for v in plain.verdicts]
        assert sum(lines for _, lines in found.files) == data.count(b"\n")


def test_a_log_that_ends_anywhere(tmp_path: Path) -> None:
    """Cut at any byte, plain or compressed: a diagnosis or one clear error, never another exception."""
    data = "\n".join(zero_log({1, 2, 3, 20}, 30).lines).encode()
    packed = gzip.compress(data)
    draw = random.Random(1)
    for whole, size in ((data, len(data)), (packed, min(len(packed), 700))):
        seen = Counter[int | str]()
        for _ in range(30):
            try:
                seen[read(tmp_path, whole[: draw.randrange(1, size)]).num_overflows] += 1
            except ConfigError:
                seen["nothing in it yet"] += 1
        assert set(seen) <= {0, 1, 2, 3, 4, "nothing in it yet"}
        assert len(seen) > 2, seen  # most are read, as far as they go


def test_noise_of_any_kind(tmp_path: Path) -> None:
    draw = random.Random(5)
    words = [b"loss", b": ", b"1.5", b"OVERFLOW!", b"Attempted loss scale: ", b"|", b"\n", b"\r",
             b"\xff", b"iteration 3/ 9 |", b"step=1, skipped=", b"nan", b" [", b"7/9 [0", b"hysteresis",
             b"loss scale: 0.0", b"reducing to 0, ", b"1e999", b"9" * 5000, b"step=", b"lm loss: inf |",
             b"0", b"loss scale: inf", b"grad norm: nan |", b"skipped iterations: 9000000000 |"]  # fmt: skip
    refused = 0
    for _ in range(300):
        try:
            found = read(tmp_path, b"".join(draw.choices(words, k=60)))
        except ConfigError:
            refused += 1
            continue
        assert json.loads(json.dumps(found.to_json(), allow_nan=False))["schema_version"] == 1
        assert diagnosis_lines(found)
    assert refused < 150


@pytest.mark.parametrize("talk", range(355, 400, 3))
def test_a_bar_far_before_its_line_tells_its_step_whole_or_not_at_all(talk: int, tmp_path: Path) -> None:
    """Cut in its middle, step 1317 would read 317: the run would seem to have gone back, and overflows go."""
    attempt = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1024, reducing to 512"
    lines = [
        f"\r  1%|1   | {step}/100000 [0:01<9:00,  1.0s/it]\nloss: 2.{step}" for step in range(1300, 1316)
    ]
    lines += [attempt, "\r  1%|1   | 1317/100000 [0:01<9:00,  1.0s/it]\n" + "x" * talk + "\nloss: 2.5"]
    found = read(tmp_path, lines)
    assert (found.num_overflows, len(found.course.overflow_steps)) == (1, 1)
    assert found.last_step in (1315, 1316, 1317)


@pytest.mark.parametrize("ticks", ["none", "all", 0, 1, 2])
def test_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ticks: str | int) -> None:
    """The two files are put in order by time, and what was written within a millisecond has one time."""
    draw, now = random.Random(ticks), 0

    def clock() -> str:
        nonlocal now
        now += ticks == "all" or (ticks != "none" and draw.random() < 0.5)
        return f"2026-11-30T00:00:00.{now:03d}Z"

    monkeypatch.setattr("dslaunch.core.events.utc_now", clock)
    metrics, events = JsonlWriter(tmp_path / "metrics.jsonl"), JsonlWriter(tmp_path / "events.jsonl")
    (tmp_path / "ds_config.json").write_text(json.dumps({"fp16": {"enabled": True, "loss_scale_window": 10}}))
    events.write("train_start", step=0, total_steps=30)
    scale = 65536.0
    for step in range(1, 31):
        bad = step in (1, 2)
        if bad:
            events.write(
                "step_skipped", step=step, reason="overflow", loss_scale=scale, next_loss_scale=scale / 2
            )
        loss = float("nan") if step > 25 else 2.0
        metrics.write("train", step=step, loss=loss, grad_norm=1 + step / 9, loss_scale=scale, skipped=bad)
        scale = scale / 2 if bad else scale
    for writer in (metrics, events):
        writer.close()
    found = diagnose([str(tmp_path)])
    assert found.course.overflow_steps == (1, 2)
    assert names(found) == ["loss_nan", "warm_up_descent"]
    assert found.verdicts[0].evidence[0].step == 26
    json.dumps(found.to_json(), allow_nan=False)


def test_what_the_engine_told_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    """``initialize(..., run_dir=DIR)`` leaves events.jsonl there, and no metrics.jsonl."""
    events = JsonlWriter(tmp_path / "events.jsonl")
    for step in range(1, 7):
        events.write("step_skipped", step=step, reason="non-finite gradient", ranks=[1], loss_scale=1.0,
                     next_loss_scale=1.0)  # fmt: skip
    events.write("verdict", step=6, verdict="persistent skipping", message="6 steps in a row were skipped")
    events.close()
    found = diagnose([str(tmp_path)])
    assert names(found)[0] == "persistent_skipping" and found.is_wrong
    assert (found.first_step, found.last_step, found.num_skipped) == (1, 6, 6)
    assert "of a loop of your own; without losses and norms" in found.notes[0]


def test_losses_and_norms_of_a_loop_of_ones_own_are_those_of_its_diagnosis(tmp_path: Path) -> None:
    steps = [
        {"step": step, "loss_scale": 1.0, "next_loss_scale": 1.0, "skip_reason": None, "lr": 0.1,
         "loss": "nan" if step == 59 else 3.0 - step / 100, "grad_norm": None if step == 59 else step / 7}
        for step in range(40, 60)
    ]  # fmt: skip
    culprit = {"message": "rank 1, micro-batch 1: first in the forward, in blocks.1", "module": "blocks.1"}
    report = {"schema_version": 1, "kind": "forward non-finite", "culprit": culprit, "steps": steps}
    (tmp_path / "diagnosis.json").write_text(json.dumps(report, indent=2))
    events = JsonlWriter(tmp_path / "events.jsonl")
    events.write("step_skipped", step=7, reason="overflow", ranks=[0], loss_scale=1.0, next_loss_scale=1.0)
    events.write("step_skipped", step=59, reason="overflow", ranks=[0], loss_scale=1.0, next_loss_scale=1.0)
    events.write("verdict", step=59, verdict="forward non-finite", message="step 59 has loss nan")
    events.close()
    found = diagnose([str(tmp_path)])
    assert (found.first_step, found.last_step, found.num_losses, found.num_skipped) == (7, 59, 20, 2)
    assert found.norm.to_json()[:2] == [[40, 40 / 7], [41, 41 / 7]]
    assert names(found)[0] == "forward_nonfinite"
    assert found.verdicts[0].next.startswith(f"traced: {culprit['message']}. Then ")
    assert found.to_json()["culprit"] == culprit
    assert "losses and norms are those of its last 20 steps, from diagnosis.json" in found.notes[0]
    places = [place for place in found.verdicts[0].evidence if place.file.endswith("diagnosis.json")]
    lines = (tmp_path / "diagnosis.json").read_text().splitlines()
    assert lines[places[-1].line - 1].strip() == '"step": 59,'
    assert found.files == ((f"{tmp_path}/events.jsonl", 3), (f"{tmp_path}/diagnosis.json", len(lines)))


def test_a_kept_step_of_a_loop_of_ones_own_is_replayed_by_its_script(tmp_path: Path) -> None:
    events = JsonlWriter(tmp_path / "events.jsonl")
    events.write("verdict", step=3, verdict="forward non-finite", message="step 3 has loss nan")
    events.close()
    (tmp_path / "nonfinite" / "step-3").mkdir(parents=True)
    (tmp_path / "nonfinite" / "step-3" / "window.json").write_text("{}")
    (tmp_path / "diagnosis.json").write_text("[broken")
    next_thing = diagnose([str(tmp_path)]).verdicts[0].next
    assert f"replay(engine, '{tmp_path}/nonfinite/step-3') runs step 3 again" in next_thing


def test_a_loop_of_ones_own_that_told_nothing(tmp_path: Path) -> None:
    JsonlWriter(tmp_path / "events.jsonl").close()
    with pytest.raises(ConfigError, match=r"and no events.jsonl tells of steps") as error:
        diagnose([str(tmp_path)])
    assert error.value.hint is not None and "what your script printed" in error.value.hint


def test_the_launch_of_a_command_is_read_from_its_logs(tmp_path: Path) -> None:
    """Its events.jsonl tells of ranks, not of steps."""
    events = JsonlWriter(tmp_path / "events.jsonl")
    events.write("launch_start", world_size=1)
    events.close()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("step 1 loss 2.5\nstep 2 loss nan\n")
    found = diagnose([str(tmp_path)])
    assert (names(found), found.num_losses, found.notes) == (["loss_nan"], 2, ())


def test_a_run_names_its_growths_and_its_hysteresis(tmp_path: Path) -> None:
    """A line every tenth step only: the events alone tell where the scale moved."""
    metrics, events = JsonlWriter(tmp_path / "metrics.jsonl"), JsonlWriter(tmp_path / "events.jsonl")
    scaler = Scaler(4.0, window=6, hysteresis=2)
    scales: dict[int, float] = {}
    for step in range(1, 61):
        used, left = scaler.scale, scaler.left
        scales[step] = used
        bad = step in (21, 22, 40)
        grew = scaler.step(bad)
        if bad:
            events.write("step_skipped", step=step, reason="overflow", ranks=[0], loss_scale=used,
                         next_loss_scale=scaler.scale)  # fmt: skip
        if bad and scaler.left != left:
            events.write("hysteresis_changed", step=step, ranks=[0], loss_scale=scaler.scale,
                         previous_hysteresis=left, hysteresis=scaler.left)  # fmt: skip
        if grew:
            events.write("loss_scale_grew", step=step, ranks="all", loss_scale=scaler.scale,
                         previous_loss_scale=used)  # fmt: skip
        if step % 10 == 0:
            metrics.write("train", step=step, loss=2.0, grad_norm=1 + step / 9, loss_scale=used, skipped=bad)
    for writer in (metrics, events):
        writer.close()
    found = diagnose([str(tmp_path)])
    assert scales_by_step(found, 60) == list(scales.values())
    assert not found.course.growths  # none had to be inferred
    assert found.course.settings["hysteresis"].value == 2
    assert names(found) == ["saw_tooth"]


def test_a_run_without_deepspeed_has_its_settings_in_the_plan(tmp_path: Path) -> None:
    section = {"loss_scale": "dynamic", "loss_scale_window": 50, "hysteresis": 1, "min_loss_scale": 2}
    (tmp_path / "plan.json").write_text(json.dumps({"engine": "torch", "precision": "fp16", "fp16": section}))
    metrics = JsonlWriter(tmp_path / "metrics.jsonl")
    metrics.write("train", step=1, loss=2.0, grad_norm=1.0, loss_scale=4.0, skipped=False)
    metrics.close()
    settings = diagnose([str(tmp_path)]).course.settings
    assert (settings["loss_scale_window"].value, settings["min_loss_scale"].value) == (50, 2)
    assert settings["hysteresis"].why == "plan.json names it"


def test_a_run_of_another_script_has_its_ranks_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank in range(2):
        lines = zero_log({1, 2, 3}, 40, window=1000).lines
        (tmp_path / f"logs/rank-{rank}.log").write_text("\n".join(lines) + "\n")
    found = diagnose([str(tmp_path)])
    assert found.num_overflows == 3 and names(found) == ["warm_up_descent"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "log not found"),
        ("empty", "there is no line to read"),
        ("other", "no line of 2 tells"),
        ("dir", "neither"),
    ],
)
def test_what_cannot_be_read(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "other").write_text("hello\nworld\n")
    (tmp_path / "dir").mkdir()
    with pytest.raises(ConfigError, match=says):
        diagnose([str(tmp_path / name)])


@pytest.mark.parametrize("end", ["\n", "\r"], ids=["lines", "one line of bars"])
def test_memory_does_not_grow_with_the_log(end: str, tmp_path: Path) -> None:
    """50 MB: the peak of what Python allocates stays within a few blocks."""
    step = 0
    path = tmp_path / "long.log"
    talk = (
        "[rank3] a bucket of 500000000 was reduced, the allocator holds 40 GiB, all is well, nothing to see"
    )
    with path.open("w") as stream:
        while stream.tell() < 50_000_000:
            part = []
            for _ in range(200):
                step += 1
                part += [talk] * 60
                part.append(f"{step}/900000 [00:10<10:00, 1.0it/s, loss={2 + step % 100 / 100}]")
                if step % 50 == 0:
                    part.append(overflow_line(64, 32, step=step))
            stream.write(end.join(part) + end)
    tracemalloc.start()
    try:
        found = diagnose([str(path)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.num_losses == step
    assert peak < 12_000_000


@pytest.mark.parametrize("size", range(1, 40))
def test_colours_are_gone_wherever_a_block_ends(size: int) -> None:
    text = b"\x1b[1;32mloss:\x1b[0m 1.5 \x1b[K\x1b no colour, nor \x1b[3\n\x1b[?25hend \x1b[3"
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    assert b"".join(_without_escapes(blocks)) == b"loss: 1.5 \x1b no colour, nor \x1b[3\nend \x1b[3"
