"""Run by the ranks of test_checkpoint.py: python -m tests.train.checkpoint.ranks_checkpoint OUT_DIR."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dslaunch.core.plan import SchedulerPlan
from dslaunch.losses.sft import token_nll
from dslaunch.train import dist
from dslaunch.train.checkpoint import load_checkpoint, read_manifest, save, save_checkpoint
from dslaunch.train.checkpoint.manifest import hash_files
from dslaunch.train.engine import Engine
from dslaunch.train.schedule import build_scheduler_factory
from tests.train.rank_cases import (
    SAMPLES,
    Case,
    OneWeight,
    TinyLM,
    bare_deepspeed,
    config,
    engine_for,
    master,
    run_cases,
)

RANK = int(os.environ["RANK"])
OUT = Path(sys.argv[1])
TOTAL, HALF = 12, 6
OVERFLOWS = {2, 3, 7}
ADAMW = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}


def settings(stage: int, precision: str) -> dict[str, Any]:
    scale = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    blocks: dict[str, Any] = {"fp16": scale} if precision == "fp16" else {}
    if precision == "bf16-accum32":
        precision, blocks = "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}
    return config(stage, precision, accumulation=2, clipping=1.0, optimizer=ADAMW, **blocks)


def schedule() -> Any:
    return build_scheduler_factory(SchedulerPlan(type="cosine", warmup_steps=3), TOTAL)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train(engine: Engine, first: int, last: int) -> list[list[Any]]:
    """Steps ``first`` .. ``last``-1 with dropout; each rank's own samples; overflows under fp16."""
    engine.train()
    records = []
    for step in range(first, last):
        for k in range(2):
            ids, targets = SAMPLES[(step * 4 + k * 2 + RANK) % len(SAMPLES)]
            loss = token_nll(engine(torch.tensor([ids])), torch.tensor([targets])).sum
            if engine.precision == "fp16" and step in OVERFLOWS and RANK == 1 and k == 1:
                loss = loss * 1e30
            engine.backward_token_sum(loss, num_tokens=10 + step)
            result = engine.step()
        assert result is not None
        draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        records.append([result.step, result.loss, result.grad_norm, result.lr, result.loss_scale, *draws])
    return records


def weights(engine: Engine) -> list[list[float]]:
    return [master(p) for p in engine.module.parameters() if p.requires_grad]


def resume(stage: int, precision: str) -> dict[str, Any]:
    """Twelve steps straight, and six, saved, and six more in a fresh engine from another seed."""
    root = OUT / f"resume-{stage}-{precision}"
    seed_all(100 + RANK)
    with engine_for(TinyLM(dropout=0.1), settings(stage, precision), lr_scheduler=schedule()) as engine:
        straight = train(engine, 0, TOTAL)
        straight_end = weights(engine)
    seed_all(100 + RANK)
    with engine_for(TinyLM(dropout=0.1), settings(stage, precision), lr_scheduler=schedule()) as engine:
        train(engine, 0, HALF)
        save_checkpoint(engine, root, HALF, extra={"position": [HALF, "a"]})
        continued = train(engine, HALF, TOTAL)
    seed_all(7)
    other = TinyLM(dropout=0.1)
    with torch.no_grad():
        other.head.weight.normal_()
    with engine_for(other, settings(stage, precision), lr_scheduler=schedule()) as engine:
        extra = load_checkpoint(engine, root)
        step = engine.global_step
        resumed = train(engine, HALF, TOTAL)
        resumed_end = weights(engine)
        skipped = engine.skipped_steps
    return {
        "straight": straight[HALF:],
        "continued": continued,
        "resumed": resumed,
        "straight_end": straight_end,
        "resumed_end": resumed_end,
        "extra": extra,
        "step": step,
        "skipped": skipped,
    }


def frozen_embedding() -> TinyLM:
    model = TinyLM()
    model.embedding.requires_grad_(False)
    return model


def adapters(stage: int) -> dict[str, Any]:
    """A frozen part is not in the checkpoint, and the trained part comes back."""
    root = OUT / f"adapters-{stage}"
    with engine_for(frozen_embedding(), settings(stage, "fp32")) as engine:
        train(engine, 0, 2)
        path = save_checkpoint(engine, root, 2, extra={})
        expected = train(engine, 2, 4)
    with engine_for(frozen_embedding(), settings(stage, "fp32")) as engine:
        load_checkpoint(engine, root)
        resumed = train(engine, 2, 4)
    with engine_for(TinyLM(), settings(stage, "fp32")) as engine:
        error = error_of(lambda: load_checkpoint(engine, root))
    keys: list[str] = []
    if RANK == 0 and stage < 3:
        state = torch.load(path / "mp_rank_00_model_states.pt", weights_only=False)
        keys = sorted(state["module"])
    return {"expected": expected, "resumed": resumed, "keys": keys, "error": error}


