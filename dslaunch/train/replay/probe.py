"""Hooks on every module and parameter: what went in, what came out, and which gradients came back.

The gradient at a module's border is that of the module alone, also where its input goes to
others: each input and output passes through an identity of its own, as under ZeRO-3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from dslaunch.train.checkpoint.trained import held_values
from dslaunch.train.replay.measure import Range, measure

Kind = Literal["input", "output", "gradient of output", "gradient of input", "gradient of parameter"]


@dataclass(frozen=True)
class Event:
    """One tensor at the border of a module ("": the whole model), in the order of execution.

    ``name``: of the argument, of the place in the output, or of the parameter (its full name).
    """

    kind: Kind
    module: str
    name: str
    range: Range

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": self.kind, "module": self.module, "name": self.name, **self.range.to_json()}


class Probe:
    """The events of one forward and backward pass. Use :func:`probing`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.events: list[Event] = []
        self.in_backward = False
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._watch_module(name, module)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._watch_parameter(name, parameter)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def see(self, kind: Kind, module: str, name: str, tensor: torch.Tensor) -> None:
        """Keep an event. A forward inside of the backward (checkpointing) has been seen already."""
        if self.in_backward and kind in ("input", "output"):
            return
        self.events.append(Event(kind, module, name, measure(tensor)))

    def _watch_module(self, name: str, module: torch.nn.Module) -> None:
        words = _argument_names(module)

        def enter(_: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
            given = {words[i] if i < len(words) else str(i): value for i, value in enumerate(args)}
            watched = {
                word: self._through(value, word, name, "input") for word, value in {**given, **kwargs}.items()
            }
            return tuple(watched[word] for word in given), {word: watched[word] for word in kwargs}

        def leave(_: torch.nn.Module, args: Any, output: Any) -> Any:
            return self._through(output, "", name, "output")

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    def _watch_parameter(self, name: str, parameter: torch.nn.Parameter) -> None:
        owner = name.rpartition(".")[0]

        def seen(gradient: torch.Tensor) -> None:
            self.see("gradient of parameter", owner, name, gradient)

        def forget(parameter: torch.Tensor) -> None:
            parameter.grad = None  # it has been seen; all of them would not fit beside a partitioned model

        self._handles.append(parameter.register_hook(seen))
        self._handles.append(parameter.register_post_accumulate_grad_hook(forget))

    def _through(self, value: Any, name: str, module: str, kind: Literal["input", "output"]) -> Any:
        """``value`` with every tensor in it seen, now and in the backward; other objects as they are."""
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point() or isinstance(value, torch.nn.Parameter):
                return value
            # A mask may hold -inf by right.
            if "mask" in name:
                return value
            self.see(kind, module, name, value)
            if not (value.requires_grad and torch.is_grad_enabled()):
                return value
            gradient: Kind = "gradient of input" if kind == "input" else "gradient of output"
            return _Identity.apply(value, lambda grad: self.see(gradient, module, name, grad))
        if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
            for key, item in list(value.items()):
                watched = self._through(item, _join(name, key), module, kind)
                if watched is not item:
                    value[key] = watched  # type: ignore[index]
            return value
        if isinstance(value, (list, tuple)):
            items = [self._through(item, _join(name, i), module, kind) for i, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


class _Identity(torch.autograd.Function):
    """The same values, and a look at the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seen: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.seen = seen
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen(gradients[0])
        return gradients[0], None


@contextmanager
def probing(model: torch.nn.Module) -> Iterator[Probe]:
    """Watch ``model`` inside the block; there are no hooks before it and none after it."""
    probe = Probe(model)
    try:
        yield probe
    finally:
        probe.remove()


def find_broken_weights(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The weights of this rank that hold nan or inf: name and range (at stage 3 of its share).

    ``tied``: the other names of a weight that several modules share. Buffers with nan are among them; inf
    a mask may hold by right.
    """
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found = []
    for parameter, (name, *tied) in names.items():
        held = held_values(parameter)
        if held is None or not held.is_floating_point() or held.numel() == 0:
            continue
        spread = measure(held)
        if not spread.is_finite:
            whole = held is parameter
            first = spread.first_bad if whole else None
            range_ = replace(spread, first_bad=first).to_json()
            found.append({"name": name, "tied": tied, "whole": whole, **range_})
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and (spread := measure(buffer)).num_nan:
            found.append({"name": name, "tied": [], "whole": True, **spread.to_json()})
    return found


def _argument_names(module: torch.nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
