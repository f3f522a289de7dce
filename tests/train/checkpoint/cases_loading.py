"""Which checkpoint is loaded, and what is refused: damaged, of another run, or with foreign code in it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dslaunch.core.checkpoint_manifest import hash_files
from dslaunch.train.checkpoint import load_checkpoint
from tests.train.checkpoint.saving import OUT, error_of, on_rank_0, shard, two_saved
from tests.train.rank_cases import Case, OneWeight, config, engine_for, master


def damaged(name: str, damage: Callable[[Path], Any]) -> dict[str, Any]:
    """Damage step-2 of a pair and see what is loaded, with which words, and by which weight."""
    with engine_for(OneWeight(size=3), config(2)) as engine:
        root = two_saved(f"damaged-{name}", engine)
    on_rank_0(lambda: damage(root))
    notes: list[str] = []
    with engine_for(OneWeight(size=3), config(2)) as engine:
        error = None
        try:
            extra = load_checkpoint(engine, root, on_note=notes.append)
        except Exception as caught:
            extra, error = None, f"{type(caught).__name__}: {caught}"
        return {"extra": extra, "error": error, "notes": notes, "weight": master(engine.module.w)[0]}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def all_broken(root: Path) -> None:
    (root / "step-1" / "manifest.json").unlink()
    truncate(shard(root, 0))


def half_saved(root: Path) -> None:
    shutil.copytree(root / "step-2", root / ".saving-step-3")
    (root / "latest").write_text(".saving-step-3\n")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "none": lambda root: None,
    "truncated": lambda root: truncate(shard(root, 1)),
    "missing": lambda root: shard(root, 1).unlink(),
    "flipped": lambda root: flip_a_bit(shard(root, 0)),
    "no-manifest": lambda root: (root / "step-2" / "manifest.json").unlink(),
    "bad-manifest": lambda root: (root / "step-2" / "manifest.json").write_text('{"schema_version": 1}'),
    "no-rng": lambda root: (root / "step-2" / "rng" / "rank-1.json").unlink(),
    "latest-missing": lambda root: (root / "latest").unlink(),
    "latest-empty": lambda root: (root / "latest").write_text(""),
    "latest-names-nothing": lambda root: (root / "latest").write_text("step-99\n"),
    "latest-names-the-older": lambda root: (root / "latest").write_text("step-1\n"),
    "half-saved": half_saved,
    "all": all_broken,
}


def nothing_saved() -> dict[str, Any]:
    with engine_for(OneWeight(), config(1)) as engine:
        return {"loaded": load_checkpoint(engine, OUT / "nothing"), "weight": master(engine.module.w)}


def mismatches() -> dict[str, Any]:
    """Another stage, precision, world size or parameter: refused with the engine untouched."""
    with engine_for(OneWeight(size=3), config(2, "bf16")) as engine:
        root = two_saved("mismatch", engine)
    errors = {}
    for name, other in {"stage": config(1, "bf16"), "precision": config(2, "fp32")}.items():
        with engine_for(OneWeight(size=3), other) as engine:
            errors[name] = error_of(lambda e=engine: load_checkpoint(e, root))  # type: ignore[misc]
            assert master(engine.module.w) == [0.0] * 3
    with engine_for(OneWeight(size=5), config(2, "bf16")) as engine:
        errors["shape"] = error_of(lambda: load_checkpoint(engine, root))
    manifest = root / "step-2" / "manifest.json"
    saved = json.loads(manifest.read_text())
    older = {key: value for key, value in saved.items() if key not in ("engine", "weight_sums")}
    with engine_for(OneWeight(size=3), config(2, "bf16")) as engine:
        for name, values in {
            "world": {**saved, "world_size": 4},
            "engine": {**saved, "engine": "torch"},
        }.items():
            on_rank_0(lambda v=values: manifest.write_text(json.dumps(v)))  # type: ignore[misc]
            errors[name] = error_of(lambda: load_checkpoint(engine, root))
        on_rank_0(lambda: manifest.write_text(json.dumps(older)))
        errors["none: an older manifest"] = str(load_checkpoint(engine, root))
    return errors


class Touch:
    """Pickled, it runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {OUT}/code-ran",))


def foreign_pickle() -> dict[str, Any]:
    """One shard refers to os.system, and the manifest agrees with it."""
    with engine_for(OneWeight(size=3), config(2)) as engine:
        root = two_saved("foreign", engine)

    def poison() -> None:
        path = shard(root, 1)
        torch.save({**torch.load(path, weights_only=False), "more": Touch()}, path)
        manifest = root / "step-2" / "manifest.json"
        value = json.loads(manifest.read_text())
        name = path.relative_to(root / "step-2").as_posix()
        value["files"][name] = dataclasses.asdict(hash_files(root / "step-2", [name], sync=False)[name])
        manifest.write_text(json.dumps(value))

    on_rank_0(poison)
    with engine_for(OneWeight(size=3), config(2)) as engine:
        error = error_of(lambda: load_checkpoint(engine, root))
        return {"error": error, "ran": (OUT / "code-ran").exists(), "weight": master(engine.module.w)[0]}


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        f"damaged/{name}": lambda n=name, d=damage: damaged(n, d)  # type: ignore[misc]
        for name, damage in DAMAGES.items()
    }
    cases["nothing"] = nothing_saved
    cases["mismatch"] = mismatches
    cases["foreign-pickle"] = foreign_pickle
    return cases
