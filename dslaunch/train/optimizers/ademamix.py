"""AdEMAMix in plain torch: bitsandbytes keeps two averages in one tensor, of no shard's shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdEMAMix(torch.optim.Optimizer):
    """Pagliardini, Ablin, Grangier 2024, "The AdEMAMix Optimizer: Better, Faster, Older", Algorithm 1.

    AdamW with a second, slow average of the gradients that counts ``alpha`` times. In the
    first ``t_alpha`` and ``t_beta3`` steps alpha and beta3 grow to their values; without them
    they have these from the start. Works element by element; three states in the type and
    shape of the parameter, and the number of steps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
    ) -> None:
        names = ("lr", "betas", "eps", "weight_decay", "alpha", "t_alpha", "t_beta3")
        values = (lr, betas, eps, weight_decay, alpha, t_alpha, t_beta3)
        super().__init__(params, dict(zip(names, values, strict=True)))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)  # as torch's own: a load leaves it as it is
            for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq"):
                state[name] = torch.zeros_like(p)
        state["step"] += 1
        step = int(state["step"])
        beta1, beta2, _ = group["betas"]
        fast, slow, square = state["exp_avg"], state["exp_avg_slow"], state["exp_avg_sq"]
        fast.lerp_(p.grad, 1 - beta1)
        slow.lerp_(p.grad, 1 - beta3_at(step, group["betas"], group["t_beta3"]))
        square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        bottom = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        top = slow.mul(alpha_at(step, group["alpha"], group["t_alpha"])).add_(
            fast, alpha=1 / (1 - beta1**step)
        )
        p.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(top, bottom, value=-group["lr"])


def alpha_at(step: int, alpha: float, t_alpha: int | None) -> float:
    """Weight of the slow average in step 1, 2, ... (the paper's equation for alpha^(t))."""
    return alpha if t_alpha is None else min(step / t_alpha, 1.0) * alpha


def beta3_at(step: int, betas: tuple[float, float, float], t_beta3: int | None) -> float:
    """Decay of the slow average in step 1, 2, ...: from beta1, its half-life grows linearly to beta3's."""
    beta1, _, beta3 = betas
    if t_beta3 is None or step >= t_beta3 or not beta1 < beta3:
        return beta3
    share = step / t_beta3
    log1, log3 = math.log(beta1), math.log(beta3)
    return math.exp(log1 * log3 / ((1 - share) * log3 + share * log1))
