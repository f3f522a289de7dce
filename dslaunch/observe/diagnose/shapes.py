"""What a line of a log says: the shapes that DeepSpeed 0.1 to 0.19, Megatron, apex, fairseq, trainers write.

Copies of logs are wrapped, in the middle of words too: where a shape begins in a line and does not end there,
the next lines are tried with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dslaunch.observe.diagnose.source import Found

Kind = Literal[
    "overflow", "fused", "growth", "set", "static", "minimum", "metrics", "mark", "setting", "ended",
    "spared",
]  # fmt: skip


@dataclass(slots=True)
class Record:
    """One thing that a line says; None is what it does not say.

    ``overflow``: a skipped step, the scale it ran with (``before``) and the next one (``after``).
    ``fused``: the overflow of iteration ``step`` at ZeRO stage 0, whose scale a line of its own tells.
    ``growth``, ``set``, ``static``: the scale. ``minimum``: the run ends for it. ``metrics``: numbers.
    ``spared``: the overflow of ``step`` took one of ``before`` from the hysteresis, and left the scale.
    ``ended``: dslaunch's own watch ended the run, with the verdict ``name``.
    ``mark``: step ``step`` is over. ``setting``: ``name`` of the fp16 section is ``before``.
    ``name`` is "scale used" where ``scale`` is the one that the step ran with, not the next one.
    ``bar``: a step that only a progress bar tells, which may be one or two behind.
    ``spans``: of metrics, and of an overflow that names its rank, where in the line each number stands; a
    bar before it at a negative place.
    """

    kind: Kind
    line: int = 0
    step: int | None = None
    bar: int | None = None
    rank: int | None = None
    before: float | None = None
    after: float | None = None
    hysteresis: int | None = None
    loss: float | None = None
    norm: float | None = None
    scale: float | None = None
    skipped: int | None = None
    name: str = ""
    second: int | None = None
    text: bytes = b""
    spans: dict[str, tuple[int, int]] | None = None


def sign_of_good(record: Record) -> int:
    """How surely a line of numbers tells of a step that was taken: 2 is sure."""
    if record.skipped:
        return 0
    if record.norm is not None:
        return 2 if math.isfinite(record.norm) and record.norm > 0 else 0
    return 1 if record.loss is not None and math.isfinite(record.loss) else 0


_NUMBER = rb"([-+]?\d{1,80}(?:\.\d*)?(?:[eE][-+]?\d{1,2})?)"  # so that it is finite
_VALUE = rb"([-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?)))(?![\w.]*[A-Za-z_])"


def _shape(words: str, flags: int = 0) -> re.Pattern[bytes]:
    """A pattern in which each blank may be missing, or be several; ``#`` is a number."""
    text = words.replace(" ", r"\s*").encode()
    return re.compile(text.replace(b"#", _NUMBER), flags)


_ATTEMPT = _shape(r"Attempted loss scale: #,\s*(?:reducing to #|but hysteresis is (\d{1,15}))")
_REDUCING = _shape("Reducing dynamic loss scale from # to #")
_INCREASING = _shape("Increasing dynamic loss scale from # to #")
_ITERATION = _shape(r"Grad overflow on iteration:? (\d{1,15})")
_QUIET = _shape(r"No Grad overflow for (\d{1,15}) iterations")
_STATIC = _shape("Using static loss scale of: #")
_MINIMUM = _shape("Current loss scale already at minimum|Minimum loss scale reached")
_SET = _shape("setting loss scale from # -> #")
_APEX = _shape(r"Gradient overflow\. Skipping step, loss scaler (\d{1,15}) reducing loss scale to #")
_FAIRSEQ = _shape(r"overflow detected,[^|\n]{0,40}?setting loss scale to: #")
_RESTORE = _shape(r"Restoring hysteresis to (\d{1,15})")
_BARE = _shape(r"OVERFLOW! (?:Rank \d+ )?Skipping step\. (?!A)")
_SHAPES = (
    _ATTEMPT, _REDUCING, _INCREASING, _ITERATION, _QUIET, _STATIC, _MINIMUM, _SET, _APEX, _FAIRSEQ, _RESTORE,
)  # fmt: skip
_SCALE_WORDS = re.compile(rb"verflow|VERFLOW|loss s|kipping step|ttempted|hysteresis")

