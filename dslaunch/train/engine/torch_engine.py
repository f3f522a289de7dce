"""Mixed precision without DeepSpeed: autocast, GradScaler and DistributedDataParallel.

The same interface, step result and checkpoints as the engine on DeepSpeed, so that one run file
can be trained with both and compared. Every rank holds the whole model and all optimizer states;
the trained weights are fp32 and are themselves the masters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import Fp16Plan, WatchPlan
from dslaunch.train.engine import torch_state
from dslaunch.train.engine.gradient_witness import LocalGradients
from dslaunch.train.engine.own_loop import USUAL_WATCH, OnEvent, OwnLoop, build_own_loop
from dslaunch.train.engine.result import StepResult
from dslaunch.train.engine.settings import permit_fp16
from dslaunch.train.engine.step_rules import at_minimum_scale, check_num_tokens, skip_reason
from dslaunch.train.engine.window import Window
from dslaunch.train.fp32_modules import to_fp32_throughout

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NEVER = 2**31 - 1  # steps until a static scale grows
# GradScaler doubles for ever, up to inf, where gradients are 0; no fp16 needs more than this.
_HIGHEST = 2.0**32
Optimizers = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """``fp16``: the loss scale, where precision is fp16. ``gradient_clipping`` 0: no clipping."""

    precision: Literal["bf16", "fp16", "fp32"]
    gradient_accumulation_steps: int
    gradient_clipping: float
    fp16: Fp16Plan | None = None


def initialize_torch(
    model: torch.nn.Module,
    settings: TorchSettings,
    optimizer: Optimizers,
    lr_scheduler: Callable[[torch.optim.Optimizer], Any],
    device: torch.device,
    *,
    allow_emulated_fp16: bool = False,
    watch: WatchPlan | Mapping[str, Any] | None = USUAL_WATCH,
    run_dir: str | Path | None = None,
    trace_loss: Callable[..., torch.Tensor] | None = None,
    on_event: OnEvent | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> TorchEngine:
    """An engine for ``model``, which is moved to ``device``. The process group must have been joined.

    ``optimizer`` gets the parameters that require a gradient and ``lr_scheduler`` the optimizer.
    ``allow_emulated_fp16`` and all after it are those of ``initialize``. Raises ConfigError where
    nothing is trained, a trained parameter is not in fp32, or the device has no fp16.
    """
    notes = [note] if (note := permit_fp16(settings.precision, allow_emulated_fp16)) else []
    for text in notes:
        on_note(text)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient: there is nothing to train")
    if low := [name for name, p in trained.items() if p.dtype != torch.float32]:
        dtype = str(trained[low[0]].dtype).removeprefix("torch.")
        raise ConfigError(
            f"engine torch: {low[0]} is trained and {dtype} ({len(low)} such parameters); trained weights "
            "must be float32, which autocast casts for forward",
            hint="load the model in float32, or take its trained parameters to it: parameter.data.float()",
        )
    model.to(device)
    made = optimizer(list(trained.values()))
    own_loop = None
    if watch is not None:
        own_loop = build_own_loop(
            watch, precision=settings.precision, rank=torch.distributed.get_rank(), run_dir=run_dir,
            on_event=on_event, trace_loss=trace_loss, notes=notes,
        )  # fmt: skip
    return TorchEngine(model, settings, made, lr_scheduler(made), device, on_note, own_loop)


class TorchEngine:
    """See :func:`initialize_torch`; its members mean what those of ``Engine`` mean."""

    kind: Literal["torch"] = "torch"
    zero_stage = 0

    def __init__(
        self,
        model: torch.nn.Module,
        settings: TorchSettings,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        device: torch.device,
        on_note: Callable[[str], None],
        own_loop: OwnLoop | None = None,
    ) -> None:
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.device = device
        self.precision: str = settings.precision
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.gradient_accumulation_steps = settings.gradient_accumulation_steps
        self.gradient_clipping = settings.gradient_clipping
        self.counters = torch_state.Counters()
        self.scaler = _build_scaler(settings, device)
        self._fp16 = settings.fp16 or Fp16Plan()
        self._on_note, self._is_capped = on_note, False
        self._own_loop = own_loop
        self._recorder = own_loop.recorder if own_loop is not None else None
        self._autocast_dtype = _AUTOCAST.get(settings.precision)
        self._window = Window(device)
        self._gradients = LocalGradients(model.parameters())
        self._micro_steps = 0  # micro-batches of this window that have ended
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._forward: Callable[..., Any] = _distribute(model, device) if self.world_size > 1 else model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward under autocast; gradients meet the other ranks' in a window's last one only."""
        if self._recorder is not None:
            return self._recorder.forward(self, self._run_forward, args, kwargs)
        return self._run_forward(*args, **kwargs)

    def _run_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._autocast(), self._sync(), _unused_parameters_in_words():
            return self._forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a micro-batch's mean loss: see ``Engine.backward``."""
        loss = loss.float() / self.gradient_accumulation_steps
        self._window.add(loss.detach() / self.world_size, num_tokens=None)
        self._backward(loss, None)

    def backward_token_sum(self, loss_sum: torch.Tensor, *, num_tokens: int) -> None:
        """Backward of a sum over tokens: ``Engine.backward_token_sum``. DDP averages over the ranks too."""
        check_num_tokens(self.global_step, num_tokens)
        loss_sum = loss_sum.float()
        self._window.add(loss_sum.detach() / num_tokens, num_tokens=num_tokens)
        self._backward(loss_sum * (self.world_size / num_tokens), num_tokens)

    def step(self, *, flag: bool = False) -> StepResult | None:
        """End a micro-batch; at the end of the window, update the weights. Every rank must call it.

        The order: reduce (done by the last backward), unscale, norm, finite check, clip, optimizer,
        loss scale, learning rate. Gradients are the same on all ranks by then, and so is the verdict.
        A skipped step moves neither weights nor schedule. Raises Diverged as ``Engine.step`` does.
        """
        self._window.flag(flag)
        self._micro_steps += 1
        if self._micro_steps < self.gradient_accumulation_steps:
            return None
        self._micro_steps = 0
        with self._own_loop.ending(self) if self._own_loop is not None else contextlib.nullcontext():
            result = self._step_window()
            if self._own_loop is not None:
                self._own_loop.see(result)
        return result

    def _step_window(self) -> StepResult:
        lr, loss_scale, num_tokens = self.lr, self.loss_scale, self._window.num_tokens
        window = self._window.reduce()
        norm = self._unscaled_norm()
        applied = math.isfinite(norm)
        if applied:
            self._clip(norm)
            self.scaler.step(self.optimizer)
        self._update_scale(loss_scale, applied=applied)
        if applied:
            self.lr_scheduler.step()
        # Zeros, not None: DDP's buckets are the gradients, and one that a forward does not reach stays 0.
        self.optimizer.zero_grad(set_to_none=False)
        self.counters.add(applied=applied)
        return StepResult(
            step=self.global_step,
            lr=lr,
            loss_scale=loss_scale,
            next_loss_scale=self.loss_scale,
            skip_reason=None if applied else skip_reason(self.precision),
            num_tokens=num_tokens,
            gradient_clipping=self.gradient_clipping,
            grad_norm=norm if applied else math.inf,
            window=window,
        )

    @property
    def global_step(self) -> int:
        return self.counters.global_steps

    @property
    def skipped_steps(self) -> int:
        return self.counters.skipped_steps

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float:
        return float(self.scaler.get_scale())

    def end_training(self) -> None:
        """See ``TrainingEngine``: DDP reduces in a backward only what went forward through it."""
        self.record_no_more()
        self._gradients.remove()
        self._forward = self.module

    def record_no_more(self) -> None:
        """See ``TrainingEngine``."""
        self._recorder = None

    def backward_alone(self, loss: torch.Tensor) -> None:
        """See ``TrainingEngine``."""
        loss.backward()  # type: ignore[no-untyped-call]

    def to_fp32(self) -> None:
        """See ``TrainingEngine``."""
        self._autocast_dtype = None
        to_fp32_throughout(self.module)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()

    def save_state(self, folder: Path, *, trainable_only: bool) -> None:
        """See ``TrainingEngine``: rank 0 writes, since every rank has the same."""
        if self.rank == 0:
            torch_state.save(self, folder, trainable_only=trainable_only)
        torch.distributed.barrier()

    def load_state(self, folder: Path, *, trainable_only: bool) -> None:
        """See ``TrainingEngine``."""
        torch_state.load(self, folder, trainable_only=trainable_only)

    def _backward(self, loss: torch.Tensor, num_tokens: int | None) -> None:
        self.scaler.scale(loss).backward()
        self._window.add_gradients(self._gradients.take())
        if self._recorder is not None:
            self._recorder.see_backward(self, num_tokens)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)

    @contextlib.contextmanager
    def _sync(self) -> Iterator[None]:
        """no_sync but for the window's last micro-batch. DDP looks at it in forward only."""
        last = self._micro_steps + 1 == self.gradient_accumulation_steps
        if last or not isinstance(self._forward, DistributedDataParallel):
            yield
            return
        with self._forward.no_sync():
            yield

    def _unscaled_norm(self) -> float:
        """The norm over all trained parameters, once their gradients are unscaled. Waits for them."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.scaler.unscale_(self.optimizer)
        return float(torch.nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None]))

    def _clip(self, norm: float) -> None:
        if self.gradient_clipping > 0:
            torch.nn.utils.clip_grads_with_norm_(
                self._trained, self.gradient_clipping, torch.tensor(norm, device=self.device)
            )

    def _update_scale(self, used: float, *, applied: bool) -> None:
        """GradScaler's own rule, and what it lacks: a static scale, a floor and a ceiling."""
        if not self.scaler.is_enabled():
            return
        if self._fp16.loss_scale != "dynamic":
            self.scaler.update(float(self._fp16.loss_scale))
            return
        floor = float(self._fp16.min_loss_scale)
        if not applied and used <= floor:
            raise at_minimum_scale(self.global_step + 1, used)
        self.scaler.update()
        if not applied and self.loss_scale < floor:
            self.scaler.update(floor)
        if self.loss_scale > _HIGHEST:
            self.scaler.update(_HIGHEST)
            self._tell_cap()

    def _tell_cap(self) -> None:
        if not self._is_capped:
            self._on_note(f"the loss scale stays at {_HIGHEST:g}: are the gradients all 0?")
        self._is_capped = True


