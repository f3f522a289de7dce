"""Saving: into a directory of another name first, renamed only when it is whole."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dslaunch.core.atomic import fsync_directory, write_json, write_text
from dslaunch.core.checkpoint_manifest import (
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    hash_files,
    latest_checkpoint,
    list_files,
    read_manifest,
)
from dslaunch.core.errors import EnvironmentNotReady, one_line
from dslaunch.core.run_dir import checkpoint_step
from dslaunch.train import dist
from dslaunch.train.checkpoint import rng
from dslaunch.train.checkpoint.leftovers import REPLACED, SAVING, remove_leftovers
from dslaunch.train.checkpoint.trained import has_frozen, trainable_shapes, weight_sums
from dslaunch.train.engine import TrainingEngine

# What torch.save says when it cannot write: caffe2/serialize/inline_container.cc and C++ streams.
_TORCH_WRITE_ERRORS = (
    "iostream",
    "pytorchstreamwriter",
    "inline_container",
    "file write failed",
    "cannot be opened",
    "parent directory",
)
_DEEPSPEED_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")  # copies that DeepSpeed leaves in the root


def save_checkpoint(
    engine: TrainingEngine, root: Path, step: int, *, extra: dict[str, Any], keep: int | None = None
) -> Path:
    """Write ``root/step-N`` with weights, optimizer, schedule, loss scale and RNG. Collective.

    ``extra``: plain JSON values of the caller's own, given back by ``load_checkpoint``.
    ``keep``: how many checkpoints to leave, this one included; None keeps all. Frozen
    parameters are left out: they come from the base model. A reader never sees half a
    checkpoint: until all of it is on disk under another name, ``latest`` stays as it was.

    Raises EnvironmentNotReady where the disk is too small or the write fails,
    LaunchFailed where a rank never calls (naming it, with gloo).
    """
    assert keep is None or keep >= 1
    json.dumps(extra, allow_nan=False)  # fail before anything is written
    name = f"step-{step}"
    temporary = root / f"{SAVING}{name}"
    dist.barrier(f"the checkpoint of step {step}")
    _prepare_root(engine, root)
    with _write_errors(temporary), dist.hold_deepspeeds_prints():
        engine.save_state(temporary, trainable_only=has_frozen(engine.module))
        rng.save_rng(temporary, engine.rank)
    dist.barrier(f"the end of writing the checkpoint of step {step}")
    with _write_errors(temporary):
        manifest = _manifest(engine, step, extra, _hash_shared_out(engine, temporary))
        if engine.rank == 0:
            write_json(temporary / MANIFEST, manifest.to_json())
            _publish(root, temporary, root / name)
            _prune(root, step, keep)
    dist.barrier(f"the checkpoint of step {step} being published")
    return root / name


def _prepare_root(engine: TrainingEngine, root: Path) -> None:
    """Clear what a killed save left and see that the disk has room; all ranks learn of a problem."""
    problem = None
    if engine.rank == 0:
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(root)
            problem = _missing_space(engine, root)
        except OSError as error:
            problem = f"cannot write in {root}: {error.strerror}"
    problem = dist.gather_objects(problem)[0]
    if problem is not None:
        raise EnvironmentNotReady(
            f"{problem}; no checkpoint was written",
            hint="free some space, or set output.save_total_limit",
        )


def _missing_space(engine: TrainingEngine, root: Path) -> str | None:
    free = shutil.disk_usage(root).free
    needed = expected_bytes(engine, root)
    if free >= needed:
        return None
    return f"{root} has {free / 2**30:.2f} GiB free, a checkpoint needs about {needed / 2**30:.2f} GiB"


def expected_bytes(engine: TrainingEngine, root: Path) -> int:
    """Bytes the next checkpoint will take: as the last one did, else counted from the parameters.

    Counted: each trained parameter in the model's dtype, in fp32 and with two fp32
    moments; each frozen one not at all.
    """
    last = latest_checkpoint(root)
    if last is not None:
        return sum(entry.size for entry in read_manifest(last).files.values())
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    return sum(getattr(p, "ds_numel", p.numel()) * (p.element_size() + 12) for p in trained)


def _hash_shared_out(engine: TrainingEngine, temporary: Path) -> dict[str, FileEntry]:
    """Sync and hash every file once, each rank its share.

    On a network disk a rank may not yet list what another has just written. So what any
    rank sees counts, and all divide the same list; a file that cannot be opened is an error.
    """
    names = sorted({name for seen in dist.gather_objects(list_files(temporary)) for name in seen})
    mine = hash_files(temporary, names[engine.rank :: engine.world_size], sync=True)
    merged = {name: entry for part in dist.gather_objects(mine) for name, entry in part.items()}
    return {name: merged[name] for name in names}


def _manifest(
    engine: TrainingEngine, step: int, extra: dict[str, Any], files: dict[str, FileEntry]
) -> Manifest:
    """What is known of the checkpoint, the same on every rank. Collective."""
    import deepspeed

    return Manifest(
        step=step,
        engine=engine.kind,
        world_size=engine.world_size,
        zero_stage=engine.zero_stage,
        precision=engine.precision,
        deepspeed_version=str(deepspeed.__version__),
        trainable_only=has_frozen(engine.module),
        trainable=trainable_shapes(engine.module),
        extra=extra,
        files=files,
        weight_sums=tuple(dist.gather_objects(weight_sums(engine.module))),
    )


def _publish(root: Path, temporary: Path, final: Path) -> None:
    """Give the finished directory its name, then point ``latest`` at it."""
    for folder in [temporary, *(p for p in temporary.rglob("*") if p.is_dir())]:
        fsync_directory(folder)
    replaced = root / f"{REPLACED}{final.name}"
    if final.exists():  # the same step again, after a resume
        final.rename(replaced)
    temporary.rename(final)
    fsync_directory(root)
    write_text(root / LATEST, final.name + "\n")
    for script in _DEEPSPEED_SCRIPTS:  # `dslaunch export` reads checkpoints, and checks them first
        (root / script).unlink(missing_ok=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _prune(root: Path, step: int, keep: int | None) -> None:
    """Delete the oldest beyond ``keep``. Newer ones (of a course that was given up) are let be."""
    if keep is None:
        return
    steps = {checkpoint_step(path): path for path in root.iterdir()}
    older = sorted((s for s in steps if s is not None and s <= step), reverse=True)
    for old in older[keep:]:
        shutil.rmtree(steps[old], ignore_errors=True)


@contextlib.contextmanager
def _write_errors(temporary: Path) -> Iterator[None]:
    """A failed write becomes one sentence; a lost rank, a RuntimeError or OSError too, stays what it is."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _is_write_error(error):
            raise
        raise EnvironmentNotReady(
            f"the checkpoint could not be written to {temporary}: {one_line(error)}",
            hint="see that the disk has room; the checkpoints before it are untouched",
        ) from error


def _is_write_error(error: Exception) -> bool:
    """torch reports a full disk as a RuntimeError of its zip writer, and collectives theirs as one too."""
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        return any(sign in text for sign in _TORCH_WRITE_ERRORS)
    return not isinstance(error, (ConnectionError, TimeoutError))