_PROGRESS = re.compile(rb"step=(\d{1,15}),\s*skipped=(\d{1,15})")
_MEGATRON = re.compile(rb"iteration\s+(\d{1,15})/\s*\d+\s*\|")
_M_LOSS = re.compile(rb"(?:\blm[ _]?)?\bloss:\s*" + _VALUE)
_M_NORM = re.compile(rb"grad\s*norm:\s*" + _VALUE)
_M_SCALE = re.compile(rb"loss\s*scale:\s*" + _VALUE)
_M_SKIPPED = re.compile(rb"skipped\s*iterations:\s*(\d{1,15})")

_LOSS = re.compile(rb"(?<![A-Za-z_/-])(?:lm_|lm |train/)?[Ll]oss['\"]?(\s*[:=]\s*|\s+)['\"]?" + _VALUE)
_HELD_OUT = (b"val", b"eval", b"test", b"held-out", b"validation", b"mean", b"average")
_NORM = re.compile(rb"(?:grad(?:ient)?[_ ]?norm|gnorm)['\"]?\s*[:=]?\s*['\"]?" + _VALUE)
_LOGGED_SCALE = re.compile(rb"loss_scale['\"]?\s*[:=]\s*['\"]?" + _VALUE)
_STEP = re.compile(
    rb"(?<![\w])(?:global_?step|step|iteration|iter|num_updates)['\"]?\s*[:=#]?\s*['\"]?(\d{1,15})", re.I
)
_BAR = re.compile(rb"(?<!\d)(\d{1,15})/\d+ \[\d")
_SETTING = re.compile(
    rb"(?<![\w])(loss_scale_window|scale_window|hysteresis|delayed_shift|min_loss_scale|min_scale"
    rb"|initial_scale_power|consecutive_hysteresis|overlap_comm)['\"]?[\s:=.]{1,60}['\"]?"
    rb"([Tt]rue|[Ff]alse|\d+(?:\.\d+)?)(?![\w])"
)
_NAMES = {"scale_window": "loss_scale_window", "delayed_shift": "hysteresis", "min_scale": "min_loss_scale"}
_RANK = re.compile(rb"[Rr]ank[ :_]*(\d{1,15})|\[default(\d{1,15})\]|^\s*(\d{1,15}):\s")
_CLOCK = re.compile(rb"\d{4}-\d\d-\d\d[ T](\d\d):(\d\d):(\d\d)")
_DIGITS = (*(b"%d" % digit for digit in range(10)), b".")


def parse(found: Found) -> list[Record]:
    """What the line says, in its order; empty where it says nothing."""
    text = found.text
    if b"|" in text and (b"loss" in text or b" iteration " in text):
        megatron = _megatron(text, found)
        if megatron is not None:
            return [megatron]
    records: list[Record] = []
    if _SCALE_WORDS.search(text):
        records = list(_scale_records(text, found))
    if not records and b"skipped=" in text:
        match = _PROGRESS.search(text)
        if match:
            records.append(Record("mark", step=int(match[1]), skipped=int(match[2])))
    if not records and b"oss" in text:
        records = _metrics(text)
    if not records and (b"_scale" in text or b"hysteresis" in text or b"overlap_comm" in text):
        records = list(_settings(text))
    for record in records:
        record.line = found.number
        if not record.text:
            record.text = text
    if records and records[0].step is None and records[0].kind != "setting":
        _add_bar(records[0], text, found.before)
    return records


def _add_bar(record: Record, text: bytes, before: bytes) -> None:
    """The step of the bar in the line, else of the last one before it; a bar at 0 has no step yet."""
    for part, offset in ((text, 0), (before, -len(before))):
        match = bar_in(part)
        if match is not None and int(match[1]):
            record.bar = int(match[1])
            if record.spans is not None:
                record.spans["bar"] = (match.start(1) + offset, match.end(1) + offset)
            return


def bar_in(text: bytes) -> re.Match[bytes] | None:
    """The last progress bar in ``text``; its step is the first group."""
    end = text.rfind(b" [")
    while end >= 0 and not (text[end - 1 : end].isdigit() and text[end + 2 : end + 3].isdigit()):
        end = text.rfind(b" [", 0, end)  # another bracket follows the bar, or there is none
    if end < 0:
        return None
    match = _BAR.match(text, text.rfind(b" ", 0, end) + 1)
    if match is None and b"/" in text:  # no blank before it
        *_, match = (None, *_BAR.finditer(text))
    return match


