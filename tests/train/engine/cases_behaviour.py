"""Small behaviour: late reading, token counts, frozen models, and what initialize refuses."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.train.rank_cases import RANK, WORLD_SIZE, Case, OneWeight, config, engine_for, master, step_once


def lazy_and_flag() -> dict[str, Any]:
    """A flag raised by one rank in the first micro-batch reaches all; read on rank 0 only, late."""
    with engine_for(OneWeight(), config(2, accumulation=2)) as engine:
        results = []
        for step in range(3):
            for k in range(2):
                engine.backward(engine(torch.tensor([float(step)])) + step)
                result = engine.step(flag=step == 1 and k == 0 and RANK == WORLD_SIZE - 1)
            results.append(result)
        if RANK != 0:
            return {"read": "nothing"}
        return {"flags": [r.flag for r in results], "losses": [r.loss for r in results]}


def wrong_token_counts() -> list[str]:
    """A count that changes inside a window, and one of zero."""
    messages = []
    with engine_for(OneWeight(), config(1, accumulation=2)) as engine:
        try:
            engine.backward_token_sum(engine(torch.tensor([1.0])), num_tokens=0)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        engine.backward_token_sum(engine(torch.tensor([1.0])), num_tokens=5)
        engine.step()
        try:
            engine.backward_token_sum(engine(torch.tensor([1.0])), num_tokens=6)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def refused(settings: dict[str, Any], **more: Any) -> str:
    """The error of an initialize that must not work."""
    try:
        with engine_for(OneWeight(), settings, **more):
            return "accepted"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def renamed_upstream() -> str:
    """An optimizer whose ``_update_scale`` has another name, as after an upgrade of DeepSpeed."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    update_scale = DeepSpeedZeroOptimizer._update_scale
    del DeepSpeedZeroOptimizer._update_scale
    try:
        return refused(config(2, "fp16"))
    finally:
        DeepSpeedZeroOptimizer._update_scale = update_scale


def other_deepspeed(**more: Any) -> list[Any]:
    """An installed DeepSpeed that says it is another version: what is said of it."""
    import deepspeed

    version, said = deepspeed.__version__, list[str]()
    deepspeed.__version__ = "0.99.1+cu130"
    try:
        return [refused(config(1), on_note=said.append, **more), said]
    finally:
        deepspeed.__version__ = version


def frozen(stage: int, precision: str) -> list[float]:
    """No optimizer: a forward on 2 with weight 3."""
    settings = config(stage, precision)
    del settings["optimizer"]
    with engine_for(OneWeight(start=3.0), settings) as engine, torch.no_grad():
        return [float(engine(torch.tensor([2.0]))), engine.zero_stage, engine.loss_scale]


def made_by_callable() -> list[Any]:
    """``optimizer`` given as a partial of a class: its name decides, and it trains."""
    make = functools.partial(torch.optim.SGD, lr=1.0)
    with engine_for(OneWeight(), config(0, "bf16", optimizer={}), optimizer=make) as engine:
        step_once(engine, 1.0)
        return [engine.zero_stage, *master(engine.module.w)]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1.0)


def own_optimizer(stage: int, *, offload: bool = False, made_by: Any = None) -> list[Any]:
    """SGD, or ``made_by``, without the flags that DeepSpeed asks for: it trains, and what was said."""
    settings, said = config(stage, optimizer={}), list[str]()
    del settings["zero_allow_untested_optimizer"]
    if offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model = OneWeight()
    made = made_by or torch.optim.SGD(model.parameters(), lr=1.0)
    with engine_for(model, settings, optimizer=made, on_note=said.append) as engine:
        step_once(engine, 1.0)
        return [said, master(engine.module.w)]


def refusal_cases() -> dict[str, Case]:
    adafactor = {"type": "Adafactor", "params": {"lr": 0.1}}
    muon = {"type": "Muon", "params": {"lr": 0.1}}
    autocast16 = {"enabled": True, "dtype": "float16"}
    return {
        "refused/both": lambda: refused(config(1, "fp16", bf16={"enabled": True})),
        "refused/autocast": lambda: refused(config(2, torch_autocast=autocast16)),
        "refused/adafactor": lambda: refused(
            {**config(0, "bf16", optimizer=adafactor), "zero_allow_untested_optimizer": False}
        ),
        "refused/callable": lambda: refused(
            {**config(0, "bf16", optimizer={}), "zero_allow_untested_optimizer": False},
            optimizer=functools.partial(torch.optim.Adafactor, lr=1.0),
        ),
        "refused/shards": lambda: refused(
            {key: value for key, value in config(2, optimizer=adafactor).items() if "untested" not in key}
        ),
        "refused/enabled": lambda: refused(config(1, bf16={"enabled": "yes"})),
        "refused/batch": lambda: refused({**config(1, micro=2, accumulation=2), "train_batch_size": 7}),
        "refused/stage": lambda: refused(config(5)),
        "refused/mics": lambda: refused(config(3, zero_optimization={"stage": 3, "mics_shard_size": 1})),
        "refused/norm": lambda: refused(config(2, zero_optimization={"compute_grad_norm": False})),
        "refused/check": lambda: refused(config(2, "bf16", bf16={"check_grad_overflow": False})),
        "refused/muon": lambda: refused(
            config(2, optimizer={}), optimizer=functools.partial(torch.optim.Muon, lr=0.1)
        ),
        "refused/muon-offload": lambda: refused(
            config(2, optimizer=muon, zero_optimization={"offload_optimizer": {"device": "cpu"}})
        ),
        "refused/muon-key": lambda: refused(
            config(2, optimizer={**muon, "params": {"lr": 0.1, "per_head_muon": True}})
        ),
        "refused/path": lambda: refused("nowhere/ds.json"),  # type: ignore[arg-type]
    }


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {"frozen/0/fp32": lambda: frozen(0, "fp32")}
    for precision in ("bf16", "fp16"):
        cases[f"frozen/3/{precision}"] = lambda p=precision: frozen(3, p)
    cases["version/unknown"] = other_deepspeed
    cases["version/allowed"] = lambda: other_deepspeed(allow_untested_deepspeed="0.99.1")
    cases["version/another"] = lambda: other_deepspeed(allow_untested_deepspeed="0.99.2")
    cases["renamed"] = renamed_upstream
    cases["callable"] = made_by_callable
    cases["own/2"] = lambda: own_optimizer(2)
    cases["own/2/function"] = lambda: own_optimizer(2, made_by=make_optimizer)
    cases["own/3/offload"] = lambda: own_optimizer(3, offload=True)
    cases["lazy"] = lazy_and_flag
    cases["token-counts"] = wrong_token_counts
    return {**cases, **refusal_cases()}
