"""Modules that stay in fp32 inside a 16-bit model: real fp32 parameters, and casts at their border.

DeepSpeed 0.19.8 knows one dtype for all parameters. What it takes to give it two was measured against
a float64 reference (tests/train/test_fp32_modules.py; docs/upstream.md, F16):

- it casts every parameter in ``deepspeed.initialize``, before it looks at which are trained; so the
  fp32 ones get their values back when it asks for the parameters (:class:`_ParameterGroups`);
- ZeRO flattens an optimizer group into one buffer: each dtype needs groups of its own, and the first
  one must be 16-bit, since the loss scaler goes by the first parameter;
- stage 3 puts all shards into one buffer and refuses two dtypes: it gets one for each dtype instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from dslaunch.core.errors import ConfigError, EnvironmentNotReady, one_line
from dslaunch.core.module_patterns import match_modules, modules_of, outermost, preview
from dslaunch.train.quantization import is_quantised

KEY = "fp32_modules"
_PEFT_PREFIX = "base_model.model."


class Fp32Modules:
    """The modules of ``model`` that ``patterns`` mean, and every parameter in them.

    ``parameters`` also holds those of a tied twin; ``notes`` say what was matched. Raises ConfigError
    where a pattern matches no module with parameters, or one whose weights are quantised.
    """

    def __init__(self, model: Any, patterns: Sequence[str]) -> None:
        named = dict(_named_modules(model))
        parameters = list(named_parameters(model))
        matched = match_modules(modules_of(name for name, _ in parameters), patterns, KEY)
        chosen = outermost(name for names in matched.values() for name in names)
        self.parameters = _parameters_in(named, chosen)
        twins = _tied_twins(parameters, self.parameters, chosen)
        self.modules = {name: named[name] for name in (*chosen, *twins)}
        self.notes = [f"{KEY} {pattern}: {count}, {names}" for pattern, count, names in preview(matched)]
        if twins:
            self.notes.append(f"{KEY}: {', '.join(twins)} too: the weight is the same one (tied)")
        self._head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        _refuse_quantised(parameters, self.parameters)

    def add_borders(self, dtype: torch.dtype) -> None:
        """Floating inputs to fp32, outputs back to ``dtype``. The output head's logits stay fp32."""
        for module in self.modules.values():
            module.register_forward_pre_hook(_inputs_to_fp32, with_kwargs=True)
            if module is not self._head:
                module.register_forward_hook(_OutputsTo(dtype))

    def groups(self, trained: Iterable[Any]) -> Iterable[Any]:
        """``trained`` (parameters, or parameter groups) as groups of one dtype, for DeepSpeed.

        Raises ConfigError where nothing is left that is 16-bit.
        """
        given = list(trained)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        low = [self._part(group, fp32=False) for group in groups]
        high = [self._part(group, fp32=True) for group in groups]
        found = [group for group in (*low, *high) if group["params"]]
        if not any(group["params"] for group in low):
            raise ConfigError(
                f"{KEY}: every trained parameter lies in them, and none is left in 16 bit",
                hint="set precision: fp32, or name fewer modules",
            )
        return _ParameterGroups(found, self.parameters)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """``deepspeed.initialize`` in here takes them. Raises EnvironmentNotReady where it does not."""
        with _one_buffer_for_each_dtype():
            yield
        wrong = sum(p.dtype != torch.float32 for p in self.parameters)
        if wrong:
            import deepspeed

            raise EnvironmentNotReady(
                f"DeepSpeed {deepspeed.__version__} made {wrong} parameters of {KEY} 16-bit",
                hint="use the DeepSpeed of constraints.txt, or leave fp32_modules out",
            )

    def check_forward(self, model: Any, device: torch.device) -> None:
        """Run ``model`` once on two tokens. Under ZeRO-3 every rank must call it.

        Raises ConfigError where types meet that do not fit: a weight in these modules is used by
        a module around them, past their border.
        """
        ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
        try:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
        except RuntimeError as error:
            if "dtype" not in str(error) and "type" not in str(error):
                raise
            raise ConfigError(
                f"{KEY} {', '.join(self.modules)}: fp32 and 16 bit meet inside of the model: "
                f"{one_line(error, 160)}",
                hint="their weights are used outside of their own forward: name the module around them",
            ) from error

    def _part(self, group: dict[str, Any], *, fp32: bool) -> dict[str, Any]:
        return {**group, "params": [p for p in group["params"] if (p in self.parameters) == fp32]}


class _OutputsTo:
    """The hook at a border that takes outputs to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return cast(output, self._dtype)


def to_fp32_throughout(model: torch.nn.Module) -> None:
    """Take every parameter and buffer to fp32 and the casts at borders off. Not where it is partitioned."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, _OutputsTo):
                del module._forward_hooks[key]
    model.float()


class _ParameterGroups:
    """Optimizer groups that, when DeepSpeed asks for them, undo its cast of the fp32 parameters."""

    def __init__(self, groups: list[dict[str, Any]], fp32: Iterable[torch.nn.Parameter]) -> None:
        self._groups = groups
        self._values = {p: p.data for p in fp32 if not hasattr(p, "ds_id")}  # partitioned ones are not cast

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for parameter, value in self._values.items():
            parameter.data = value.to(parameter.device)
        return iter(self._groups)