def ranks_in(text: bytes) -> list[tuple[int, int]]:
    """Where the numbers of the ranks that a line names stand."""
    return [match.span(match.lastindex or 0) for match in _RANK.finditer(text)]


def _megatron(text: bytes, found: Found) -> Record | None:
    """A line of fields between bars; joined with those after it where it was wrapped."""
    head = _MEGATRON.search(text)
    if head is None:
        if b"lm loss:" not in text:
            return None
    elif not text.rstrip().endswith(b"|") or b"skipped iterations:" not in text:
        text = _joined(text, found)
    start = head.end() if head else 0
    loss = _M_LOSS.search(text, max(start, text.find(b"loss:", start) - 3))
    norm = _M_NORM.search(text, max(start, text.find(b"norm:", start) - 8))
    scale = _M_SCALE.search(text, max(start, text.find(b"loss scale", start)))
    skipped = _M_SKIPPED.search(text, max(start, text.find(b"skipped", start)))
    if not (loss or scale):
        return None
    return Record(
        "metrics",
        line=found.number,
        step=int(head[1]) if head else None,
        loss=float(loss[1]) if loss else None,
        norm=float(norm[1]) if norm else None,
        scale=float(scale[1]) if scale else None,
        skipped=int(skipped[1]) if skipped else None,
        text=text,
        spans=_spans(step=head, loss=loss, norm=norm, scale=scale, skipped=skipped),
    )


def _joined(text: bytes, found: Found) -> bytes:
    """The line with those after it that were one with it. Uses them up."""
    after, used = found.after(), 0
    for _ in range(10):
        start = used + 2 if after[used : used + 2] == b"\r\n" else used + 1
        end = after.find(b"\n", start)
        piece = after[start : end if end >= 0 else len(after)]
        is_whole = text.rstrip().endswith(b"|")
        if not piece or _MEGATRON.search(piece) or (is_whole and b"|" not in piece):
            break
        text, used = text.rstrip(b"\r") + piece.rstrip(b"\r"), (end if end >= 0 else len(after))
    found.use(used)
    return text


def _scale_records(text: bytes, found: Found) -> Iterator[Record]:
    matched = sorted(
        ((match.start(), pattern, match) for pattern in _SHAPES for match in pattern.finditer(text)),
        key=lambda item: item[0],
    )
    cut = _cut_match(text, found, matched[-1][2] if matched else None)
    if cut is not None:
        pattern, match = cut
        matched = [item for item in matched if item[0] != match.start()] + [(match.start(), pattern, match)]
    for start, pattern, match in matched:
        record = _scale_record(pattern, match, match.string[:start])
        if pattern is _ATTEMPT and cut is None and record.rank is not None and record.hysteresis is None:
            record.spans = {"before": match.span(1), "after": match.span(2)}
        yield record
    if not matched and (match_ := _BARE.search(text + b" ")):
        yield Record("overflow", rank=_rank(text[: match_.end()]), second=_second(text))


def _cut_match(
    text: bytes, found: Found, last: re.Match[bytes] | None
) -> tuple[re.Pattern[bytes], re.Match[bytes]] | None:
    """The shape that begins in ``text`` and ends in a line after it. Uses those lines up."""
    if last is not None:
        is_open = last.end() == len(text) and last.re.groups and found.after().lstrip(b"\r\n")[:1] in _DIGITS
        if not is_open or (last.re is _ATTEMPT and _is_plausible(last)):
            return None
    after = found.after()[:300]
    pieces = after.replace(b"\r", b"").split(b"\n")
    joined = text
    for count, piece in enumerate(pieces[1:4], 1):
        joined += piece
        for pattern in _SHAPES:
            for match in pattern.finditer(joined):
                if match.start() > len(text) + 1 or match.end() <= len(text):
                    continue
                if last is not None and not (match.start() == last.start() and _is_plausible(match)):
                    continue
                found.use(_size_of_lines(after, count))
                return pattern, match
    return None


def _size_of_lines(after: bytes, count: int) -> int:
    end = 0
    for _ in range(count + 1):
        place = after.find(b"\n", end)
        if place < 0:
            return len(after)
        end = place + 1
    return end - 1


