"""Which operation made the first gradient that is not finite, and which line of code made that operation.

autograd's anomaly mode keeps the line of each operation; it would also look for nan itself, but it stops
the backward there: at ZeRO stage 3 the other ranks would wait for this one in a gather. So a hook on each
operation looks, and the backward runs to its end on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)


class GradientWatch:
    """Looks at every operation behind ``root``, a scalar that was made in anomaly mode."""

    def __init__(self, root: torch.Tensor) -> None:
        self.found: str | None = None
        for node in _nodes(root.grad_fn):
            node.register_hook(lambda given, got, node=node: self._look(node, given, got))

    def _look(self, node: Any, given: Sequence[Any], got: Sequence[Any]) -> None:
        if self.found is not None or not all(map(_is_finite, got)):
            return
        for place, gradient in enumerate(given):
            if not _is_finite(gradient):
                what = "nan" if bool(torch.isnan(gradient).any()) else "inf"
                self.found = f"{node.name()} made {what} out of finite gradients, for its input {place}"
                self.found += _made_at(node)
                return


def _nodes(root: Any) -> Iterator[Any]:
    """Every operation of the graph, once."""
    seen, open_ = set(), [root]
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        open_ += [parent for parent, _ in node.next_functions]


def _is_finite(gradient: Any) -> bool:
    return not isinstance(gradient, torch.Tensor) or bool(torch.isfinite(gradient).all())


def _made_at(node: Any) -> str:
    """The innermost line of the forward outside of torch itself: file, line and code."""
    for frame in reversed(node.metadata.get("traceback_", ())):
        place, _, code = str(frame).strip().partition("\n")
        if _TORCH not in place:
            file, _, rest = place.removeprefix('File "').partition('", line ')
            number, _, function = rest.partition(", in ")
            return f"; it stands at {file}:{number} in {function}: {code.strip().splitlines()[0]}"
    return ""
