"""Run by the ranks of test_adapters.py: all cases in one pair of processes.

Run as ``python -m tests.train.rank_adapters OUT_DIR MODELS_DIR``; MODELS_DIR holds tiny models by name.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import AdapterPlan, ModelPlan, RunPlan, SchedulerPlan
from dslaunch.losses.sft import token_nll
from dslaunch.train import model as model_module
from dslaunch.train.adapters import GradientWitness
from dslaunch.train.checkpoint import load_checkpoint, save_checkpoint
from dslaunch.train.dist import all_reduce_sum
from dslaunch.train.engine import Engine
from dslaunch.train.model import load_base_model, load_model, load_tokenizer
from dslaunch.train.schedule import build_scheduler_factory
from tests.support.plans import LORA, make_plan
from tests.train.rank_cases import Case, OneWeight, TinyLM, config, engine_for, gradient, master, run_cases

RANK = int(os.environ["RANK"])
OUT, MODELS = Path(sys.argv[1]), Path(sys.argv[2])
TINY_LR = 1e-6  # far below half the distance of two 16-bit weights
KINDS: dict[str, AdapterPlan] = {
    "head": replace(LORA, target_modules=("q_proj", "down_proj"), modules_to_save=("lm_head",)),
    "dora": replace(LORA, type="dora", target_modules=("q_proj", "down_proj")),
}
MOVED = [
    (1, "bf16", "head"),
    (2, "fp16", "head"),
    (3, "bf16", "head"),
    (2, "bf16", "dora"),
    (3, "fp16", "dora"),
]
RESUMED = [(1, "fp16", "dora"), (2, "bf16", "head"), (3, "fp16", "head")]


@contextmanager
def adapter_engine(
    stage: int, precision: str, adapter: AdapterPlan, *, checkpointing: bool = False, lr: float = 1e-2
) -> Iterator[Engine]:
    """The engine of an adapter on the untied tiny model, loaded as a run loads it."""
    adam = {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "torch_adam": True}}
    settings = config(stage, precision, optimizer=adam)
    if precision == "fp16":
        settings["fp16"]["initial_scale_power"] = 8
    plan = make_plan(
        OUT, MODELS / "untied", OUT, micro=1, accumulation=1, zero_stage=stage, precision=precision,
        adapter=adapter, ds_config=settings, model={"gradient_checkpointing": checkpointing},
    )  # fmt: skip
    loaded = load_model(plan, load_tokenizer(plan.model, torch.float32))
    with engine_for(loaded.model, settings, model_parameters=loaded.trainable) as engine:
        yield engine
    del loaded
    gc.collect()  # the ZeRO-3 config of this case must not outlive it


def backward(engine: Engine, step: int) -> None:
    """One window on samples of this rank's own."""
    ids = torch.arange(20).unsqueeze(0) * (7 + RANK) % 300 + step
    targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
    loss = token_nll(engine(input_ids=ids, use_cache=False).logits, targets)
    engine.backward_token_sum(loss.sum, num_tokens=38)


def trained(engine: Engine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in engine.module.named_parameters() if p.requires_grad)


def first_gradients(stage: int, checkpointing: bool) -> dict[str, Any]:
    """The gradient of every trained parameter in the first window, and how often a layer was run for it."""
    passes = []
    with adapter_engine(stage, "fp32", LORA, checkpointing=checkpointing) as engine:
        layer = engine.module.get_submodule("base_model.model.model.layers.0.mlp")
        layer.register_forward_pre_hook(lambda *_: passes.append(1))
        backward(engine, 0)
        found = {name: gradient(p) for name, p in trained(engine)}
        engine.step()
    return {"gradients": found, "passes": len(passes)}


def unused_layer(stage: int) -> dict[str, str | None]:
    """What is said after a first step that used every adapter, and after one that left out a layer's MLP."""

    def said(engine: Engine) -> str | None:
        witness = GradientWitness(engine.module)
        backward(engine, 0)
        engine.step()
        try:
            return witness.check(lambda values: all_reduce_sum(values, engine.device))
        except ConfigError as error:
            return error.message

    with adapter_engine(stage, "bf16", LORA) as engine:
        found = {"all": said(engine)}
        mlp = engine.module.get_submodule("base_model.model.model.layers.0.mlp")
        mlp.forward = lambda hidden: hidden  # type: ignore[method-assign]
        return {**found, "without": said(engine)}


def moved_masters(stage: int, precision: str, kind: str) -> dict[str, Any]:
    """Three steps that are too small for 16-bit weights, and what moved."""
    with adapter_engine(stage, precision, KINDS[kind], lr=TINY_LR) as engine:
        before = {name: master(p) for name, p in trained(engine)}
        frozen = [p for p in engine.module.parameters() if not p.requires_grad]
        dtypes = {str(p.dtype) for p in engine.module.parameters()}
        skipped = []
        for step in range(3):
            backward(engine, step)
            result = engine.step()
            assert result is not None
            skipped.append(result.skipped)
        after = {name: master(p) for name, p in trained(engine)}
        moves = {
            name: max(abs(a - b) for a, b in zip(after[name], before[name], strict=True)) for name in before
        }
        return {"moves": moves, "dtypes": sorted(dtypes), "frozen": len(frozen), "skipped": skipped}


