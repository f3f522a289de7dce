"""Parameters that get no gradient: in a micro-batch, in a whole window, on one rank."""

from __future__ import annotations

from typing import Any

import torch

from dslaunch.core.errors import ConfigError
from tests.train.engine.cases_behaviour import refused
from tests.train.rank_cases import RANK, Case, bare_deepspeed, config, engine_for, master

# Whether the second weight is used in the two micro-batches of each window.
Windows = tuple[tuple[bool, bool], ...]
WINDOWS: Windows = ((True, True), (True, False), (False, True), (False, False))
NONE_TOO_LATE: Windows = ((True, True), (False, True), (False, False))


class TwoWeights(torch.nn.Module):
    """loss = sum(a) and, where it is used, sum(b): every gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))

    def forward(self, uses_b: bool) -> torch.Tensor:
        return self.a.sum() + self.b.sum() if uses_b else self.a.sum()


def _config(stage: int, precision: str, offload: bool, **zero_keys: Any) -> dict[str, Any]:
    zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {}), **zero_keys}
    scale = {"fp16": {"initial_scale_power": 4}} if precision == "fp16" else {}
    return {
        **config(stage, precision, accumulation=2, zero_optimization=zero, **scale),
        "zero_force_ds_cpu_optimizer": False,
    }


def course(stage: int, precision: str, *, offload: bool = False) -> dict[str, Any]:
    """Both weights and the norm after each window."""
    weights, norms = [], []
    with engine_for(TwoWeights(), _config(stage, precision, offload)) as engine:
        for window in WINDOWS:
            for uses_b in window:
                engine.backward(engine(uses_b))
                result = engine.step()
            norms.append(result.grad_norm)
            weights.append([master(p)[0] for p in engine.module.parameters()])
    return {"weights": weights, "norms": norms}


def of_second(
    stage: int, windows: Windows = WINDOWS, *, bare: bool, offload: bool = False, **zero: Any
) -> Any:
    """The second weight after each window."""
    found = []
    settings = _config(stage, "fp32", offload, **zero)
    with (bare_deepspeed if bare else engine_for)(TwoWeights(), settings) as engine:
        for window in windows:
            for uses_b in window:
                engine.backward(engine(uses_b))
                engine.step()
            found.append(master(engine.module.b)[0])
    return found


def overlapped(bare: bool) -> Any:
    """Stage 1 with overlap_comm, each rank another gradient: the second weight at the end, or why not."""
    settings = _config(1, "fp32", offload=False, overlap_comm=True)
    with (bare_deepspeed if bare else engine_for)(TwoWeights(), settings) as engine:
        try:
            for uses_b in WINDOWS[0] + WINDOWS[1]:
                engine.backward(engine(uses_b) * (RANK + 1))
                engine.step()
        except ConfigError as error:
            return str(error)
        return master(engine.module.b)[0]


class Experts(torch.nn.Module):
    """loss = the sum over the experts in the order of ``use``, each of them behind the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first, self.second = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, use: tuple[str, ...]) -> torch.Tensor:
        hidden = self.shared * 1
        for name in use:
            hidden = hidden * getattr(self, name)
        return hidden.sum()


def unlike(stage: int, *uses: tuple[str, ...], precision: str = "fp32", **blocks: Any) -> list[Any]:
    """The weights after a step in which each rank uses its own experts, and what the next one says."""
    settings = config(stage, precision, **blocks)
    with engine_for(Experts(), settings, watch={}) as engine:
        engine.backward(engine(uses[RANK]))
        engine.step()
        weights = [master(p)[0] for p in engine.module.parameters()]
        try:
            engine.backward(engine(uses[0]))
            engine.step()
        except ConfigError as error:
            return [weights, str(error)]
    return [weights, None]


def absent_on_one_rank(*, bare: bool) -> list[float]:
    """bf16 summed in fp32, clip 1, rank 0 does not use the second weight: norm and weights after a step."""
    settings = config(1, "bf16", clipping=1.0, data_types={"grad_accum_dtype": "fp32"})
    if bare:
        with bare_deepspeed(TwoWeights(), settings) as ds:
            ds.backward(ds(RANK != 0))
            ds.step()
            return [float(ds.get_global_grad_norm()), *(master(p)[0] for p in ds.module.parameters())]
    with engine_for(TwoWeights(), settings) as engine:
        engine.backward(engine(RANK != 0))
        norm = engine.step().grad_norm
        return [norm, *(master(p)[0] for p in engine.module.parameters())]


def renamed_upstream() -> str:
    """A stage 3 that hands its gradients on by another name, as after an upgrade of DeepSpeed."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    partition_grads = DeepSpeedZeroOptimizer_Stage3.partition_grads
    del DeepSpeedZeroOptimizer_Stage3.partition_grads
    try:
        return refused(config(3))
    finally:
        DeepSpeedZeroOptimizer_Stage3.partition_grads = partition_grads


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        "absent-bare/3": lambda: of_second(3, bare=True),
        "absent-bare/1/offload": lambda: of_second(1, bare=True, offload=True),
        "absent-bare/2/offload": lambda: of_second(2, bare=True, offload=True),
        "absent/renamed": renamed_upstream,
        "absent-bare/overlap": lambda: overlapped(bare=True),
        "absent/overlap": lambda: overlapped(bare=False),
        "absent/overlap/offload": lambda: of_second(
            1, NONE_TOO_LATE, bare=False, offload=True, overlap_comm=True
        ),
        "absent-bare-on-one-rank": lambda: absent_on_one_rank(bare=True),
        "absent-on-one-rank": lambda: absent_on_one_rank(bare=False),
    }
    own, both, turned = (("first",), ("second",)), (("first", "second"),) * 2, ("second", "first")
    for stage in (0, 1, 2):
        cases[f"unlike/{stage}"] = lambda s=stage: unlike(s, *own)
        cases[f"unlike/{stage}/order"] = lambda s=stage: unlike(s, both[0], turned)
        cases[f"unlike/{stage}/none"] = lambda s=stage: unlike(s, *both)
    summed = {"data_types": {"grad_accum_dtype": "fp32"}}
    cases["unlike/bf16"] = lambda: unlike(1, *own, precision="bf16", **summed)
    for stage in (0, 1, 2, 3):
        for precision in ("fp32", "bf16", "fp16"):
            cases[f"absent/{stage}/{precision}"] = lambda s=stage, p=precision: course(s, p)
    for stage, precision in ((1, "fp32"), (1, "fp16"), (2, "fp32"), (2, "bf16"), (3, "bf16")):
        cases[f"absent/{stage}/{precision}/offload"] = lambda s=stage, p=precision: course(s, p, offload=True)
    return cases
