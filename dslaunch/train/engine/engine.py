"""The engine: one DeepSpeed engine, its cures, and a step that reports what it did."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from dslaunch.core.errors import ConfigError, one_line
from dslaunch.core.plan import WatchPlan
from dslaunch.train.dist import barrier, hold_deepspeeds_prints, init_world
from dslaunch.train.engine import absent_gradients, cures, ds_config
from dslaunch.train.engine.gradient_witness import LocalGradients
from dslaunch.train.engine.muon import place_muon
from dslaunch.train.engine.own_loop import USUAL_WATCH, OnEvent, OwnLoop, build_own_loop
from dslaunch.train.engine.result import SkipReason, StepResult
from dslaunch.train.engine.settings import check_version, prepare
from dslaunch.train.engine.step_rules import Turns, at_minimum_scale, check_num_tokens, skip_reason
from dslaunch.train.engine.window import Window
from dslaunch.train.fp32_modules import to_fp32_throughout
from dslaunch.train.jit_ops import prepare_optimizer

Note = Callable[[str], None]


class Engine:
    """A DeepSpeed engine whose updates are what the mathematics says. See :func:`initialize`.

    ``deepspeed`` is the engine beneath, for what is not wrapped here.
    """

    kind: Literal["deepspeed"] = "deepspeed"

    def __init__(
        self,
        ds: Any,
        *,
        precision: str,
        trains: bool,
        notes: tuple[str, ...] = (),
        own_loop: OwnLoop | None = None,
    ) -> None:
        self.deepspeed = ds
        self.precision = precision
        self.notes = notes
        self._own_loop = own_loop
        self._recorder = own_loop.recorder if own_loop is not None else None
        self._window = Window(ds.device)
        self._gradients = LocalGradients(ds.module.parameters() if trains else ())
        plain = not (ds.zero_optimization() or ds.fp16_enabled() or ds.bfloat16_enabled())
        self._checks_fp32 = plain and ds.optimizer is not None
        self._turns = None if plain else Turns()
        if self._checks_fp32:
            cures.check_gradients_at_fp32_stage_0(ds)
        elif trains and ds.fp16_enabled():
            cures.delay_loss_scale_growth(ds)
        if trains:
            cures.keep_own_communication_dtype(ds)
            cures.forget_offloaded_sums_of_skipped_steps(ds)
            cures.name_the_stage_in_checkpoints(ds)
            place_muon(ds)
            absent_gradients.count_gradients_of_other_ranks(ds)
            self._by_place = absent_gradients.adds_up_by_place(ds)
            self._complete_gradients = absent_gradients.build_completion(ds)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, through DeepSpeed's hooks."""
        if self._recorder is not None:
            return self._recorder.forward(self, self.deepspeed, args, kwargs)
        return self.deepspeed(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a micro-batch's loss, with DeepSpeed's meaning.

        The gradient is the mean over the micro-batches of the window and over the
        ranks. ``loss``: a scalar; it is taken to fp32 before it is scaled. For token
        losses of unequal counts use :meth:`backward_token_sum`. Raises ConfigError for a
        second one before ``step``, where ZeRO would lose the first.
        """
        self._begin_backward()
        loss = loss.float()
        share = 1.0 / (self.gradient_accumulation_steps * self.world_size)
        self._window.add(loss.detach() * share, num_tokens=None)
        self.deepspeed.backward(loss)
        self._end_backward(None)

    def backward_token_sum(self, loss_sum: torch.Tensor, *, num_tokens: int) -> None:
        """Backward of a sum over tokens so that the window's gradient is the global token mean.

        ``loss_sum``: scalar, this micro-batch's loss summed over its supervised tokens;
        with none, a zero that has a graph. ``num_tokens``: supervised tokens of the
        whole window over **all** ranks and micro-batches, the same on every rank and in
        every call of the window. Raises ConfigError where it is not positive,
        ValueError where it changes inside a window.

        DeepSpeed averages over the W data-parallel ranks, so the sum is multiplied by
        W / num_tokens and its division by the accumulation steps is turned off.
        """
        check_num_tokens(self.global_step, num_tokens)
        self._begin_backward()
        loss_sum = loss_sum.float()
        self._window.add(loss_sum.detach() / num_tokens, num_tokens=num_tokens)
        self.deepspeed.backward(loss_sum * (self.world_size / num_tokens), scale_wrt_gas=False)
        self._end_backward(num_tokens)

    def step(self, *, flag: bool = False) -> StepResult | None:
        """End a micro-batch; at the end of the window, update the weights. Every rank must call it.

        Returns None inside a window. ``flag`` travels with the window's one all-reduce:
        ``StepResult.flag`` is True on every rank if any rank set it.

        What happens at the end of a window, in this order (a test records it at every stage):

        1. reduce: the last ``backward`` has averaged the gradients over the ranks; one small
           vector [loss, flag, what each rank says of itself] follows them. Nothing else of ours
           talks to the other ranks, and nothing waits for the device;
        2. finite check over all ranks. inf or nan anywhere: every rank skips 3 to 6, the loss scale
           is lowered (fp16), and neither the schedule nor ``trained_samples`` moves;
        3. global norm, of the gradients without the loss scale, before clipping;
        4. unscale and clip in one multiplication;
        5. optimizer, then the 16-bit copy of the weights;
        6. loss scale (grows after the step that it was used in: F2) and learning rate.

        Raises Diverged, on every rank, where gradients overflow at the minimum loss scale, or where
        the watch says that the training gets nowhere; ConfigError where no backward came before (ZeRO).
        """
        ds = self.deepspeed
        if self._turns is not None:
            self._turns.step()
        self._window.flag(flag)
        if not ds.is_gradient_accumulation_boundary():
            ds.step()
            return None
        lr, loss_scale, hysteresis = self.lr, self.loss_scale, self.hysteresis
        num_tokens = self._window.num_tokens
        window = self._window.reduce(self._course())
        if self._checks_fp32:
            cures.measure_fp32_stage_0(ds)
        with self._own_loop.ending(self) if self._own_loop is not None else nullcontext():
            self._step_deepspeed()
            result = StepResult(
                step=self.global_step,
                lr=lr,
                loss_scale=loss_scale,
                next_loss_scale=self.loss_scale,
                hysteresis=hysteresis,
                next_hysteresis=self.hysteresis,
                skip_reason=None if ds.was_step_applied() else self._skip_reason,
                num_tokens=num_tokens,
                gradient_clipping=float(ds.gradient_clipping()),
                grad_norm=ds.get_global_grad_norm(),
                window=window,
            )
            if self._own_loop is not None:
                self._own_loop.see(result)
        return result

    def _course(self) -> int:
        """What this rank has to have in common with the others in this window; 0: nothing."""
        course = self._gradients.take_course(ordered=self._by_place == "order")
        return course if self._by_place else 0

    def _begin_backward(self) -> None:
        if self._turns is not None:
            self._turns.backward()

    def _end_backward(self, num_tokens: int | None) -> None:
        self._complete_gradients()
        self._window.add_gradients(self._gradients.take())
        if self._recorder is not None:
            self._recorder.see_backward(self, num_tokens)

    @property
    def _skip_reason(self) -> SkipReason:
        return skip_reason(self.precision)

    def _step_deepspeed(self) -> None:
        try:
            self.deepspeed.step()
        except Exception as error:
            # runtime/fp16/loss_scaler.py raises a bare Exception with this text.
            if type(error) is not Exception or "loss scale already at minimum" not in str(error):
                raise
            raise at_minimum_scale(self.global_step + 1, self.loss_scale) from error

    def save_state(self, folder: Path, *, trainable_only: bool) -> None:
        """Have DeepSpeed write its shards into ``folder``. Collective.

        Raises LaunchFailed where a rank never calls (naming it, with gloo).
        """
        barrier(f"save_state of {folder}")
        self.deepspeed.save_checkpoint(
            str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=trainable_only
        )

    def load_state(self, folder: Path, *, trainable_only: bool) -> None:
        """Restore what :meth:`save_state` wrote. Collective. Raises ConfigError where nothing was loaded."""
        loaded, _ = self.deepspeed.load_checkpoint(
            str(folder.parent), tag=folder.name, load_module_strict=not trainable_only
        )
        if loaded is None:  # DeepSpeed's way to say that it found nothing
            raise ConfigError(f"DeepSpeed loaded nothing from {folder}")

    @property
    def module(self) -> torch.nn.Module:
        """The model, without DeepSpeed around it (partitioned at stage 3)."""
        module: torch.nn.Module = self.deepspeed.module
        return module

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer, whose ``param_groups`` hold the learning rates."""
        return self.deepspeed.optimizer

    @property
    def device(self) -> torch.device:
        return torch.device(self.deepspeed.device)

    @property
    def rank(self) -> int:
        return int(self.deepspeed.global_rank)

    @property
    def world_size(self) -> int:
        """The data-parallel size: the W of every formula."""
        return int(self.deepspeed.dp_world_size)

    @property
    def zero_stage(self) -> int:
        """The stage that runs: 1 for 16-bit at stage 0 (see the notes)."""
        return int(self.deepspeed.zero_optimization_stage())

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self.deepspeed.gradient_accumulation_steps())

    @property
    def global_step(self) -> int:
        """Windows finished so far, skipped ones included; restored by a checkpoint."""
        return int(self.deepspeed.global_steps)

    @property
    def skipped_steps(self) -> int:
        return int(self.deepspeed.skipped_steps)

    @property
    def trained_samples(self) -> int:
        """Samples of the steps that changed the weights; those of skipped steps do not count."""
        return (self.global_step - self.skipped_steps) * int(self.deepspeed.train_batch_size())

    @property
    def lr(self) -> float:
        """The rate of the first parameter group that the next step will use."""
        return float(self.deepspeed.optimizer.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1.0 without fp16."""
        scaler = self.deepspeed.torch_autocast_z0_gradscaler
        if scaler:
            return float(scaler.get_scale())
        return (
            float(getattr(self.deepspeed.optimizer, "loss_scale", 1.0)) if self.precision == "fp16" else 1.0
        )

    @property
    def hysteresis(self) -> int | None:
        """Overflows, the next one included, until the loss scale is lowered; None where it is not dynamic."""
        left = getattr(getattr(self.deepspeed.optimizer, "loss_scaler", None), "cur_hysteresis", None)
        return int(left) if left is not None and self.precision == "fp16" else None

    def end_training(self) -> None:
        """See ``TrainingEngine``."""
        self.record_no_more()
        self._gradients.remove()
        cures.let_go_of_gradients(self.deepspeed)

    def record_no_more(self) -> None:
        """See ``TrainingEngine``."""
        self._recorder = None

    def backward_alone(self, loss: torch.Tensor) -> None:
        """See ``TrainingEngine``."""
        loss.backward()  # type: ignore[no-untyped-call]
        if self.zero_stage == 3:
            self.optimizer.parameter_offload.release_backward_leftovers()

    def to_fp32(self) -> None:
        """See ``TrainingEngine``."""
        to_fp32_throughout(self.module)

    def train(self, mode: bool = True) -> None:
        """Switch dropout and the like on (or off)."""
        self.deepspeed.train(mode)

    def eval(self) -> None:
        self.deepspeed.eval()


def initialize(
    model: torch.nn.Module,
    config: Mapping[str, Any] | str | Path,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    lr_scheduler: Any = None,
    model_parameters: Iterable[Any] | None = None,
    *,
    allow_emulated_fp16: bool = False,
    allow_untested_deepspeed: str | None = None,
    watch: WatchPlan | Mapping[str, Any] | None = USUAL_WATCH,
    run_dir: str | Path | None = None,
    trace_loss: Callable[..., torch.Tensor] | None = None,
    on_event: OnEvent | None = None,
    on_note: Note | None = None,
    **more: Any,
) -> Engine:
    """``deepspeed.initialize`` with the faults of DeepSpeed 0.19.8 cured or refused.

    ``config``: a dict or the path of a ds_config.json; it is not changed. ``optimizer``,
    ``lr_scheduler``, ``model_parameters`` and ``more`` as DeepSpeed takes them; without
    ``model_parameters`` all that require a gradient are trained; without any optimizer the
    engine only runs forward. Joins the process group
    if that has not been done (``dslaunch.train.dist.init_world``). ``on_note`` gets each
    thing that was changed, in words; without it rank 0 prints them on stderr.
    ``allow_emulated_fp16``: run fp16 on a CPU without fp16 instructions (slow, for tests).
    ``allow_untested_deepspeed``: the version of a DeepSpeed that was not tested here, to run it.

    ``watch``: the limits of a run file's section ``watch``; None turns the watching off. Verdicts go to
    rank 0's stderr, events to ``on_event(kind, **fields)`` on every rank, and with ``run_dir`` rank 0
    writes events.jsonl and, where the training diverges, diagnosis.json there. With ``on_nonfinite``
    "trace" the step that ends the training is run again before ``step`` raises, to name its module,
    parameter, rank and rows, and with ``run_dir`` it is kept there (docs/replay.md);
    ``trace_loss(output, *args, **kwargs)`` is then the loss of a call ``engine(*args, **kwargs)``
    whose output holds none.

    Raises ConfigError for a config that DeepSpeed refuses or would run wrong,
    EnvironmentNotReady where the ranks cannot be joined, an op cannot be compiled, or a
    cure finds another DeepSpeed than it was made for.
    """
    world = init_world()
    version = check_version(allow_untested_deepspeed)
    settings = ds_config.load_ds_config(config)
    settings, optimizer, notes = prepare(settings, model, optimizer, allow_emulated_fp16)
    notes = [*version, *notes]
    for text in notes:
        _tell(text, on_note, world.rank)
    trains = optimizer is not None or ds_config.optimizer_type(settings) is not None
    if trains and model_parameters is None and not isinstance(optimizer, torch.optim.Optimizer):
        model_parameters = [p for p in model.parameters() if p.requires_grad]
        if not model_parameters:
            raise ConfigError("no parameter of the model requires a gradient: there is nothing to train")
    if optimizer is None:
        prepare_optimizer(settings)
    cures.forget_autocast_of_other_engines()
    ds = _deepspeed_initialize(
        model=model,
        config=ds_config.quiet(settings),
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        model_parameters=model_parameters,
        **more,
    )
    precision = ds_config.precision_of(settings)
    own_loop = None
    if watch is not None and trains:
        own_loop = build_own_loop(
            watch, precision=precision, rank=world.rank, run_dir=run_dir, on_event=on_event,
            trace_loss=trace_loss, notes=notes,
        )  # fmt: skip
    return Engine(ds, precision=precision, trains=trains, notes=tuple(notes), own_loop=own_loop)


def _deepspeed_initialize(**arguments: Any) -> Any:
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    pythons = (AssertionError, ValueError, TypeError, NotImplementedError)
    refusals = (*pythons, ZeRORuntimeException, DeepSpeedConfigError)
    try:
        with hold_deepspeeds_prints():
            return deepspeed.initialize(**arguments)[0]
    except refusals as error:
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} refuses this configuration: {one_line(error)}"
        ) from error


def _tell(text: str, on_note: Note | None, rank: int) -> None:
    if on_note is not None:
        on_note(text)
    elif rank == 0:
        print(f"note: {text}", file=sys.stderr)
