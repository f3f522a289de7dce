"""The same for a loop of one's own: what was given to ``engine(...)`` in a step, kept, traced, replayed.

nonfinite/step-N/window.json    as for a run file
                 rank-R.pt      what the engine was called with, the RNG; loaded without unpickling code
                 weights-R.safetensors
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dslaunch.core.errors import ConfigError, Diverged, one_line
from dslaunch.losses.sft import TokenLoss
from dslaunch.train.engine import StepResult, TrainingEngine
from dslaunch.train.fp32_modules import cast
from dslaunch.train.replay.on_failure import Scene, add_hint, keep, trace_at_once
from dslaunch.train.replay.recent import BegunStep, RecentSteps
from dslaunch.train.replay.window import Rng, read_index

# ``trace_loss(output, *args, **kwargs)``: the loss of one call of the engine.
TraceLoss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One call of the engine. ``versions``: how often each tensor had been written to by then."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    versions: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in _tensors((self.args, dict(self.kwargs)))]

    @property
    def is_as_it_was(self) -> bool:
        """Whether nobody has written into its tensors since."""
        return tuple(tensor._version for tensor in self.tensors) == self.versions


@dataclass(frozen=True)
class Row:
    """A sample of a micro-batch: its row in each tensor of it."""

    row: int


@dataclass(frozen=True)
class OwnWindow:
    """The micro-batches of one rank in one step: for each the calls of the engine before its backward."""

    step: int
    loss_scale: float
    num_tokens: int
    batches: tuple[tuple[Call, ...], ...]
    rng: Rng

    can_be_empty = False

    @property
    def samples(self) -> tuple[tuple[Row, ...], ...]:
        """The rows of each micro-batch; none where its tensors have no common first dimension."""
        return tuple(tuple(map(Row, range(_num_rows(calls)))) for calls in self.batches)

    def only(self, micro_batch: int, kept: Collection[int]) -> tuple[Call, ...]:
        """A micro-batch in which the rows that are not ``kept`` are copies of one that is."""
        calls = self.batches[micro_batch]
        rows = _num_rows(calls)
        if not kept or len(kept) == rows:
            return calls
        index = [row if row in kept else min(kept) for row in range(rows)]
        return tuple(Call(*_taken((call.args, dict(call.kwargs)), index)) for call in calls)

    def layout(self, micro_batch: int) -> tuple[int, ...] | None:
        """(rows, tokens), where a call has ``input_ids``, or else a tensor of two dimensions first."""
        tensors = [named for call in self.batches[micro_batch] for named in _tensors(dict(call.kwargs))]
        tensors += [named for call in self.batches[micro_batch] for named in _tensors(call.args)]
        chosen = [t for name, t in tensors if name == "input_ids"] or [t for _, t in tensors if t.dim() >= 2]
        return tuple(chosen[0].shape[:2]) if chosen else None

    def write(self, folder: Path, rank: int) -> None:
        """Write this rank's part. Raises OSError, and ConfigError for what no file of tensors can hold."""
        calls = [[(_plain(c.args), _plain(dict(c.kwargs))) for c in batch] for batch in self.batches]
        partial = folder / f".rank-{rank}.pt"
        torch.save({"calls": calls, "rng": dict(self.rng)}, partial)
        partial.replace(folder / f"rank-{rank}.pt")


