"""Muon on whole tensors and on ZeRO's flat shards: DeepSpeed's own clips and reports what it has made of
the gradient, and keeps its momentum in 16 bit (docs/upstream.md, F11)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dslaunch.core.muon_matrices import is_muon_matrix

_STEPS, _COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Piece:
    """What of one tensor lies in a flat shard: ``numel`` elements, from ``first`` of the flattened tensor
    and from ``start`` of the shard. ``is_shared``: other ranks have the rest of it."""

    shape: tuple[int, ...]
    first: int
    start: int
    numel: int
    is_shared: bool = False


class MatrixMomentum(torch.optim.Optimizer):
    """Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", with Nesterov.

    Groups with ``use_muon`` hold matrices, the others get AdamW. All states are in the type and shape of
    the parameter: under ZeRO that is the fp32 shard, and the gradient has been unscaled and clipped.
    A shard is of no use for an update that looks at whole matrices, so :meth:`place` must say what lies
    where; a matrix that ends in another rank's shard is added up from its pieces. Its class may not
    be called Muon: DeepSpeed does things of its own to an optimizer of that name.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        values = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, values)
        self._pieces: dict[torch.Tensor, Sequence[Piece]] = {}
        self._group: Any = None

    def place(self, pieces: Mapping[torch.Tensor, Sequence[Piece]], group: Any) -> None:
        """What lies in which flat shard, and the process group of those who share a tensor."""
        self._pieces, self._group = dict(pieces), group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Collective where pieces are shared."""
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update_matrices(p, group) if group["use_muon"] else self._update_adamw(p, group)
        return loss

    def _update_matrices(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, beta = self.state[p], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        average = state["momentum_buffer"].lerp_(p.grad, 1 - beta)
        update = self._orthogonal(p, p.grad.lerp(average, beta))
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _orthogonal(self, p: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        if p.dim() > 1:
            return orthogonalise(direction)
        update = torch.zeros_like(direction)
        for piece in self._pieces[p]:
            inside = slice(piece.start, piece.start + piece.numel)
            within = slice(piece.first, piece.first + piece.numel)
            whole = direction[inside]
            if piece.is_shared:
                whole = direction.new_zeros(math.prod(piece.shape))
                whole[within] = direction[inside]
                torch.distributed.all_reduce(whole, group=self._group)
            if piece.numel:
                update[inside] = orthogonalise(whole.view(piece.shape)).flatten()[within]
        return update

    def _update_adamw(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        step = int(state["step"])
        first = state["exp_avg"].lerp_(p.grad, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        spread = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(first, spread, value=-group["lr"] / (1 - beta1**step))


def orthogonalise(direction: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz, five quintic steps, and the factor sqrt(max(1, rows / columns)); same shape.

    Three dimensions are a stack of matrices (experts), more than that a convolution's filters. As
    DeepSpeed's, it runs in fp16 on accelerators and in fp32 on CPUs.
    """
    matrix = direction if direction.dim() == 3 else direction.reshape(direction.shape[0], -1)
    rows, columns = matrix.shape[-2:]
    x = matrix.mT if rows > columns else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    x = x.float() if x.device.type == "cpu" else x.half()
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    x = x.mT if rows > columns else x
    return x.to(direction.dtype).mul(math.sqrt(max(1.0, rows / columns))).reshape(direction.shape)


def build_muon(
    model: torch.nn.Module, params: Mapping[str, Any]
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """What makes it of parameters or groups of ``model``. ``params`` are those of DeepSpeed's block.

    Each group is split into matrices and the rest. Its own ``lr`` and ``weight_decay`` come first, then
    ``muon_lr`` or ``adam_lr``, then ``lr``, as DeepSpeed has it (runtime/engine.py ``_muon_param_groups``).
    """
    # At ZeRO-3 a parameter itself is empty; its whole shape is beside it.
    matrices = {
        id(p) for name, p in model.named_parameters() if is_muon_matrix(name, getattr(p, "ds_shape", p.shape))
    }
    usual = {key: params[key] for key in ("lr", "momentum", "betas", "eps", "weight_decay") if key in params}
    rates = {True: params.get("muon_lr"), False: params.get("adam_lr")}

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        halves = []
        for group in _as_groups(parameters):
            for use_muon, rate in rates.items():
                members = [p for p in group["params"] if (id(p) in matrices) is use_muon]
                own = {} if rate is None else {"lr": rate}
                if members:
                    halves.append({**own, **group, "params": members, "use_muon": use_muon})
        return MatrixMomentum(halves, **{"lr": 1e-3, **usual})

    return make


def _as_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    items = list(parameters)
    loose = [item for item in items if not isinstance(item, dict)]
    return [item for item in items if isinstance(item, dict)] + ([{"params": loose}] if loose else [])
