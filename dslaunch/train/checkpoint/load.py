"""Loading: all ranks look first, agree, and only then touch the engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dslaunch.core.checkpoint_manifest import Manifest, candidates, find_fault, read_manifest
from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.core.run_dir import checkpoint_step
from dslaunch.train import dist
from dslaunch.train.checkpoint import rng
from dslaunch.train.checkpoint.leftovers import restore_replaced
from dslaunch.train.checkpoint.pickles import check_pickle
from dslaunch.train.checkpoint.trained import are_same_sums, trainable_shapes, weight_sums
from dslaunch.train.engine import TrainingEngine

Note = Callable[[str], None]


def load_checkpoint(
    engine: TrainingEngine, root: Path, *, on_note: Note | None = None
) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint under ``root``. Collective.

    Returns the ``extra`` that was saved with it, or None where there is no checkpoint
    at all. Raises ConfigError as :func:`find_whole_checkpoint` and :func:`restore_checkpoint`.
    """
    path = find_whole_checkpoint(root, on_note=on_note)
    return None if path is None else dict(restore_checkpoint(engine, path).extra)


def find_whole_checkpoint(
    root: Path, *, before: int | None = None, on_note: Note | None = None
) -> Path | None:
    """The newest whole checkpoint under ``root``, the same on every rank; None: there is none. Collective.

    Every file is verified, each rank its share. A checkpoint that is incomplete or damaged
    on any rank is passed over, with the reason to ``on_note`` (without it: rank 0's
    stderr), and the one before it is tried. ``before``: only those of earlier steps count.
    Raises ConfigError where none is whole.
    """
    rank = torch.distributed.get_rank()
    faults: list[str] = []
    for path in map(Path, dist.gather_objects(_paths_to_try(root, rank, before))[0]):
        fault = _agreed(_fault(path, rank))
        if fault is None:
            return path
        faults.append(f"{path.name}: {fault}")
        _tell(f"checkpoint {path.name} is passed over: {fault}", on_note, rank)
    if faults:
        raise ConfigError(
            f"no whole checkpoint in {root}: {'; '.join(faults)}",
            hint="start a new run, or put an intact copy of a checkpoint back",
        )
    return None


def restore_checkpoint(engine: TrainingEngine, path: Path) -> Manifest:
    """Load what :func:`find_whole_checkpoint` found into the engine; its manifest. Collective.

    Raises ConfigError, with the engine untouched, where world size, ZeRO stage, precision or
    trained parameters differ from those saved, or a file refers to what DeepSpeed does not pickle.
    Raises EnvironmentNotReady where the weights are other ones after loading than they were.
    """
    manifest = read_manifest(path)
    _check_fits(engine, path, manifest)
    _check_pickles(engine, path, manifest)
    with dist.hold_deepspeeds_prints():
        engine.load_state(path, trainable_only=manifest.trainable_only)
    _check_weights(engine, path, manifest)
    rng.load_rng(path, engine.rank)
    return manifest


def _paths_to_try(root: Path, rank: int, before: int | None) -> list[str]:
    if rank != 0:
        return []
    with contextlib.suppress(OSError):  # a directory that may only be read can still be loaded from
        restore_replaced(root)
    steps = ((path, checkpoint_step(path)) for path in candidates(root))
    return [str(path) for path, step in steps if before is None or (step is not None and step < before)]


def _fault(path: Path, rank: int) -> str | None:
    """The first fault of this rank's share of the files, or of all their sizes."""
    try:
        manifest = read_manifest(path)
        return find_fault(path, manifest, list(manifest.files)[rank :: torch.distributed.get_world_size()])
    except ConfigError as error:
        return error.message


def _agreed(fault: str | None) -> str | None:
    """The first fault that any rank has found; the same answer on every rank. Collective."""
    found = dist.gather_objects(fault)
    return next((f"{text} (seen by rank {rank})" for rank, text in enumerate(found) if text), None)


def _check_pickles(engine: TrainingEngine, path: Path, manifest: Manifest) -> None:
    """DeepSpeed unpickles these files. Each rank looks through its share first, and all agree."""
    names = [name for name in manifest.files if name.endswith(".pt")]
    problem = None
    try:
        for name in names[engine.rank :: engine.world_size]:
            check_pickle(path / name)
    except ConfigError as error:
        problem = error.message
    problem = _agreed(problem)
    if problem is not None:
        raise ConfigError(problem, hint="the file may run code when loaded: find out where it comes from")


def _check_weights(engine: TrainingEngine, path: Path, manifest: Manifest) -> None:
    """What DeepSpeed has loaded is what was saved: it drops what it finds no place for without a word."""
    if not manifest.weight_sums:
        return
    here = weight_sums(engine.module)
    same = are_same_sums(manifest.weight_sums[engine.rank], here)
    if _agreed(None if same else f"{here} instead of {manifest.weight_sums[engine.rank]}") is None:
        return
    import deepspeed

    raise EnvironmentNotReady(
        f"the trained weights are other ones after loading {path} than they were when it was saved",
        hint=f"DeepSpeed {manifest.deepspeed_version} saved it and {deepspeed.__version__} loaded it: "
        "use the one of constraints.txt",
    )


def _check_fits(engine: TrainingEngine, path: Path, manifest: Manifest) -> None:
    here = {
        "engine": engine.kind,
        "world size": engine.world_size,
        "ZeRO stage": engine.zero_stage,
        "precision": engine.precision,
    }
    saved = {
        "engine": manifest.engine,
        "world size": manifest.world_size,
        "ZeRO stage": manifest.zero_stage,
        "precision": manifest.precision,
    }
    differing = [f"{key} {saved[key]}, this run has {here[key]}" for key in here if saved[key] != here[key]]
    if differing:
        raise ConfigError(
            f"checkpoint {path} was saved with {'; '.join(differing)}",
            hint="resume with those, or start a new run from its weights: dslaunch export",
        )
    _check_trainable(path, dict(manifest.trainable), trainable_shapes(engine.module))


def _check_trainable(path: Path, saved: dict[str, tuple[int, ...]], here: dict[str, tuple[int, ...]]) -> None:
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise ConfigError(
                f"checkpoint {path}: trained parameter {name} has shape "
                f"{saved.get(name, 'none: not saved')}, in this run {here.get(name, 'none: not trained')}",
                hint="resume with the model and adapter settings of the checkpoint",
            )


def _tell(text: str, on_note: Note | None, rank: int) -> None:
    if on_note is not None:
        on_note(text)
    elif rank == 0:
        print(f"note: {text}", file=sys.stderr)