def error_of(action: Callable[[], Any]) -> str:
    try:
        return f"returned {action()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def on_rank_0(action: Callable[[], Any]) -> None:
    """Do something to the files, with all ranks waiting before and after."""
    dist.barrier("before")
    if RANK == 0:
        action()
    dist.barrier("after")


def two_saved(name: str, engine: Engine) -> Path:
    """A root with step-1 (weight -1) and step-2 (weight -2)."""
    root = OUT / name
    for step in (1, 2):
        engine.backward(engine(torch.tensor([1.0])))
        engine.step()
        save_checkpoint(engine, root, step, extra={"step": step})
    return root


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


def shard(root: Path, rank: int) -> Path:
    (found,) = (root / "step-2").glob(f"*zero_pp_rank_{rank}_*optim_states.pt")
    return found


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


def convert(root: Path, tag: str) -> dict[str, list[float]]:
    """DeepSpeed's own converter; its progress goes to stderr."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(sys.stderr):
        state = get_fp32_state_dict_from_zero_checkpoint(str(root), tag=tag)
    return {name: tensor.double().flatten().tolist() for name, tensor in state.items()}


def converted(stage: int, precision: str) -> dict[str, Any]:
    """The fp32 weights as the engine holds them and as they are read back from a checkpoint."""
    root = OUT / f"converted-{stage}-{precision}"
    with engine_for(TinyLM(), settings(stage, precision)) as engine:
        train(engine, 0, 2)
        save_checkpoint(engine, root, 2, extra={})
        held = {name: master(p) for name, p in engine.module.named_parameters()}
    return {"held": held, "read": convert(root, "step-2") if RANK == 0 else held}


def bare_bf16_converted() -> str:
    """The same without our cures, for stage 1 with fp32 accumulation."""
    root = OUT / "bare-converted"
    with bare_deepspeed(TinyLM(), settings(1, "bf16-accum32")) as ds:
        for _ in range(2):
            ds.backward(ds(torch.tensor([[1, 2]])).float().sum())
            ds.step()
        ds.save_checkpoint(str(root), tag="step-2")
    return error_of(lambda: convert(root, "step-2")) if RANK == 0 else ""


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
    on_rank_0(lambda: manifest.write_text(json.dumps({**saved, "world_size": 4})))
    with engine_for(OneWeight(size=3), config(2, "bf16")) as engine:
        errors["world"] = error_of(lambda: load_checkpoint(engine, root))
    return errors


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
    """Rank 1 never comes: rank 0 is told so. The last case, as the group is broken afterwards."""
    dist.init_world()
    if RANK == 1:
        return "stayed away"
    return error_of(lambda: dist.barrier("the checkpoint of step 5", timeout_s=1.0))


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for stage in (0, 1, 2, 3):
        for precision in ("fp32", "bf16", "fp16", "bf16-accum32"):
            cases[f"resume/{stage}/{precision}"] = lambda s=stage, p=precision: resume(s, p)  # type: ignore[misc]
        cases[f"adapters/{stage}"] = lambda s=stage: adapters(s)  # type: ignore[misc]
    for name, damage in DAMAGES.items():
        cases[f"damaged/{name}"] = lambda n=name, d=damage: damaged(n, d)  # type: ignore[misc]
    for stage in (1, 2, 3):
        for precision in ("fp32", "bf16", "fp16", "bf16-accum32"):
            cases[f"converted/{stage}/{precision}"] = lambda s=stage, p=precision: converted(s, p)  # type: ignore[misc]
    cases["bare-converted"] = bare_bf16_converted
    cases["nothing"] = nothing_saved
    cases["mismatch"] = mismatches
    cases["pruned"] = pruned
    cases["full"] = disk_full
    cases["interrupted"] = interrupted
    cases["stale-listing"] = stale_listing
    cases["foreign-pickle"] = foreign_pickle
    cases["lost-peer"] = lost_peer
    cases["no-room"] = no_room
    cases["not-writable"] = not_writable
    cases["missing-rank"] = missing_rank
    return cases


if __name__ == "__main__":
    run_cases(all_cases(), OUT, RANK)
