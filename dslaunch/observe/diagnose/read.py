"""From logs or a run directory to a diagnosis."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dslaunch.core.command import quote
from dslaunch.core.errors import ConfigError
from dslaunch.core.events import to_jsonable
from dslaunch.core.run_dir import RunDir
from dslaunch.observe.diagnose.columns import add_rows
from dslaunch.observe.diagnose.course import Course, Setting, scale_course
from dslaunch.observe.diagnose.facts import Place
from dslaunch.observe.diagnose.rows import RowReader
from dslaunch.observe.diagnose.run_files import (
    config_settings,
    read_culprit,
    read_own_loop,
    read_run,
    tells_of_steps,
)
from dslaunch.observe.diagnose.series import Series
from dslaunch.observe.diagnose.shapes import parse
from dslaunch.observe.diagnose.source import STDIN, LogFile
from dslaunch.observe.diagnose.story import Story
from dslaunch.observe.diagnose.verdicts import Verdict, judge

SCHEMA_VERSION = 1
_NOT_FINITE = {
    "at_minimum",
    "forward_nonfinite",
    "persistent_skipping",
    "loss_nan",
}  # what a replay can explain
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
_QUIET_LOOP = (
    "an engine in a loop of your own tells events.jsonl of skipped steps, moves of the scale and verdicts: "
    "there were none; losses are in what your script printed"
)


@dataclass(frozen=True)
class Diagnosis:
    """All that was found. ``files``: (name, lines)."""

    files: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    first_step: int | None
    last_step: int | None
    num_losses: int
    num_overflows: int
    num_skipped: int
    course: Course
    loss: Series
    norm: Series
    verdicts: tuple[Verdict, ...]
    culprit: Mapping[str, Any] | None = None

    @property
    def is_wrong(self) -> bool:
        return any(verdict.severity == "error" for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """The object that ``diagnose --json`` prints."""
        course = self.course
        report: dict[str, Any] = to_jsonable(
            {
                "schema_version": SCHEMA_VERSION,
                "files": [{"name": name, "lines": lines} for name, lines in self.files],
                "notes": list(self.notes),
                "steps": {"first": self.first_step, "last": self.last_step},
                "num_losses": self.num_losses,
                "num_overflows": self.num_overflows,
                "num_skipped": self.num_skipped,
                "verdicts": [_verdict_json(verdict) for verdict in self.verdicts],
                "culprit": self.culprit,
                "settings": {name: asdict(setting) for name, setting in course.settings.items()},
                "growths": [asdict(growth) for growth in course.growths],
                "loss_scale": {
                    "points": [list(point) for point in course.points],
                    "last": course.last_scale,
                    "last_is": course.last_scale_is,
                },
                "loss": self.loss.to_json(),
                "grad_norm": self.norm.to_json(),
            }
        )
        return report


def diagnose(paths: Sequence[str], stated: Mapping[str, float] | None = None) -> Diagnosis:
    """Read logs (``-``: stdin) or one run directory, and judge.

    ``stated``: settings of the fp16 section that the user knows. Raises ConfigError where a file cannot be
    read, or where nothing in them is known.
    """
    given = {name: Setting(value, "flag", "as given") for name, value in (stated or {}).items()}
    story = Story(given)
    files: list[tuple[str, int]] = []
    notes: list[str] = []
    for path in paths:
        if path != STDIN and Path(path).is_dir():
            files += _read_directory(Path(path), story, notes)
        else:
            files.append(_read_log(path, story, notes))
    if story.known == 0 or not _tells_something(story):
        lines = sum(lines for _, lines in files)
        if lines == 0:
            raise ConfigError(f"{', '.join(name for name, _ in files)}: there is no line to read")
        raise ConfigError(
            f"{', '.join(name for name, _ in files)}: no line of {lines} tells of loss, norm or loss scale",
            hint="DeepSpeed 0.19 logs overflows only at level INFO: in the script, "
            'deepspeed.utils.logger.setLevel("INFO") and the same for its handlers',
        )
    return _with_replay(_diagnosis(story, files, notes), paths)


def _with_replay(found: Diagnosis, paths: Sequence[str]) -> Diagnosis:
    """Who made the first nan or inf, where that was traced; else, where the step was kept, how to look."""
    run = RunDir(Path(paths[0]))
    culprit = read_culprit(run) if len(paths) == 1 else None
    steps = run.kept_steps() if len(paths) == 1 else ()
    if culprit is not None:
        where = f"; all of it is in {culprit['report']}" if culprit.get("report") else ""
        words = f"traced: {culprit['message']}{where}. Then "
    elif steps:
        words = _how_to_replay(run, steps[-1])
    else:
        return found
    verdicts = tuple(
        replace(verdict, next=words + verdict.next) if verdict.name in _NOT_FINITE else verdict
        for verdict in found.verdicts
    )
    return replace(found, verdicts=verdicts, culprit=culprit)


def _how_to_replay(run: RunDir, step: int) -> str:
    if run.plan.exists():
        command = f"dslaunch replay {quote(str(run.path))}"
        return f"{command}: step {step} was kept, and that names the module, rank and samples. Then "
    where = f"{run.path}/nonfinite/step-{step}"
    return f"in a script that makes the same engine, replay(engine, '{where}') runs step {step} again. Then "


def _tells_something(story: Story) -> bool:
    found = (story.num_overflows, story.loss.count, story.norm_series.points, story.scale_series.points)
    return any(found) or story.minimum is not None or story.ended is not None or story.last_step is not None


def _diagnosis(story: Story, files: list[tuple[str, int]], notes: list[str]) -> Diagnosis:
    observed = [(round(point.last), point.mean) for point in story.scale_series.points]
    course = scale_course(
        list(story.overflows), observed=observed, last_step=story.last_step, stated=story.settings
    )
    if story.num_overflows > len(story.overflows):
        kept = len(story.overflows)
        notes.append(f"the scale is drawn from the last {kept} of {story.num_overflows} overflows")
    return Diagnosis(
        files=tuple(files),
        notes=tuple(notes),
        first_step=story.first_step,
        last_step=story.last_step,
        num_losses=story.loss.count,
        num_overflows=story.num_overflows,
        num_skipped=max(story.num_overflows, story.num_skipped or 0),
        course=course,
        loss=story.loss_series,
        norm=story.norm_series,
        verdicts=tuple(judge(story)),
    )


def _read_log(path: str, story: Story, notes: list[str]) -> tuple[str, int]:
    log = LogFile(path)
    match = _RANK_IN_NAME.search(Path(path).name)
    rank = int(match[1]) if match else None
    name, rows = log.name, RowReader()
    is_other = False
    for found in log.found():
        records = parse(found)
        many = rows.following(found, records, story)
        for record in records:
            if rank is not None:
                record.rank = rank
                story.file_rank = rank if story.file_rank is None else story.file_rank
                is_other = rank != story.file_rank
                if is_other and record.kind != "minimum":
                    continue  # the first rank's file has told the same
            story.add(record, name)
        if many is not None and not is_other:
            if rank is not None:
                many.columns.pop("rank", None)
            add_rows(story, many, name)
    if log.is_cut:
        notes.append(f"{name} ends in the middle of its gzip stream; what stands before was read")
    return name, log.lines


def _read_directory(path: Path, story: Story, notes: list[str]) -> list[tuple[str, int]]:
    """A run directory: its metrics and events; else, of a loop of one's own, what its engine told in
    events.jsonl and diagnosis.json; else the logs of its ranks."""
    run = RunDir(path)
    # Without DeepSpeed (engine torch) there is no JSON for it, and the plan has the same section.
    source = run.ds_config if run.ds_config.exists() else run.plan
    for name, value in config_settings(source).items():
        story.settings.setdefault(name, Setting(value, "log", f"{source.name} names it"))
    if run.metrics.exists():
        return read_run(run, story)
    if tells_of_steps(run.events):
        return read_own_loop(run, story, notes)
    logs = sorted(run.logs.glob("rank-*.log"), key=lambda log: int(re.sub(r"\D", "", log.stem) or 0))
    if not logs:
        raise ConfigError(
            f"{path} holds neither metrics.jsonl nor logs/rank-N.log, and no events.jsonl tells of steps",
            hint=_QUIET_LOOP if run.events.exists() else "give a run directory, or the log files themselves",
        )
    return [_read_log(str(log), story, notes) for log in logs]


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {**vars(verdict), "evidence": [_place_json(place) for place in verdict.evidence]}


def _place_json(place: Place) -> dict[str, Any]:
    return {"file": place.file, "line": place.line, "step": place.step, "text": place.text}