def set_dtypes(model: Any, dtype: torch.dtype, fp32: Iterable[torch.nn.Parameter] = ()) -> None:
    """Every floating parameter at ``dtype``, those of ``fp32`` at fp32; also where ZeRO-3 has it partitioned.

    transformers keeps some parameters in fp32. DeepSpeed 0.19.8 casts parameters, and no buffers, to
    the training dtype (engine.py, _cast_module_mixed_precision), but leaves partitioned ones as they
    are; every stage shall train the same model.
    """
    wide = set(fp32)
    for parameter in model.parameters():
        _set_dtype(parameter, torch.float32 if parameter in wide else dtype)


def fp32_names(model: Any, patterns: Sequence[str]) -> set[str]:
    """The names of all parameters of the modules that ``patterns`` mean, tied ones by each name."""
    if not patterns:
        return set()
    chosen = Fp32Modules(model, patterns).parameters
    return {name for name, parameter in named_parameters(model) if parameter in chosen}


def to_dtype(model: Any, dtype: torch.dtype, patterns: Sequence[str]) -> Any:
    """``model.to(dtype)``, but for the modules that ``patterns`` mean."""
    kept = {p: p.data for p in Fp32Modules(model, patterns).parameters} if patterns else {}
    model.to(dtype)
    for parameter, value in kept.items():
        parameter.data = value
    return model


@contextlib.contextmanager
def loaded_in_fp32(patterns: Sequence[str]) -> Iterator[None]:
    """In here ``from_pretrained`` reads these modules' weights at fp32, whatever dtype it is given.

    The one place where transformers asks a model which of its parameters stay fp32 is the method
    that is replaced meanwhile. A ZeRO-3 model is partitioned by then, and filled into what is there.
    Raises ConfigError as :class:`Fp32Modules`.
    """
    from transformers import PreTrainedModel

    plan = PreTrainedModel._get_dtype_plan

    def dtype_plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        parameters = dict(named_parameters(model))
        chosen = Fp32Modules(model, patterns).parameters
        names = {name for name, p in parameters.items() if p in chosen}
        for pair in model.all_tied_weights_keys.items():  # which are tied only after they are read
            names |= set(pair) if names.intersection(pair) else set()
        for name in names:
            if hasattr(parameters[name], "ds_tensor"):
                _set_dtype(parameters[name], torch.float32)
        return {**plan(model, dtype), **dict.fromkeys(names, torch.float32)}

    if not patterns:
        yield
        return
    PreTrainedModel._get_dtype_plan = dtype_plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = plan  # type: ignore[method-assign]


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All parameters by their names without an adapter's wrapping; a tied one by each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name.removeprefix(_PEFT_PREFIX), parameter


def cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it at ``dtype``; tuples, lists and mappings are walked."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return type(value)({key: cast(item, dtype) for key, item in value.items()})
    return value


def _inputs_to_fp32(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return cast(args, torch.float32), cast(kwargs, torch.float32)


def _named_modules(model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        yield name.removeprefix(_PEFT_PREFIX), module


def _parameters_in(named: dict[str, torch.nn.Module], names: Iterable[str]) -> dict[torch.nn.Parameter, None]:
    return {p: None for name in names for p in named[name].parameters()}


def _tied_twins(
    parameters: list[tuple[str, torch.nn.Parameter]],
    fp32: dict[torch.nn.Parameter, None],
    chosen: Sequence[str],
) -> list[str]:
    """The modules outside of ``chosen`` that hold one of their parameters, such as an embedding."""
    inside = tuple(f"{name}." for name in chosen)
    shared = [name for name, p in parameters if p in fp32 and not name.startswith(inside)]
    return list(dict.fromkeys(name.rsplit(".", 1)[0] for name in shared))


def _refuse_quantised(
    parameters: list[tuple[str, torch.nn.Parameter]], fp32: dict[torch.nn.Parameter, None]
) -> None:
    packed = [n for n, p in parameters if p in fp32 and (is_quantised(p) or not p.is_floating_point())]
    if packed:
        raise ConfigError(
            f"{KEY}: {packed[0]} is quantised, and cannot be fp32",
            hint="name modules that are not quantised, such as norms",
        )


def _set_dtype(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    if is_quantised(parameter):  # codes, even where they are packed in floats
        return
    # Of a partitioned parameter ``data`` is empty, and this rank's share of the values is in ``ds_tensor``.
    for tensor in (parameter, getattr(parameter, "ds_tensor", None)):
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


class _Buffers:
    """Several flat buffers, end to end, as stage 3 looks at its one: by ``narrow`` alone."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        for buffer in self._buffers:
            if start + length <= buffer.numel():
                return buffer.narrow(dim, start, length)
            start -= buffer.numel()
        raise AssertionError("a sub-group lies in two buffers")


@contextlib.contextmanager
def _one_buffer_for_each_dtype() -> Iterator[None]:
    """F16: ``stage3.py`` lays all shards end to end in one buffer, and asserts that they have one dtype."""
    from deepspeed.runtime.zero import stage3

    defragment = stage3.defragment

    def by_dtype(tensors: list[torch.Tensor]) -> Any:
        runs: list[list[torch.Tensor]] = []
        for tensor in tensors:
            if not runs or runs[-1][0].dtype != tensor.dtype:
                runs.append([])
            runs[-1].append(tensor)
        return _Buffers([defragment(run) for run in runs]) if len(runs) > 1 else defragment(tensors)

    stage3.defragment = by_dtype
    try:
        yield
    finally:
        stage3.defragment = defragment