def _is_plausible(match: re.Match[bytes]) -> bool:
    """Whether the scale is halved, stays or comes to a floor: else the number was cut by the line's end."""
    if match.re is not _ATTEMPT:
        return math.frexp(float(match[match.lastindex or 0]))[0] == 0.5  # a power of two
    if match[2] is None:
        return True
    before, after = float(match[1]), float(match[2])
    return after in (before, before // 2, before / 2) or after >= 1000 == before  # min_loss_scale 1000


def _scale_record(pattern: re.Pattern[bytes], match: re.Match[bytes], head: bytes) -> Record:
    numbers = [float(group) for group in match.groups() if group]
    if pattern is _ATTEMPT:
        before = numbers[0]
        if match[3]:
            left = int(match[3])
            record = Record("overflow", before=before, after=before, hysteresis=left)
        else:
            record = Record("overflow", before=before, after=numbers[1])
        record.name = "fused" if b"Overflow" in head else ""
        record.rank, record.second = _rank(head), _second(head)
        return record
    if pattern is _ITERATION:
        return Record("fused", step=int(match[1]) + 1, rank=_rank(head))  # they count from 0
    if pattern is _REDUCING:
        return Record("overflow", before=numbers[0], after=numbers[1], name="fused", rank=_rank(head))
    if pattern is _INCREASING:
        return Record("growth", before=numbers[0], after=numbers[1])
    if pattern is _APEX:
        record = Record("overflow", before=numbers[1] * 2, after=numbers[1], second=_second(head))
        record.rank, record.name = _rank(head), "" if numbers[0] == 0 else "other scaler"
        return record
    if pattern is _FAIRSEQ:
        record = Record("overflow", before=numbers[0] * 2, after=numbers[0], second=_second(head))
        record.rank = _rank(head)
        return record
    if pattern is _SET:
        return Record("set", before=numbers[0], after=numbers[1])
    if pattern is _STATIC:
        return Record("static", after=numbers[0])
    if pattern is _QUIET:
        return Record("setting", name="loss_scale_window", before=numbers[0])
    if pattern is _RESTORE:
        return Record("setting", name="consecutive_hysteresis", before=numbers[0])
    return Record("minimum", rank=_rank(head))


def _rank(head: bytes) -> int | None:
    """The last rank that is named before the shape."""
    matches = _RANK.findall(head)
    return int(next(group for group in matches[-1] if group)) if matches else None


def _second(text: bytes) -> int | None:
    """The second of the day in the line's (last) prefix."""
    matches = _CLOCK.findall(text)
    if not matches:
        return None
    hours, minutes, seconds = (int(part) for part in matches[-1])
    return (hours * 60 + minutes) * 60 + seconds


def _metrics(text: bytes) -> list[Record]:
    loss = _LOSS.search(text, max(0, text.find(b"oss") - 10))
    if loss is not None:
        bare = not loss[1].strip() and b"." not in loss[2] and loss[2][-1:].isdigit()
        held_out = text[max(0, loss.start() - 11) : loss.start()].lower().rstrip(b" _'\"").endswith(_HELD_OUT)
        if bare or held_out:
            loss = None
    norm_at = text.find(b"norm")
    norm = _NORM.search(text, max(0, norm_at - 9)) if norm_at >= 0 else None
    if loss is None and norm is None:
        return []
    scale = _LOGGED_SCALE.search(text) if b"loss_scale" in text else None
    step = _STEP.search(text) if b"tep" in text or b"iter" in text or b"num_updates" in text else None
    return [
        Record(
            "metrics",
            step=int(step[1]) if step else None,
            loss=float(loss[2]) if loss else None,
            norm=float(norm[1]) if norm else None,
            scale=float(scale[1]) if scale else None,
            rank=_rank(text) if b"ank" in text or b": " in text[:8] or b"[d" in text else None,
            spans=_spans(step=step, loss=loss, norm=norm, scale=scale),
        )
    ]


def _spans(**matches: re.Match[bytes] | None) -> dict[str, tuple[int, int]]:
    """Where the number of each match, its last group, stands."""
    return {name: match.span(match.re.groups) for name, match in matches.items() if match is not None}


def _settings(text: bytes) -> Iterator[Record]:
    for name, value in _SETTING.findall(text):
        word = name.decode()
        number = float(value.lower() == b"true") if value[:1].isalpha() else float(value)
        known = "consecutive_hysteresis_on" if word == "consecutive_hysteresis" else _NAMES.get(word, word)
        yield Record("setting", name=known, before=number)
