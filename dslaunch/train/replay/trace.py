"""Runs a window again and puts the answer together: who made the first nan or inf, and out of what."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dslaunch.core.errors import one_line
from dslaunch.core.events import to_jsonable
from dslaunch.train.dist import gather_objects
from dslaunch.train.replay.bisect import Guilt, bisect
from dslaunch.train.replay.measure import Range
from dslaunch.train.replay.parameters import first_gradient, widest_parameters
from dslaunch.train.replay.passes import Pass, Passes
from dslaunch.train.replay.probe import Event, find_broken_weights
from dslaunch.train.replay.verdict import First, find_first, range_of, trail
from dslaunch.train.replay.window import Rng, restore_rng, take_rng

SCHEMA_VERSION = 1

Search = Generator[tuple[int, ...], bool, Guilt]


@dataclass
class _Found:
    """A micro-batch of this rank that breaks, and what is known of it so far."""

    micro_batch: int
    first: First
    events: Sequence[Event]
    loss: float
    facts: dict[str, Any] = field(default_factory=dict)


class Material(Protocol):
    """What one step was given on this rank, such as ``Window``.

    ``samples``: dataclasses, of each micro-batch; none where they cannot be told apart.
    """

    @property
    def step(self) -> int: ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def batches(self) -> Sequence[Any]: ...
    @property
    def samples(self) -> Sequence[Sequence[Any]]: ...
    @property
    def rng(self) -> Rng: ...
    @property
    def can_be_empty(self) -> bool: ...
    def only(self, micro_batch: int, kept: Collection[int]) -> Any: ...
    def layout(self, micro_batch: int) -> tuple[int, ...] | None: ...
    def write(self, folder: Path, rank: int) -> None: ...


class Trace:
    """One window on one rank. Every method is called by all ranks in the same order."""

    def __init__(self, passes: Passes, window: Material, *, rank: int) -> None:
        self._passes, self._window, self._rank = passes, window, rank
        self._rngs: list[Rng] = []
        self._found: _Found | None = None
        self._also: list[int] = []  # micro-batches that break after the first one
        self._sums: dict[str, float] = {}
        self._losses: list[float] = []

    def run(self, *, detect_anomaly: bool = False) -> dict[str, Any]:
        """The report, the same on every rank. ``detect_anomaly``: ask autograd as well."""
        broken = self._broken_weights()
        self._run_window()
        firsts = gather_objects(self._found and self._found.first.phase)
        report: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "step": self._window.step,
            "precision": self._passes.precision,
            "zero_stage": self._passes.zero_stage,
            "world_size": self._passes.world_size,
            "loss_scale": self._window.loss_scale,
            "losses": gather_objects(self._losses),
            "broken_weights": broken,
        }
        if not any(firsts):
            return to_jsonable({**report, "findings": [], "sums": self._sums_too_large()})
        if "backward" in firsts and self._window.loss_scale != 1:
            self._compare("unscaled", loss_scale=1.0)
        blamed = set(gather_objects(self._found and self._found.first.module))
        widest = widest_parameters(self._passes.module, blamed)
        self._bisect()
        if detect_anomaly:
            self._ask_autograd()
        if self._passes.precision != "fp32":
            self._compare_fp32()
        findings = [f for f in gather_objects(self._finding(broken, widest)) if f is not None]
        findings.sort(key=lambda f: (f["micro_batch"], f["phase"] == "backward", f["rank"]))
        return to_jsonable({**report, "findings": findings, "sums": []})

    # --- the passes -------------------------------------------------------------------------------

    def _run_window(self) -> None:
        """As the training ran it, each micro-batch with the random numbers that it had."""
        restore_rng(self._window.rng)
        for number, batch in enumerate(self._window.batches):
            self._rngs.append(take_rng())
            done = self._pass(batch, self._window.loss_scale)
            self._losses.append(done.loss)
            for event in done.events:
                if event.kind == "gradient of parameter" and event.range.absmax is not None:
                    self._sums[event.name] = self._sums.get(event.name, 0.0) + event.range.absmax
            first = find_first(done.events, done.loss) if done.breaks else None
            if first is not None and self._found is None:
                self._found = _Found(number, first, done.events, done.loss)
            elif first is not None:
                self._also.append(number)

    def _pass(self, batch: Any, loss_scale: float) -> Pass:
        return self._passes.run(batch, num_tokens=self._window.num_tokens, loss_scale=loss_scale)

    def _again(self, batch: Any, loss_scale: float) -> Pass:
        """A pass with the random numbers that the micro-batch had the first time."""
        restore_rng(self._rngs[self._micro_batch])
        return self._pass(batch, loss_scale)

    @property
    def _micro_batch(self) -> int:
        """The one to look into; a rank without fault keeps the others company with its first."""
        return 0 if self._found is None else self._found.micro_batch

    @property
    def _batch(self) -> Any:
        return self._window.batches[self._micro_batch]

    @property
    def _places(self) -> Sequence[Any]:
        return self._window.samples[self._micro_batch]

    def _compare(self, name: str, *, loss_scale: float) -> None:
        """The same pass under another condition: whether it breaks, and the range at the same place."""
        done = self._again(self._batch, loss_scale)
        if self._found is not None:
            spread = range_of(self._found.events, self._found.first, done.events)
            self._found.facts[name] = {
                "breaks": done.breaks,
                "loss": done.loss,
                "range": spread.to_json() if spread is not None else None,
            }

    def _compare_fp32(self) -> None:
        if self._passes.zero_stage == 3:
            self._compare_layer_in_fp32()
            return
        try:
            self._passes.to_fp32()
            self._compare("fp32", loss_scale=self._window.loss_scale)
        except (RuntimeError, ValueError, TypeError) as error:  # no room for it, or a quantised model
            if self._found is not None:
                self._found.facts["fp32"] = {"not_possible": one_line(error, 200)}

    def _compare_layer_in_fp32(self) -> None:
        """Of a partitioned model, the one layer alone whose output is the first that is not finite."""
        found = self._found
        blamed = None
        if found is not None and found.first.place is not None:
            event = found.events[found.first.place]
            blamed = event.module if event.kind == "output" and not event.name else None
        restore_rng(self._rngs[self._micro_batch])
        spread = self._passes.run_with_module_in_fp32(
            self._batch, blamed, num_tokens=self._window.num_tokens, loss_scale=self._window.loss_scale
        )
        if found is not None and spread is not None:
            found.facts["fp32"] = {"breaks": not spread.is_finite, "range": spread.to_json()}

    def _ask_autograd(self) -> None:
        restore_rng(self._rngs[self._micro_batch])
        said = self._passes.find_anomaly(
            self._batch, num_tokens=self._window.num_tokens, loss_scale=self._window.loss_scale
        )
        if self._found is not None:
            self._found.facts["anomaly"] = said

    def _bisect(self) -> None:
        """Find the samples, all ranks with a fault at once; the others run along."""
        count, can_be_empty = len(self._places), self._window.can_be_empty
        search = bisect(count, can_be_empty=can_be_empty) if self._found is not None else None
        wanted = self._next(search, None)
        while any(gather_objects(wanted is not None)):
            breaks = self._breaks_with(wanted if wanted is not None else tuple(range(len(self._places))))
            if wanted is not None:
                wanted = self._next(search, breaks)

    def _next(self, search: Search | None, breaks: bool | None) -> tuple[int, ...] | None:
        """What to try next; None where the search has come to its end, or there is none."""
        try:
            return None if search is None else search.send(breaks)  # type: ignore[arg-type]
        except StopIteration as end:
            self._keep_guilt(end.value)
            return None

    def _breaks_with(self, kept: tuple[int, ...]) -> bool:
        batch = self._window.only(self._micro_batch, kept)
        return self._again(batch, self._window.loss_scale).breaks

    def _keep_guilt(self, guilt: Guilt) -> None:
        assert self._found is not None
        self._found.facts["samples"] = [dataclasses.asdict(self._places[i]) for i in guilt.samples]
        self._found.facts["samples_together"] = guilt.together
        self._found.facts["any_sample"] = guilt.any_sample

    # --- the answer -------------------------------------------------------------------------------

    def _broken_weights(self) -> list[dict[str, Any]]:
        """Each once; below stage 3 all ranks hold the same."""
        found: dict[str, dict[str, Any]] = {}
        for of_rank in gather_objects(find_broken_weights(self._passes.module)):
            for weight in of_rank:
                found.setdefault(weight["name"], weight)
        return list(found.values())

    def _sums_too_large(self) -> list[dict[str, Any]]:
        """Where each micro-batch is finite by itself: the gradients whose sum may not fit fp16."""
        totals: dict[str, float] = {}
        for of_rank in gather_objects(self._sums):
            for name, value in of_rank.items():
                totals[name] = totals.get(name, 0.0) + value
        limit = torch.finfo(torch.float16).max
        if self._passes.precision != "fp16":
            return []
        largest = sorted((name for name in totals if totals[name] > limit), key=lambda name: -totals[name])
        return [{"parameter": p, "absmax_of_sum_at_most": totals[p], "limit": limit} for p in largest[:3]]

    def _finding(
        self, broken: Sequence[dict[str, Any]], widest: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any] | None:
        found = self._found
        if found is None:
            return None
        first = found.first
        names = [name for weight in broken for name in (weight["name"], *weight["tied"])]
        weights = [name for name in names if name.rpartition(".")[0] == first.module]
        own = widest.get(first.module)
        parameter = first.parameter or (weights[0] if weights else own["name"] if own else None)
        spread = None if first.place is None else found.events[first.place].range
        return {
            "rank": self._rank,
            "micro_batch": found.micro_batch,
            "also_micro_batches": self._also,
            "phase": first.phase,
            "module": first.module,
            "module_type": self._type_of(first.module),
            "parameter": parameter,
            "parameter_absmax": own["absmax"] if own and own["name"] == parameter else None,
            "first_gradient": first_gradient(found.events),
            "what": first.what,
            "behind": first.between,
            "loss": found.loss,
            "range": spread.to_json() if spread is not None else None,
            "position": self._position(spread),
            "cause": _cause(first, bool(weights), found.facts, self._passes.precision),
            **found.facts,
            "trail": trail(found.events, first),
        }

    def _type_of(self, module: str) -> str | None:
        modules = dict(self._passes.module.named_modules())
        return type(modules[module]).__name__ if module in modules else None

    def _position(self, spread: Range | None) -> dict[str, int] | None:
        """Row and token of the first bad value, where the tensor is laid out as the batch is."""
        first = spread.first_bad if spread is not None else None
        if spread is None or first is None or spread.shape[:2] != self._window.layout(self._micro_batch):
            return None
        return {"row": first[0], "token": first[1]}


def _cause(first: First, weights: bool, facts: Mapping[str, Any], precision: str) -> str:
    """In one word, for programs; docs/replay.md has the table."""
    if weights:
        return "weights"
    unscaled, fp32 = facts.get("unscaled"), facts.get("fp32", {})
    if first.phase == "backward" and unscaled is not None and not unscaled["breaks"]:
        return "loss_scale"
    if "breaks" in fp32:
        return "computation" if fp32["breaks"] else "overflow"
    # bf16 reaches as far as fp32 does, near enough.
    return "unknown" if precision == "fp16" else "computation"
