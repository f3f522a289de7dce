"""F11: DeepSpeed's Muon is replaced by one that sees the gradient as every other optimizer does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.train.dist import gather_objects
from dslaunch.train.engine import ds_config
from dslaunch.train.optimizers.muon import MatrixMomentum, Piece, build_muon

# torch_adam and foreach choose among implementations, ns_method among two ways to the same.
_KEYS = frozenset({
    "lr", "muon_lr", "adam_lr", "momentum", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode",
    "ns_method", "foreach", "fp32_optimizer_states", "per_head_muon",
})  # fmt: skip
_ONLY = {"adam_w_mode": True, "fp32_optimizer_states": True, "per_head_muon": False}


def take_muon(settings: dict[str, Any], model: torch.nn.Module) -> tuple[dict[str, Any], Any, str | None]:
    """The config without its ``optimizer`` of type Muon, what makes ours, and a note; (config, None, None)
    for others.

    Raises ConfigError for a key that ours does not have, and where its iterations would run on a CPU.
    """
    name = ds_config.optimizer_type(settings)
    if (name or "").lower() != "muon":
        return settings, None, None
    params = dict(settings["optimizer"].get("params") or {})
    for key, value in params.items():
        if key not in _KEYS or value is not _ONLY.get(key, value):
            raise ConfigError(
                f"optimizer.params.{key} {value!r}: dslaunch's Muon, which takes the place of DeepSpeed's "
                "(docs/upstream.md, F11), has no such thing",
                hint=f"leave {key} out",
            )
    zero = settings.get("zero_optimization") or {}
    device = (zero.get("offload_optimizer") or {}).get("device", "none")
    if device != "none":
        raise ConfigError(
            f"Muon with offload_optimizer {device}: its matrix products would run on the CPU",
            hint="leave offload_optimizer out, or use AdamW",
        )
    rest = {key: value for key, value in settings.items() if key != "optimizer"}
    note = "Muon is dslaunch's own: DeepSpeed's clips and reports its update, not the gradient (F11)"
    return {**rest, "zero_allow_untested_optimizer": True}, build_muon(model, params), note


def place_muon(ds: Any) -> None:
    """Tell our Muon what lies in which flat shard; nothing for other optimizers. Collective.

    Source: utils/mixed_precision_linkage.py ``link_hp_params`` (stages 1 and 2), runtime/zero/stage3.py
    ``set_grad_positions``. Raises EnvironmentNotReady where the pieces of all ranks are not the tensors.
    """
    optimizer = getattr(ds.optimizer, "optimizer", None)
    if not isinstance(optimizer, MatrixMomentum):
        return  # at stage 0 it is DeepSpeed's optimizer itself, and has the parameters as they are
    try:
        shards = _of_stage_3(ds.optimizer) if ds.zero_optimization_stage() == 3 else _of_stages_1_and_2(ds)
        group = ds.optimizer.dp_process_group
    except AttributeError as error:
        raise _other_deepspeed(str(error)) from error
    everyone = gather_objects([[piece.numel for piece in pieces] for _, pieces in shards])
    placed = {}
    for index, (shard, pieces) in enumerate(shards):
        mine = []
        for place, piece in enumerate(pieces):
            parts, size = [numels[index][place] for numels in everyone], math.prod(piece.shape)
            if sum(parts) != size:
                raise _other_deepspeed("the shards do not add up to the parameters")
            is_shared = max(parts) < size
            if is_shared or piece.numel:
                mine.append(replace(piece, is_shared=is_shared))
        placed[shard] = mine
    optimizer.place(placed, group)


Shards = list[tuple[torch.Tensor, list[Piece]]]


def _of_stages_1_and_2(ds: Any) -> Shards:
    """Each group of parameters is one flat vector that is cut into equal parts, one a rank."""
    zero = ds.optimizer
    members = zero.bf16_groups if hasattr(zero, "bf16_groups") else zero.bit16_groups
    found = []
    for group, parameters in zip(zero.optimizer.param_groups, members, strict=True):
        pieces = []
        for p in parameters:
            here = p._hp_mapping  # None: nothing of it is in this rank's part
            inside, within = (here.hp_fragment_address, here.lp_fragment_address) if here else (None, None)
            pieces.append(
                Piece(
                    shape=tuple(p.shape),
                    first=within.start if within else 0,
                    start=inside.start if inside else 0,
                    numel=within.numel if within else 0,
                )
            )
        found.append((group["params"][0], pieces))
    return found


def _of_stage_3(zero: Any) -> Shards:
    """Each parameter is cut into equal parts, one a rank; a rank's parts lie one behind the other."""
    rank = torch.distributed.get_rank(group=zero.dp_process_group)
    found = []
    for shard, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        pieces, start = [], 0
        for p in parameters:
            size = p.partition_numel()
            first = min(rank * size, p.ds_numel)
            numel = min(size, p.ds_numel - first)
            pieces.append(Piece(shape=tuple(p.ds_shape), first=first, start=start, numel=numel))
            start += size
        found.append((shard, pieces))
    return found


def _other_deepspeed(what: str) -> EnvironmentNotReady:
    import deepspeed

    return EnvironmentNotReady(
        f"DeepSpeed {deepspeed.__version__} is not the one that dslaunch's Muon was made for: {what}",
        hint="install the DeepSpeed of constraints.txt, or use AdamW",
    )