def _build_scaler(settings: TorchSettings, device: torch.device) -> torch.amp.GradScaler:
    """GradScaler as the ``fp16`` section says; switched off without fp16, and then its scale is 1."""
    fp16 = settings.fp16 or Fp16Plan()
    static = fp16.loss_scale != "dynamic"
    return torch.amp.GradScaler(
        device.type,
        init_scale=float(fp16.loss_scale) if static else 2.0**fp16.initial_scale_power,
        growth_interval=_NEVER if static else fp16.loss_scale_window,
        enabled=settings.precision == "fp16",
    )


@contextlib.contextmanager
def _unused_parameters_in_words() -> Iterator[None]:
    """DDP's complaint, which comes one step late, as a sentence."""
    try:
        yield
    except RuntimeError as error:
        if "finished reduction in the prior iteration" not in str(error):
            raise
        raise ConfigError(
            "engine torch: a trained parameter got no gradient in the last step, and DDP waits for each one",
            hint="do not train what forward does not always use, or use engine deepspeed",
        ) from error


def _distribute(model: torch.nn.Module, device: torch.device) -> DistributedDataParallel:
    """DDP whose buckets are the gradients themselves, without a second copy of them."""
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        broadcast_buffers=False,  # a collective in each forward; no buffer of a language model changes
        gradient_as_bucket_view=True,
    )