@dataclass
class _Open:
    """A call whose backward is still to come, if it ever does."""

    call: Call
    trained_by: bool = False  # a gradient has come to its output; or there is none that could be watched
    hooks: tuple[RemovableHandle, ...] = ()

    def watch(self, output: Any) -> None:
        ends = [tensor for _, tensor in _tensors(output) if tensor.requires_grad]
        self.trained_by = not ends
        self.hooks = tuple(end.register_hook(self._see) for end in ends)

    def let_go(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _see(self, gradient: torch.Tensor) -> None:
        self.trained_by = True


class Recorder:
    """Holds what the engine was called with in the last two steps: references, nothing is copied."""

    def __init__(self) -> None:
        self._recent = RecentSteps()
        self._open: BegunStep | None = None
        self._calls: list[_Open] = []

    def forward(
        self,
        engine: TrainingEngine,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """``run`` it; one that nothing is trained by is not held."""
        if not (torch.is_grad_enabled() and engine.module.training):
            return run(*args, **kwargs)
        self._begin(engine)
        given = (args, dict(kwargs))
        held = _Open(Call(*given, tuple(tensor._version for _, tensor in _tensors(given))))
        output = run(*args, **kwargs)
        held.watch(output)
        self._calls.append(held)
        return output

    def see_backward(self, engine: TrainingEngine, num_tokens: int | None) -> None:
        """After a backward, the end of a micro-batch: it has the calls that a gradient came to."""
        step = self._begin(engine)
        step.calls.append(tuple(held.call for held in self._calls if held.trained_by))
        for held in self._calls:
            if held.trained_by:
                held.let_go()
        step.num_tokens, self._calls = num_tokens, [held for held in self._calls if not held.trained_by]

    def see_step(self, result: StepResult) -> None:
        """The end of a window. Calls that nothing was trained by are let go."""
        self._recent.end(result)
        for held in self._calls:
            held.let_go()
        self._open, self._calls = None, []

    def suspect(self, engine: TrainingEngine, step: int | None) -> tuple[OwnWindow, bool] | None:
        """The window that went wrong, and whether the weights are still those that it was given."""
        found = self._recent.suspect(step)
        if found is None:
            return None
        begun, has_weights = found
        window = OwnWindow(
            step=begun.step + 1,
            loss_scale=begun.loss_scale,
            num_tokens=begun.num_tokens or engine.world_size * engine.gradient_accumulation_steps,
            batches=tuple(begun.calls),
            rng=begun.rng,
        )
        return window, has_weights

    def _begin(self, engine: TrainingEngine) -> BegunStep:
        if self._open is None:
            self._open = self._recent.begin(engine.global_step, engine.loss_scale)
        return self._open


class OwnObjective:
    """Calls the engine as the loop did. The loss is ``trace_loss``, else what the model gives back as one."""

    def __init__(self, engine: TrainingEngine, trace_loss: TraceLoss | None) -> None:
        self._engine, self._trace_loss = engine, trace_loss
        self.has_loss = True

    def token_loss(self, batch: tuple[Call, ...]) -> TokenLoss:
        """The sum over the calls of a micro-batch, as one "token" of the mean that is taken of them."""
        losses = [self._loss(call) for call in batch]
        return TokenLoss(torch.stack(losses).sum(), torch.tensor(1))

    def _loss(self, call: Call) -> torch.Tensor:
        args, kwargs = call.args, dict(call.kwargs)
        if self._is_wide:
            args, kwargs = cast(args, torch.float32), cast(kwargs, torch.float32)
        output = self._engine(*args, **kwargs)
        if self._trace_loss is not None:
            return self._trace_loss(output, *args, **kwargs).float()
        loss = _loss_of(output)
        if loss is not None:
            return loss.float()
        self.has_loss = False
        # A gradient of 0 in place of the unknown one: it shows the forward, and what breaks for any.
        ends = [t for _, t in _tensors(output) if t.is_floating_point() and t.requires_grad]
        return torch.stack([end.float().nan_to_num(0.0, 0.0, 0.0).sum() for end in ends]).sum() * 0.0

    @property
    def _is_wide(self) -> bool:
        """Whether the model has been taken to fp32 for a comparison."""
        dtypes = {p.dtype for p in self._engine.module.parameters() if p.is_floating_point()}
        return self._engine.precision != "fp32" and dtypes == {torch.float32}


def conclude(
    recorder: Recorder, scene: Scene, engine: TrainingEngine, trace_loss: TraceLoss | None, error: Diverged
) -> None:
    """Keep the step that went wrong where there is a place for it, and trace it. Collective.

    Nothing that fails here hides ``error``.
    """
    try:
        found = recorder.suspect(engine, error.step)
        if found is None:
            return
        window, has_weights = found
        if (why := _untraceable(window, has_weights)) is not None:
            scene.say(f"not traced: {why}")
            return
        folder = None if scene.run_dir is None else keep(scene, window, error, has_weights=True)
        objective = OwnObjective(engine, trace_loss)
        trace_at_once(scene, objective, window, folder, error, has_weights=True)
        if not objective.has_loss:
            scene.say(_NO_LOSS)
        if folder is not None:
            add_hint(
                error, f"replay(engine, {str(folder)!r}) in a script of yours runs it again (docs/replay.md)"
            )
    except Exception as problem:
        scene.say(f"the step could not be traced: {one_line(problem)}")


_NO_LOSS = (
    "the loss is computed outside of the model, so its backward began with a gradient of 0, which shows less:"
    " give initialize(..., trace_loss=lambda output, *args, **kwargs: loss)"
)


def _untraceable(window: OwnWindow, has_weights: bool) -> str | None:
    """The same on every rank: a rank alone must not leave the others in a collective."""
    from dslaunch.train.dist import gather_objects

    why = None
    if not has_weights:
        why = "a step since then has changed the weights"
    elif not window.batches or not all(window.batches):
        why = "engine(...) was not called before each backward"
    elif not all(call.is_as_it_was for calls in window.batches for call in calls):
        why = "the tensors of its micro-batches have been written into since"
    return next((text for text in gather_objects(why) if text is not None), None)


def replay(
    engine: TrainingEngine,
    folder: str | Path,
    *,
    trace_loss: TraceLoss | None = None,
    detect_anomaly: bool = False,
) -> dict[str, Any]:
    """Run a kept step again on an engine made as in the run, and say what broke. Collective.

    ``folder``: nonfinite/step-N of the run's ``run_dir``. Loads its weights; the engine trains no more
    afterwards. The report, on every rank; ``replay.describe.describe`` puts it in words.
    Raises ConfigError where the step was kept by other ranks, stages or models.
    """
    from dslaunch.train.replay.passes import Passes
    from dslaunch.train.replay.trace import Trace
    from dslaunch.train.replay.weights import load_weights

    folder = Path(folder)
    index = read_index(folder)
    for name in ("world_size", "zero_stage", "precision"):
        kept, here = index.get(name), getattr(engine, name)
        if kept != here:
            raise ConfigError(
                f"{folder} was kept with {name} {kept}, and this engine has {here}",
                hint="initialize the engine as the run did, with as many ranks",
            )
    window = _read_rank(folder, engine.rank, index)
    if index.get("has_weights"):
        load_weights(folder, engine.rank if engine.zero_stage == 3 else 0, engine.module)
    engine.record_no_more()
    objective = OwnObjective(engine, trace_loss)
    report = Trace(Passes(engine, objective), window, rank=engine.rank).run(detect_anomaly=detect_anomaly)
    return {**report, "has_loss": objective.has_loss}


def _read_rank(folder: Path, rank: int, index: Mapping[str, Any]) -> OwnWindow:
    path = folder / f"rank-{rank}.pt"
    try:
        held = torch.load(path, weights_only=True)
        calls = tuple(tuple(Call(*call) for call in batch) for batch in held["calls"])
    except Exception as error:  # torch has many errors for a damaged file, and a missing one is as bad
        raise ConfigError(
            f"the window in {folder} cannot be read by rank {rank}: {one_line(error)}"
        ) from None
    return OwnWindow(
        int(index["step"]), float(index["loss_scale"]), int(index["num_tokens"]), calls, held["rng"]
    )


# --- tensors in what a model is given ---------------------------------------------------------------


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in ``value``, with the key that it stands under last."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, name)


def _num_rows(calls: Sequence[Call]) -> int:
    """The first dimension that all tensors of a micro-batch share; 0 where there is none."""
    sizes = {tensor.shape[0] for call in calls for tensor in call.tensors if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def _taken(value: Any, index: Sequence[int]) -> Any:
    """``value`` with the rows ``index`` of every tensor in it."""
    if isinstance(value, torch.Tensor):
        return value[torch.tensor(index, device=value.device)] if value.dim() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_taken(item, index) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_taken(item, index) for item in value)
    if isinstance(value, Mapping):
        return {key: _taken(item, index) for key, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    """``value`` as torch loads it without running code. Raises ConfigError where it holds anything else."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else tuple(map(_plain, value))
    raise ConfigError(
        f"the engine was called with a {type(value).__name__}, which is no tensor or plain value"
    )


def _loss_of(output: Any) -> torch.Tensor | None:
    """The loss in a model's output: the output itself, its ``loss``, or the first of a tuple; a scalar."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (list, tuple)) and output:
        found = output[0]
    ok = isinstance(found, torch.Tensor) and found.numel() == 1 and found.requires_grad
    return found.reshape(()) if ok else None
