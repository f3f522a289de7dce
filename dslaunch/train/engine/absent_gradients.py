"""Cures for parameters that get no gradient: in a micro-batch, in a window, or on one rank.

DeepSpeed then takes what lies in its buffers, from the window before. Each function takes the live
engine right after ``deepspeed.initialize``, as those of ``cures`` do. Checked against DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch

from dslaunch.core.errors import ConfigError
from dslaunch.train.engine.cures import other_deepspeed

Complete = Callable[[], None]
_BUFFERS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def _nothing() -> None:
    pass


def adds_up_by_place(ds: Any) -> Literal["set", "order"] | None:
    """F23: what must be the same on all ranks for their gradients to be added up as they should be.

    Stages 1 and 2 put the gradients that they have one behind the other and add those vectors up; stage 2
    (and 1 with overlap_comm) in the order in which backward makes them. So an expert of one rank is added to
    another one of the next, in silence where the sizes agree. Stage 3 sees it for itself and stops; fp32 at
    stage 0, and bf16 at stage 1 with fp32 accumulation, have a place for each parameter.
    """
    stage, optimizer = ds.zero_optimization_stage(), ds.optimizer
    if stage not in (1, 2) or hasattr(optimizer, "fp32_groups_has_gradients"):
        return None
    return "order" if stage == 2 or getattr(optimizer, "overlap_comm", False) else "set"


def count_gradients_of_other_ranks(ds: Any) -> None:
    """F20: bf16 at stage 1 with fp32 accumulation: every rank takes its norm over all parameters.

    Upstream a rank leaves out those that had no gradient on that rank itself, though the others' has
    reached it: its norm is too small, and so each rank clips its part of the weights by another factor.
    Source: runtime/bf16_optimizer.py ``get_grads_for_norm``. (One without any gradient holds zeros.)
    """
    optimizer = ds.optimizer
    if not hasattr(optimizer, "fp32_groups_has_gradients"):
        return
    step = optimizer.step

    @functools.wraps(step)
    def step_with_all(closure: Any = None) -> Any:
        optimizer.fp32_groups_has_gradients = [[True] * len(g) for g in optimizer.fp32_groups_has_gradients]
        return step(closure)

    optimizer.step = step_with_all


def build_completion(ds: Any) -> Complete:
    """F21: at stage 3, and with offload at each stage, a gradient that did not come is zero, not an old one.

    The function that is returned must be called after each backward. Upstream the first gradient of a
    window is written over the last window's and the others are added to it, so a parameter without one
    in the first micro-batch keeps the old gradient; and with offload only what came in the last micro-batch
    reaches the optimizer. Source: runtime/zero/stage3.py ``partition_grads``,
    stage_1_and_2.py ``copy_grads_in_partition``.
    """
    optimizer = ds.optimizer
    if getattr(optimizer, "zenflow", False):
        return _nothing  # it has sums of its own
    if ds.zero_optimization_stage() == 3:
        return _complete_stage_3(optimizer)
    completions = []
    if ds.zero_optimization_stage() == 1 and getattr(optimizer, "overlap_comm", False):
        completions.append(_refuse_late(ds))
    if getattr(optimizer, "cpu_offload", False):
        completions.append(_complete_offload(optimizer))

    def complete() -> None:
        for one in completions:
            one()

    return complete


def _refuse_late(ds: Any) -> Complete:
    """F22: stage 1 with overlap_comm reduces only what has a gradient in a window's last micro-batch.

    What had one before it keeps this rank's own. Source: stage_1_and_2.py ``reduce_gradients``.
    """
    optimizer, names = ds.optimizer, {parameter: name for name, parameter in ds.module.named_parameters()}
    came: set[torch.nn.Parameter] = set()
    before: set[torch.nn.Parameter] = set()
    process_gradients = optimizer.process_gradients

    @functools.wraps(process_gradients)
    def process_and_note(parameter: torch.nn.Parameter, group: int) -> Any:
        came.add(parameter)
        return process_gradients(parameter, group)

    def complete() -> None:
        late = before - came
        before.update(came)
        came.clear()
        if not optimizer.is_gradient_accumulation_boundary():
            return
        before.clear()
        if late:
            name = min(names[parameter] for parameter in late)
            raise ConfigError(
                f"zero_optimization.overlap_comm at stage 1: {name} got no gradient in the last micro-batch "
                "of a window, and DeepSpeed then does not add up over the ranks what it got before",
                hint="set overlap_comm to false, or use stage 2",
            )

    optimizer.process_gradients = process_and_note
    return complete


def _complete_stage_3(optimizer: Any) -> Complete:
    _require(
        optimizer, _BUFFERS, "partition_grads", "micro_step_id", "_finalize_offload_gradient_accumulation"
    )
    came: set[int] = set()
    partition_grads = optimizer.partition_grads

    @functools.wraps(partition_grads)
    def partition_and_note(parameters: Any, gradients: Any) -> Any:
        came.update(p.ds_id for p in parameters)
        return partition_grads(parameters, gradients)

    def complete() -> None:
        buffers = getattr(optimizer, _BUFFERS)  # another dict after offload_states
        absent = buffers.keys() - came
        came.clear()
        if optimizer.micro_step_id == 0:
            for ds_id in absent:
                buffers[ds_id].zero_()
        if absent and optimizer.offload_optimizer and optimizer.is_gradient_accumulation_boundary():
            _finalize(optimizer, "_offload_boundary_param_ids", absent)

    optimizer.partition_grads = partition_and_note
    return complete


def _complete_offload(optimizer: Any) -> Complete:
    _require(
        optimizer, "params_in_partition", "copy_grads_in_partition", "micro_step_id", "grad_position",
        "accumulated_grads_in_cpu", "_finalize_cpu_offload_gradient_accumulation",
    )  # fmt: skip
    own = {
        optimizer.get_param_id(p) for group in optimizer.params_in_partition for p in group if p.requires_grad
    }
    came: set[int] = set()
    copy_grads = optimizer.copy_grads_in_partition

    @functools.wraps(copy_grads)
    def copy_and_note(parameter: Any, *rest: Any) -> Any:
        came.add(optimizer.get_param_id(parameter))
        return copy_grads(parameter, *rest)

    def complete() -> None:
        absent = own - came
        came.clear()
        at_end = optimizer.is_gradient_accumulation_boundary()
        # Stage 1 reduces once, at the end, all that has come in the window.
        if absent and (optimizer.micro_step_id == 0 if optimizer.partition_gradients else at_end):
            _zero_offloaded(optimizer, absent)
        if absent and at_end and optimizer.partition_gradients:
            late = optimizer._offload_accumulated_param_ids & absent
            _finalize(optimizer, "_offload_accumulated_param_ids", late)
            came.clear()

    optimizer.copy_grads_in_partition = copy_and_note
    return complete


def _require(optimizer: Any, *names: str) -> None:
    """Raises EnvironmentNotReady where DeepSpeed's optimizer lacks one of these: it is another DeepSpeed."""
    if missing := [name for name in names if not hasattr(optimizer, name)]:
        raise other_deepspeed(
            f"{type(optimizer).__name__} has no {missing[0]}",
            "old gradients (F21)",
            "zero_optimization.stage 2 without offload",
        )


def _zero_offloaded(optimizer: Any, ids: Collection[int]) -> None:
    for param_id in ids:
        group, _, start, size = optimizer.grad_position[param_id]
        optimizer.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, start, size).zero_()
        if param_id in optimizer.accumulated_grads_in_cpu:
            optimizer.accumulated_grads_in_cpu[param_id].zero_()


def _finalize(optimizer: Any, name: str, ids: Collection[int]) -> None:
    """DeepSpeed's own way from the sums of a window to the optimizer, for these parameters alone."""
    all_ids = getattr(optimizer, name)
    setattr(optimizer, name, set(ids))
    if name == "_offload_boundary_param_ids":
        optimizer._finalize_offload_gradient_accumulation()
    else:
        optimizer._finalize_cpu_offload_gradient_accumulation()
    setattr(optimizer, name, all_ids)
