"""Cures for what DeepSpeed does wrong at run time, one function each.

Each takes the live DeepSpeed engine right after ``deepspeed.initialize`` and changes
that one instance. Nothing here patches a class or a module, but for
:func:`permit_emulated_fp16` and :func:`forget_autocast_of_other_engines`. What is cured,
the evidence, and how to see when upstream has mended it: docs/upstream.md. Checked
against DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from dslaunch.core.errors import EnvironmentNotReady


def permit_emulated_fp16() -> bool:
    """Let DeepSpeed run fp16 on a CPU that has no fp16 instructions. For tests and debugging.

    The accelerator answers for the whole process, so this one is process-wide.
    Returns whether anything had to be changed.
    Source: runtime/engine.py ``_do_sanity_check``, accelerator/cpu_accelerator.py.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.is_fp16_supported():
        return False
    accelerator.is_fp16_supported = lambda: True
    return True


def forget_autocast_of_other_engines() -> None:
    """F6: an engine's float16 autocast is no business of the engines made after it.

    DeepSpeed keeps it in two globals: later ZeRO optimizers put a GradScaler of their own on gradients
    that were never scaled. An engine with the ``torch_autocast`` block sets them again when it is made;
    :func:`keep_own_communication_dtype` covers the one place that reads them later.
    Source: runtime/torch_autocast.py ``init_autocast_params``. Raises EnvironmentNotReady without them.
    """
    from deepspeed.runtime import torch_autocast

    if not hasattr(torch_autocast, "TORCH_AUTOCAST_INITIALIZED"):
        raise other_deepspeed("torch_autocast keeps its state elsewhere", "autocast in one process (F6)")
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


def keep_own_communication_dtype(ds: Any) -> None:
    """F6: each engine reduces in its own dtype, whatever engine was made last.

    Source: runtime/base_optimizer.py ``get_param_comm_dtype``, which asks the globals at every reduction.
    """
    from deepspeed.runtime.torch_autocast import get_comm_dtype

    optimizer = ds.optimizer
    if not hasattr(optimizer, "get_param_comm_dtype"):
        return  # fp32 at stage 0 has torch's own optimizer
    if ds.torch_autocast_enabled():
        optimizer.get_param_comm_dtype = get_comm_dtype
    else:
        optimizer.get_param_comm_dtype = lambda parameter: optimizer.communication_data_type


def delay_loss_scale_growth(ds: Any) -> None:
    """F2: on the step where the loss scale grows, unscale by the scale that was used.

    ``_update_scale`` runs before the gradients are unscaled, so a growth halves that
    update (and, at stage 3, the reported norm). Here a good step's update of the scale
    waits until ``optimizer.step`` has returned; an overflow passes through at once.
    The wrapper sits on the optimizer, never on its ``loss_scaler``: that object is
    pickled into checkpoints and replaced when one is loaded.
    Source: runtime/zero/stage_1_and_2.py and stage3.py, ``step``.
    Raises EnvironmentNotReady where the optimizer has no such method: DeepSpeed has changed.
    """
    optimizer = ds.optimizer
    if not hasattr(optimizer, "_update_scale"):
        raise other_deepspeed(f"{type(optimizer).__name__} has no _update_scale", "the loss scale (F2)")
    update_scale = optimizer._update_scale
    step = optimizer.step
    waiting = False

    @functools.wraps(update_scale)
    def update_or_wait(has_overflow: bool = False) -> None:
        nonlocal waiting
        if has_overflow:
            update_scale(has_overflow)
        else:
            waiting = True

    @functools.wraps(step)
    def step_then_update(closure: Any = None) -> Any:
        nonlocal waiting
        waiting = False
        result = step(closure)
        if waiting:
            update_scale(False)
        return result

    optimizer._update_scale = update_or_wait
    optimizer.step = step_then_update


def forget_offloaded_sums_of_skipped_steps(ds: Any) -> None:
    """F17: with offload at stages 1 and 2, start anew after a step that was skipped.

    Where 16-bit gradients are summed in fp32 they lie in ``averaged_gradients`` during the
    window. An applied step lets go of them, and so does a skipped one, but not with offload:
    the inf in them meets every later gradient, and all steps to come are skipped.
    Source: runtime/zero/stage_1_and_2.py, the branch of ``step`` for an overflow.
    """
    optimizer = ds.optimizer
    if not getattr(optimizer, "cpu_offload", False) or not hasattr(optimizer, "averaged_gradients"):
        return
    step = optimizer.step

    @functools.wraps(step)
    def step_and_forget(closure: Any = None) -> Any:
        result = step(closure)
        if optimizer.overflow:
            optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)
        return result

    optimizer.step = step_and_forget


