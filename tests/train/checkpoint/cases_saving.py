"""Saving: what is pruned, and what a full disk, a kill or a lost rank leaves."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from dslaunch.train import dist
from dslaunch.train.checkpoint import load_checkpoint, read_manifest, save, save_checkpoint
from tests.train.checkpoint.saving import OUT, error_of, on_rank_0, two_saved
from tests.train.rank_cases import RANK, Case, OneWeight, config, engine_for


def pruned() -> dict[str, Any]:
    """Five saves with keep=2; then step 3 again as after a rollback."""
    root = OUT / "pruned"

    def names() -> list[str]:
        dist.barrier("listing")
        return sorted(p.name for p in root.iterdir())

    with engine_for(OneWeight(), config(1)) as engine:
        for step in (1, 2, 9, 10, 11):
            save_checkpoint(engine, root, step, extra={}, keep=2)
        first = names()
        save_checkpoint(engine, root, 3, extra={}, keep=1)
        second = names()
        save_checkpoint(engine, root, 3, extra={"again": True}, keep=1)
        return {"first": first, "second": second, "third": names(), "extra": load_checkpoint(engine, root)}


def disk_full() -> dict[str, Any]:
    """A file size limit of 100 bytes stands in for a full disk; afterwards all is well again."""
    with engine_for(OneWeight(size=3), config(2)) as engine:
        root = two_saved("full", engine)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            error = error_of(lambda: save_checkpoint(engine, root, 3, extra={}))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier("both failed")
        latest = (root / "latest").read_text()
        intact = load_checkpoint(engine, root)
        save_checkpoint(engine, root, 4, extra={"step": 4})
        left = sorted(p.name for p in root.iterdir())
        return {"error": error, "latest": latest, "intact": intact, "left": left}


def interrupted() -> dict[str, Any]:
    """Killed between the two renames of saving step 2 again: what was moved aside is taken back."""
    with engine_for(OneWeight(size=3), config(2)) as engine:
        root = two_saved("interrupted", engine)
        on_rank_0(lambda: (root / "step-2").rename(root / ".replaced-step-2"))
        loaded = load_checkpoint(engine, root)
        on_rank_0(lambda: (root / "step-2").rename(root / ".replaced-step-2"))
        save_checkpoint(engine, root, 3, extra={})
        return {"loaded": loaded, "left": sorted(p.name for p in root.iterdir())}


def stale_listing() -> dict[str, Any]:
    """As on a network disk: no rank lists yet what the other has written last."""
    real = save.list_files

    def without_the_others(checkpoint: Path) -> list[str]:
        unseen = (f"zero_pp_rank_{1 - RANK}_", f"rng/rank-{1 - RANK}")
        return [name for name in real(checkpoint) if not name.startswith(unseen)]

    root = OUT / "stale"
    with engine_for(OneWeight(size=3), config(2)) as engine:
        save.list_files = without_the_others
        try:
            path = save_checkpoint(engine, root, 1, extra={})
        finally:
            save.list_files = real
    return {"manifest": sorted(read_manifest(path).files), "there": real(path)}


def lost_peer() -> str:
    """A collective inside the save that fails as gloo does when the other rank is gone."""
    text = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"

    def gone(*arguments: Any, **more: Any) -> None:
        raise RuntimeError(text)

    with engine_for(OneWeight(), config(1)) as engine:
        engine.deepspeed.save_checkpoint = gone
        return error_of(lambda: save_checkpoint(engine, OUT / "lost", 1, extra={}))


def no_room() -> str:
    """The disk is smaller than the checkpoint (a model that claims to be huge)."""
    with engine_for(OneWeight(), config(1)) as engine:
        engine.module.w.ds_numel = 2**60
        return error_of(lambda: save_checkpoint(engine, OUT / "no-room", 1, extra={}))


def not_writable() -> str:
    """The root cannot be made: a file is in its place."""
    on_rank_0(lambda: (OUT / "a-file").write_text(""))
    with engine_for(OneWeight(), config(1)) as engine:
        return error_of(lambda: save_checkpoint(engine, OUT / "a-file" / "checkpoints", 1, extra={}))


def missing_rank() -> str:
    """Rank 0 alone saves: it is told so. The last case, as the group is broken afterwards."""
    with engine_for(OneWeight(), config(1)) as engine:
        dist.init_world(timeout_s=1.0)
        if RANK == 1:
            return "stayed away"
        return error_of(lambda: engine.save_state(OUT / "step-5", trainable_only=False))


def all_cases() -> dict[str, Case]:
    return {
        "pruned": pruned,
        "full": disk_full,
        "interrupted": interrupted,
        "stale-listing": stale_listing,
        "lost-peer": lost_peer,
        "no-room": no_room,
        "not-writable": not_writable,
    }


def last_cases() -> dict[str, Case]:
    """The group is broken afterwards: nothing may come after it."""
    return {"missing-rank": missing_rank}
