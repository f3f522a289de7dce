"""What one optimizer step was given: kept at no cost while a run goes well, written when it fails.

nonfinite/step-N/window.json             the step, its loss scale, who saw what; written last
                 rank-R.safetensors      the micro-batches of a rank as its model got them, its RNG
                 rank-R.json             which samples they are, and where those come from
                 weights-R.safetensors   the weights that it was given to, see ``weights``
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dslaunch.core import atomic
from dslaunch.core.errors import ConfigError
from dslaunch.core.events import to_jsonable
from dslaunch.core.run_dir import RunDir
from dslaunch.train.checkpoint.rng import set_torch_states, torch_states
from dslaunch.train.corpus import Corpus
from dslaunch.train.data.collate import IGNORED, Batch

_KEPT = 3  # windows of a run
_FIELDS = ("input_ids", "position_ids", "attention_mask", "targets")

Rng = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SamplePlace:
    """Sample ``sample`` fills ``start`` to ``stop`` of ``row``; ``where``: its record's file and line."""

    row: int
    start: int
    stop: int
    sample: int
    unit: int
    where: str


@dataclass(frozen=True)
class Window:
    """The micro-batches of one rank in step ``step`` (counted from 1), on the CPU."""

    step: int
    loss_scale: float
    num_tokens: int
    batches: tuple[Batch, ...]
    samples: tuple[tuple[SamplePlace, ...], ...]
    rng: Rng
    pad_token_id: int

    can_be_empty = True  # a pass without any of its samples can be made

    def only(self, micro_batch: int, kept: Collection[int]) -> Batch:
        """A micro-batch with the samples that are not ``kept`` made of padding, and not trained on.

        Everything keeps its place and its shape, so that dropout draws the same.
        """
        batch = self.batches[micro_batch]
        ids, targets = batch.input_ids.clone(), batch.targets.clone()
        for index, place in enumerate(self.samples[micro_batch]):
            if index not in kept:
                ids[place.row, place.start : place.stop] = self.pad_token_id
                targets[place.row, place.start : place.stop] = IGNORED
        return replace(batch, input_ids=ids, targets=targets)

    def layout(self, micro_batch: int) -> tuple[int, ...] | None:
        """(rows, tokens) of a micro-batch."""
        return tuple(self.batches[micro_batch].input_ids.shape)

    def write(self, folder: Path, rank: int) -> None:
        """Write this rank's part. Raises OSError."""
        write_rank(folder, rank, self)


def build_window(
    step: int,
    *,
    corpus: Corpus,
    micro_batches: Sequence[Sequence[int]],
    num_tokens: int,
    loss_scale: float,
    rng: Rng,
) -> Window:
    """A rank's window from its units: what the loop made of them, made again."""
    return Window(
        step=step,
        loss_scale=loss_scale,
        num_tokens=num_tokens,
        batches=tuple(corpus.batch(units) for units in micro_batches),
        samples=tuple(tuple(_places(corpus, units)) for units in micro_batches),
        rng=rng,
        pad_token_id=corpus.pad_token_id,
    )


def _places(corpus: Corpus, units: Sequence[int]) -> list[SamplePlace]:
    places = []
    for row, unit in enumerate(units):
        start = 0
        for sample in map(int, corpus.packs[unit]):
            stop = start + int(corpus.dataset.lengths[sample])
            places.append(SamplePlace(row, start, stop, sample, unit, corpus.dataset.where(sample)))
            start = stop
    return places


def take_rng() -> Rng:
    """The states that dropout draws from, here and on this rank's device; some microseconds."""
    return torch_states()


def restore_rng(rng: Rng) -> None:
    """Draw again what was drawn after :func:`take_rng`."""
    set_torch_states(rng)


def window_path(run_dir: Path, step: int) -> Path:
    """The directory of the window of ``step``."""
    return RunDir(run_dir).nonfinite / f"step-{step}"


def write_rank(folder: Path, rank: int, window: Window) -> None:
    """Write this rank's part. Raises OSError."""
    tensors = {f"rng.{name}": state for name, state in window.rng.items()}
    for number, batch in enumerate(window.batches):
        for field in _FIELDS:
            value = getattr(batch, field)
            if value is not None:
                tensors[f"batch.{number}.{field}"] = value.contiguous()
    partial = folder / f".rank-{rank}.safetensors"
    save_file(tensors, partial)
    partial.replace(folder / f"rank-{rank}.safetensors")
    samples = [[vars(place) for place in places] for places in window.samples]
    atomic.write_text(folder / f"rank-{rank}.json", json.dumps({"micro_batches": samples}, indent=1) + "\n")


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Write window.json, which makes the directory whole. Raises OSError."""
    atomic.write_json(folder / "window.json", to_jsonable(dict(index)))


def read_index(folder: Path) -> dict[str, Any]:
    """window.json. Raises ConfigError where it cannot be read."""
    try:
        value: dict[str, Any] = json.loads((folder / "window.json").read_text(encoding="utf-8"))
        return value
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder}/window.json: {error}") from None


def read_rank(folder: Path, rank: int, *, pad_token_id: int) -> Window:
    """This rank's part of a window. Raises ConfigError where it is missing or damaged."""
    index = read_index(folder)
    try:
        tensors = load_file(folder / f"rank-{rank}.safetensors")
        samples = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))["micro_batches"]
    except Exception as error:  # safetensors has errors of its own, and a missing file is as bad
        raise ConfigError(f"the window in {folder} cannot be read by rank {rank}: {error}") from None
    batches = []
    for number in range(len(samples)):
        fields = {field: tensors.get(f"batch.{number}.{field}") for field in _FIELDS}
        batches.append(Batch(**fields))  # type: ignore[arg-type]
    return Window(
        step=int(index["step"]),
        loss_scale=float(index["loss_scale"]),
        num_tokens=int(index["num_tokens"]),
        batches=tuple(batches),
        samples=tuple(tuple(SamplePlace(**place) for place in places) for places in samples),
        rng={name.removeprefix("rng."): t for name, t in tensors.items() if name.startswith("rng.")},
        pad_token_id=pad_token_id,
    )


def make_room(run_dir: Path) -> None:
    """Remove the oldest windows so that with a new one there are at most three."""
    steps = RunDir(run_dir).kept_steps()
    for step in steps[: max(0, len(steps) - _KEPT + 1)]:
        shutil.rmtree(window_path(run_dir, step), ignore_errors=True)