def name_the_stage_in_checkpoints(ds: Any) -> None:
    """F12, F14: make every ZeRO checkpoint say its stage, as a plain number.

    F12: with bf16, fp32 accumulation and stage 1 DeepSpeed takes its BF17_Optimizer, whose
    state lacks the key by which its own converter knows a ZeRO checkpoint; all else is there.
    F14: elsewhere the value is an enum member, which Python before 3.11.4 pickles as a call
    of ``getattr``: no loader that checks what it unpickles can let that pass.
    Source: ``state_dict`` in runtime/bf16_optimizer.py, zero/stage_1_and_2.py and
    zero/stage3.py; utils/zero_to_fp32.py ``parse_optim_states``.
    """
    from deepspeed.checkpoint.constants import ZERO_STAGE

    stage = int(ds.zero_optimization_stage())
    if stage == 0:
        return
    state_dict = ds.optimizer.state_dict

    @functools.wraps(state_dict)
    def state_dict_with_stage() -> dict[str, Any]:
        state = state_dict()
        return {**state, ZERO_STAGE: int(state.get(ZERO_STAGE, stage))}

    ds.optimizer.state_dict = state_dict_with_stage


def check_gradients_at_fp32_stage_0(ds: Any) -> None:
    """F8: fp32 at stage 0 learns to report its norm and to skip a step with inf or nan in it.

    There DeepSpeed hands the plain torch optimizer to the user: no check, and
    ``get_global_grad_norm()`` is None. The engine asks the optimizer for ``overflow``
    and ``_global_grad_norm`` if it has them (runtime/engine.py ``_take_model_step``);
    so they are given to it, and its step does nothing after an overflow.
    :func:`measure_fp32_stage_0` must be called before each ``ds.step`` at a boundary.
    """
    optimizer = ds.optimizer
    step = optimizer.step

    @functools.wraps(step)  # keeps the mark that torch's schedulers look for
    def step_unless_overflow(*args: Any, **kwargs: Any) -> Any:
        return None if optimizer.overflow else step(*args, **kwargs)

    optimizer.overflow = False
    optimizer._global_grad_norm = 0.0
    optimizer.step = step_unless_overflow


def measure_fp32_stage_0(ds: Any) -> None:
    """Put the norm and the verdict of this step on the optimizer. Waits for the gradients.

    The gradients are already averaged over the ranks, so each rank finds the same
    number. float16 autocast still has its scale on them at this point.
    """
    scaler = ds.torch_autocast_z0_gradscaler
    scale = scaler.get_scale() if scaler else 1.0
    grads = [p.grad for p in ds.module.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads)) / scale if grads else 0.0
    ds.optimizer.overflow = not math.isfinite(norm)
    # ZeRO reports inf for nan as well; so that the same step reads the same at every stage.
    ds.optimizer._global_grad_norm = math.inf if ds.optimizer.overflow else norm


def let_go_of_gradients(ds: Any) -> None:
    """For passes that no step follows: leave nothing of DeepSpeed but stage 3's gathering of parameters.

    Its hooks on gradients reduce them and keep them; those on the outputs of each forward refuse
    a backward that is not its own. Source: zero/stage_1_and_2.py ``create_gradient_handling_hooks``,
    zero/stage3.py, bf16_optimizer.py ``create_grad_acc_hooks``, engine.py ``forward``.
    """
    for name in ("_grad_acc_hooks", "_leaf_module_hooks"):
        for hook in getattr(ds.optimizer, name, ()):
            hook.remove()
    ds._backward_prologue = lambda: None
    ds._backward_prologue_per_tensor = lambda gradient: gradient


def other_deepspeed(what: str, cured: str, instead: str = "precision bf16 or fp32") -> EnvironmentNotReady:
    """A cure that finds nothing to hold on to must not vanish without a word."""
    import deepspeed

    return EnvironmentNotReady(
        f"DeepSpeed {deepspeed.__version__} is not the one that the cure of {cured} was made for: {what}",
        hint=f"install the DeepSpeed of constraints.txt, or use {instead}",
    )
