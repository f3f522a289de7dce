"""How far our worker is, read while it writes."""

from __future__ import annotations

from pathlib import Path

from dslaunch.core.events import JsonlWriter
from dslaunch.core.run_dir import RunDir
from dslaunch.launch.progress import Progress, ProgressReader


def test_only_what_this_start_adds(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    events, metrics = JsonlWriter(run_dir.events), JsonlWriter(run_dir.metrics)
    metrics.write("train", step=40, loss=1.0)
    reader = ProgressReader(run_dir)
    reader.read()
    assert reader.progress is None
    events.write("train_start", step=40, total_steps=100)
    metrics.write("train", step=41, loss=float("nan"), tokens_per_s=12.5)
    metrics.write("eval", step=41, loss=3.0)
    reader.read()
    assert reader.progress is not None
    assert reader.progress.place == "step 41 of 100"
    assert str(reader.progress.loss) == "nan"
    assert reader.progress.tokens_per_s == 12.5
    metrics.write("train", step=42, loss=0.5)
    reader.read()
    assert reader.progress == Progress(step=42, total=100, loss=0.5)


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    reader = ProgressReader(run_dir)  # the file comes later
    with run_dir.metrics.open("w") as stream:
        stream.write('{"kind": "train", "st')
        stream.flush()
        reader.read()
        assert reader.progress is None
        stream.write('ep": 3}\nno json\n')
    reader.read()
    assert reader.progress == Progress(step=3)
    assert reader.progress.place == "step 3"