def resumed(stage: int, precision: str, kind: str) -> dict[str, Any]:
    """Four steps straight; two, saved, and two more in a fresh engine: losses and weights."""
    root = OUT / f"{stage}-{precision}-{kind.replace(' ', '-')}"

    def steps(engine: Engine, first: int, last: int) -> list[list[float]]:
        records = []
        for step in range(first, last):
            backward(engine, step)
            result = engine.step()
            assert result is not None
            records.append([result.loss, result.grad_norm, result.loss_scale])
        return records

    with adapter_engine(stage, precision, KINDS[kind]) as engine:
        steps(engine, 0, 2)
        save_checkpoint(engine, root, 2, extra={})
        straight = steps(engine, 2, 4)
        straight_end = {name: master(p) for name, p in trained(engine)}
    with adapter_engine(stage, precision, KINDS[kind]) as engine:
        load_checkpoint(engine, root)
        again = steps(engine, 2, 4)
        end = {name: master(p) for name, p in trained(engine)}
    return {"same": again == straight and end == straight_end, "losses": [record[0] for record in straight]}


def rows_without_gradient(stage: int) -> dict[str, Any]:
    """fp16, Adam with eps 1e-8 (0 in fp16): the embedding of tokens that no batch has."""
    adam = {"type": "AdamW", "params": {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.0, "torch_adam": True}}
    settings = config(stage, "fp16", optimizer=adam, fp16={"initial_scale_power": 8})
    with engine_for(TinyLM(), settings) as engine:
        before = master(engine.module.embedding.weight)
        for _ in range(3):
            loss = token_nll(engine(torch.tensor([[1, 2]])), torch.tensor([[2, 1]]))
            engine.backward_token_sum(loss.sum, num_tokens=4)
            engine.step()
        after = master(engine.module.embedding.weight)
        finite = all(math.isfinite(value) for p in engine.module.parameters() for value in master(p))
    width = len(after) // 13
    changed = [before[i : i + width] != after[i : i + width] for i in range(0, len(after), width)]
    return {"finite": finite, "changed": [row for row, is_other in enumerate(changed) if is_other]}


def schedule_under_overflow(stage: int) -> list[list[float]]:
    """fp16: three overflows on one rank, then two good steps, in a warm-up of four. [lr, skipped, weight]."""
    schedule = build_scheduler_factory(SchedulerPlan(type="constant", warmup_steps=4), 8)
    settings = config(stage, "fp16", fp16={"initial_scale_power": 8, "hysteresis": 1})
    records = []
    with engine_for(OneWeight(), settings, lr_scheduler=schedule) as engine:
        for step in range(5):
            engine.backward(engine(torch.tensor([math.inf if step < 3 and RANK == 1 else 1.0])))
            result = engine.step()
            assert result is not None
            records.append([result.lr, result.skipped, master(engine.module.w)[0]])
    return records


# --- ZeRO-3: partitioned from the first tensor on, and the same model --------------------------------


def zero3_plan(name: str) -> RunPlan:
    return make_plan(OUT, MODELS / name, OUT, zero_stage=3, precision="bf16")


def partitioned(name: str) -> dict[str, Any]:
    """A model read under ZeRO-3 in bf16, beside the same one read whole."""
    plan = zero3_plan(name)
    whole = load_base_model(ModelPlan(path=plan.model.path, kind="directory"), torch.bfloat16).train()
    loaded = load_model(plan, load_tokenizer(plan.model, torch.bfloat16))
    shares = [int(p.ds_tensor.numel()) for p in loaded.trainable]
    held = [p.numel() for p in loaded.trainable]
    buffers = dict(whole.named_buffers())
    differing = [n for n, b in loaded.model.named_buffers() if not torch.equal(b, buffers[n])]
    differing += [n for n, b in loaded.model.named_buffers() if b.dtype != buffers[n].dtype]
    ids = torch.arange(3, 60).unsqueeze(0)
    settings = config(3, "bf16")
    with engine_for(loaded.model, settings, model_parameters=loaded.trainable) as engine, torch.no_grad():
        logits = engine(input_ids=ids, use_cache=False).logits
        expected = whole(input_ids=ids, use_cache=False).logits
    return {
        "shares": sum(shares),
        "all": sum(p.numel() for p in whole.parameters()),
        "held": sum(held),
        "num_buffers": len(buffers),
        "differing": differing,
        "equal": torch.equal(logits, expected) and bool(torch.isfinite(logits).all()),
    }


def read_before_the_config() -> str:
    """What happens where the ZeRO-3 config is not alive when the model is read."""
    plan = zero3_plan("untied")
    config_of = model_module._zero3_config
    model_module._zero3_config = lambda plan: None
    try:
        load_model(plan, load_tokenizer(plan.model, torch.bfloat16))
        return "loaded"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model_module._zero3_config = config_of


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for stage in (0, 2, 3):
        for on in (False, True):
            cases[f"gradients/{stage}/{on}"] = lambda s=stage, c=on: first_gradients(s, c)  # type: ignore[misc]
    for stage, precision, kind in MOVED:
        key = f"moved/{stage}/{precision}/{kind}"
        cases[key] = lambda s=stage, p=precision, k=kind: moved_masters(s, p, k)  # type: ignore[misc]
    for stage, precision, kind in RESUMED:
        key = f"resumed/{stage}/{precision}/{kind}"
        cases[key] = lambda s=stage, p=precision, k=kind: resumed(s, p, k)  # type: ignore[misc]
    for stage in (0, 1, 2, 3):
        cases[f"unused/{stage}"] = lambda s=stage: unused_layer(s)  # type: ignore[misc]
        cases[f"rows/{stage}"] = lambda s=stage: rows_without_gradient(s)  # type: ignore[misc]
        cases[f"schedule/{stage}"] = lambda s=stage: schedule_under_overflow(s)  # type: ignore[misc]
    for name in ("untied", "llama3-rope", "gemma3"):
        cases[f"partitioned/{name}"] = lambda n=name: partitioned(n)  # type: ignore[misc]
    cases["too-early"] = read_before_the_config
    return cases


if __name__ == "__main__":
    run_cases(all_cases(), OUT, RANK)
