"""Loading: all ranks look first, agree, and only then touch the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dslaunch.core.errors import ConfigError
from dslaunch.train import dist
from dslaunch.train.checkpoint import rng
from dslaunch.train.checkpoint.manifest import Manifest, candidates, find_fault, read_manifest
from dslaunch.train.checkpoint.save import trainable_shapes
from dslaunch.train.engine import Engine


def load_checkpoint(
    engine: Engine, root: Path, *, on_note: Callable[[str], None] | None = None
) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint under ``root``. Collective.

    Returns the ``extra`` that was saved with it, or None where there is no checkpoint
    at all. One that is incomplete or damaged on any rank is passed over, with the
    reason to ``on_note`` (without it: rank 0's stderr), and the one before it is tried.

    Raises ConfigError where none is whole, or where world size, ZeRO stage, precision
    or trained parameters differ from those saved; the engine is then untouched.
    """
    faults: list[str] = []
    paths = dist.gather_objects([str(p) for p in candidates(root)])[0]
    for path in map(Path, paths):
        fault = _agreed_fault(engine, path)
        if fault is None:
            manifest = read_manifest(path)
            _check_fits(engine, path, manifest)
            _restore(engine, path, manifest)
            return dict(manifest.extra)
        faults.append(f"{path.name}: {fault}")
        _tell(f"checkpoint {path.name} is passed over: {fault}", on_note, engine.rank)
    if faults:
        raise ConfigError(
            f"no whole checkpoint in {root}: {'; '.join(faults)}",
            hint="start a new run, or put an intact copy of a checkpoint back",
        )
    return None


def _agreed_fault(engine: Engine, path: Path) -> str | None:
    """The first fault that any rank finds; the same answer on every rank."""
    try:
        manifest = read_manifest(path)
        mine = list(manifest.files)[engine.rank :: engine.world_size]
        fault = find_fault(path, manifest, mine)
    except ConfigError as error:
        fault = error.message
    found = dist.gather_objects(fault)
    return next((f"{text} (seen by rank {rank})" for rank, text in enumerate(found) if text), None)


def _check_fits(engine: Engine, path: Path, manifest: Manifest) -> None:
    here = {"world size": engine.world_size, "ZeRO stage": engine.zero_stage, "precision": engine.precision}
    saved = {
        "world size": manifest.world_size,
        "ZeRO stage": manifest.zero_stage,
        "precision": manifest.precision,
    }
    differing = [f"{key} {saved[key]}, this run has {here[key]}" for key in here if saved[key] != here[key]]
    if differing:
        raise ConfigError(
            f"checkpoint {path} was saved with {'; '.join(differing)}",
            hint="resume with the world size, stage and precision of the checkpoint",
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


def _restore(engine: Engine, path: Path, manifest: Manifest) -> None:
    with dist.hold_deepspeeds_prints():
        loaded, _ = engine.deepspeed.load_checkpoint(
            str(path.parent), tag=path.name, load_module_strict=not manifest.trainable_only
        )
    if loaded is None:  # DeepSpeed's way to say that it found nothing
        raise ConfigError(f"DeepSpeed loaded nothing from {path}")
    rng.load_rng(path, engine.rank)


def _tell(text: str, on_note: Callable[[str], None] | None, rank: int) -> None:
    if on_note is not None:
        on_note(text)
    elif rank == 0:
        print(f"note: {text}", file=sys.stderr)
