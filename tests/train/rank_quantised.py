"""Run by the ranks of test_quantization.py: all cases in one pair of processes.

Run as ``python -m tests.train.rank_quantised OUT_DIR MODELS_DIR``; MODELS_DIR holds tiny models by name.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import all_tensors, live_bytes, storages
from dslaunch.config.memory.items import LOADING, rest_size, size_at
from dslaunch.config.memory.model import load_model_facts
from dslaunch.config.memory.of_run import setup_of_run
from dslaunch.config.memory.offload import rank_items
from dslaunch.config.memory.states import while_loading
from dslaunch.core.plan import AdapterPlan, Fp16Plan, OptimizerPlan, QuantizationPlan
from dslaunch.losses.sft import token_nll
from dslaunch.train.adapters import add_adapter
from dslaunch.train.checkpoint import load_checkpoint, save_checkpoint
from dslaunch.train.dist import init_world
from dslaunch.train.engine import Engine, TorchEngine, TorchSettings, initialize_torch
from dslaunch.train.model import DTYPES, load_base_model, load_model, load_tokenizer
from dslaunch.train.quantization import dequantised, is_quantised
from tests.support.plans import LORA, make_plan
from tests.train.rank_cases import Case, config, engine_for, master, run_cases

RANK = int(os.environ.get("RANK", "0"))
STEPS, LR = 3, 0.1
Weights = dict[str, list[float]]
RunCell = tuple[str, str, int]  # kind, precision, ZeRO stage
# Each kind with the precisions and stages in turn; the rest is in benchmarks/adapters.py.
RUNS: list[RunCell] = [
    ("nf4", "fp32", 0), ("nf4", "fp16", 2), ("nf4", "bf16", 3), ("nf4", "fp32", 3), ("nf4-single", "bf16", 2),
    ("nf4-bytes", "bf16", 3), ("fp4", "fp16", 1), ("on-disk", "fp32", 1), ("on-disk", "bf16", 3),
    ("int8", "fp32", 1),
    ("int8", "bf16", 2), ("int8", "fp16", 0), ("qdora", "bf16", 0), ("qdora", "fp16", 1),
    ("qdora", "fp32", 2), ("rslora", "bf16", 3), ("lora", "fp32", 1), ("lora", "bf16", 2),
    ("lora", "fp16", 3), ("dora", "bf16", 1), ("dora", "fp16", 2), ("dora", "fp32", 3), ("gguf", "bf16", 3),
]  # fmt: skip
# The last number: stage3_param_persistence_threshold.
MEMORY = [
    ("nf4", "bf16", 2, 0), ("nf4", "bf16", 3, 0), ("nf4-single", "fp16", 3, 3000), ("nf4", "fp32", 1, 0),
    ("nf4-bytes", "bf16", 3, 3000), ("int8", "bf16", 2, 0),
]  # fmt: skip
RESUMED: list[RunCell] = [("nf4", "bf16", 1), ("nf4", "fp16", 3), ("int8", "fp16", 2), ("qdora", "bf16", 2)]
# Kind and precision with engine torch.
TORCH_RUNS = [("nf4", "fp32"), ("nf4", "bf16"), ("nf4", "fp16"), ("int8", "bf16"), ("qdora", "fp32")]
FOUR = QuantizationPlan(load_in_4bit=True)
KINDS: dict[str, tuple[QuantizationPlan | None, AdapterPlan]] = {
    "lora": (None, LORA),
    "dora": (None, replace(LORA, type="dora")),
    "nf4": (FOUR, LORA),
    "nf4-single": (replace(FOUR, bnb_4bit_use_double_quant=False), LORA),
    "nf4-bytes": (FOUR, LORA),  # bytes at stage 3 too, as a run file may ask for
    "fp4": (replace(FOUR, bnb_4bit_quant_type="fp4"), LORA),
    "on-disk": (FOUR, LORA),
    "gguf": (FOUR, LORA),
    "int8": (QuantizationPlan(load_in_8bit=True), LORA),
    "qdora": (FOUR, replace(LORA, type="dora")),
    "rslora": (FOUR, replace(LORA, use_rslora=True)),
    "int8-dora": (QuantizationPlan(load_in_8bit=True), replace(LORA, type="dora")),
}
STORAGE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def plan_of(kind: str, precision: str, stage: int, storage: str | None = None) -> Any:
    """The plan of a cell, with the storage that a run file would get."""
    quantization, adapter = KINDS[kind]
    packed = STORAGE[precision] if stage == 3 and kind != "nf4-bytes" else "uint8"
    storage = storage or packed
    sgd = {"type": "SGD", "params": {"lr": LR}}
    settings = config(stage, precision, optimizer=sgd)
    if stage == 3:  # nothing stays whole: every weight is gathered where it is used
        settings["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 2000,
        }
    if precision == "fp16":
        settings["fp16"]["initial_scale_power"] = 4  # more, and the tiny model overflows
    plan = make_plan(
        OUT, MODELS / ("on-disk" if kind == "on-disk" else "untied"), OUT, micro=1, accumulation=1,
        zero_stage=stage, precision=precision, adapter=adapter, ds_config=settings,
        model={
            "quantization_config": quantization and replace(quantization, bnb_4bit_quant_storage=storage)
        },
    )  # fmt: skip
    if kind != "gguf":
        return plan
    # The tokenizer of a .gguf file has one name more, for what is unknown.
    file = replace(plan.model, path=str(MODELS / "tiny.gguf"), kind="gguf", tokenizer=plan.model.path)
    return replace(plan, model=file)


@contextmanager
def engine_of(plan: Any, *, on_load: Callable[[Any], Any] = lambda model: None) -> Iterator[Engine]:
    """Loaded as a run loads it."""
    loaded = load_model(plan, load_tokenizer(plan.model, torch.float32))
    on_load(loaded.model)
    with engine_for(loaded.model, dict(plan.ds_config), model_parameters=loaded.trainable) as engine:
        yield engine
    del loaded
    gc.collect()  # the ZeRO-3 config of this case must not outlive it


def samples(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``rank`` trains on in ``step``."""
    ids = torch.arange(20).unsqueeze(0) * (7 + rank) % 300 + step
    return ids, torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)


def train(engine: Engine | TorchEngine, first: int = 0, last: int = STEPS) -> list[list[float]]:
    """[loss, norm] of each step."""
    records = []
    for step in range(first, last):
        ids, targets = samples(step, RANK)
        loss = token_nll(engine(input_ids=ids, use_cache=False).logits, targets)
        engine.backward_token_sum(loss.sum, num_tokens=38)
        result = engine.step()
        assert result is not None and not result.skipped
        records.append([result.loss, result.grad_norm])
    return records


def trained(engine: Engine) -> Weights:
    return {name: master(p) for name, p in engine.module.named_parameters() if p.requires_grad}


def oracle(plan: Any) -> tuple[list[float], Weights]:
    """Losses and trained weights in float64, on the values of the codes and the samples of both ranks."""
    torch.manual_seed(plan.seed)
    base = load_base_model(plan.model, DTYPES[plan.precision])
    if plan.model.quantization_config is not None:
        base = dequantised(base, torch.float64)
    model, _ = add_adapter(base, plan.adapter)
    model.to(DTYPES[plan.precision]).to(torch.float64).train()  # the adapter begins in the run's precision
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = []
    for step in range(STEPS):
        parts = []
        for rank in range(2):
            ids, targets = samples(step, rank)
            logits = model(input_ids=ids, use_cache=False).logits
            flat = torch.nn.functional.cross_entropy(
                logits[0], targets[0], ignore_index=-100, reduction="sum"
            )
            parts.append(flat)
        loss = sum(parts) / 38  # type: ignore[arg-type]
        assert isinstance(loss, torch.Tensor)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                parameter -= LR * gradient
        losses.append(float(loss))
    return losses, {name: p.detach().flatten().tolist() for name, p in parameters.items()}


def away(found: Weights, expected: Weights, start: Weights) -> float:
    """How far the trained weights ended from the oracle's, as a share of the way they went."""
    assert found.keys() == expected.keys()
    error = sum((a - b) ** 2 for n in found for a, b in zip(found[n], expected[n], strict=True))
    way = sum((a - b) ** 2 for n in found for a, b in zip(expected[n], start[n], strict=True))
    return math.sqrt(error / way)


def codes(engine: Engine | TorchEngine) -> list[int]:
    """A sum over the bytes of each quantised weight that this rank holds."""
    found = []
    for parameter in engine.module.parameters():
        if is_quantised(parameter):
            held = getattr(parameter, "ds_tensor", parameter)
            found.append(int(held.detach().contiguous().view(torch.uint8).long().sum()))
    return found


def run_of(kind: str, precision: str, stage: int) -> dict[str, Any]:
    """Three steps, an evaluation between them, against the oracle."""
    from deepspeed.utils import safe_get_full_fp32_param

    plan = plan_of(kind, precision, stage)
    with engine_of(plan) as engine:
        module = engine.module
        linear = [m for m in module.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
        start, before = trained(engine), codes(engine)
        records = train(engine, 0, 1)
        module.eval()
        with torch.no_grad():
            engine(input_ids=samples(0, RANK)[0], use_cache=False)
        module.train()
        records += train(engine, 1)
        after, end = codes(engine), trained(engine)
        adapter = [p for p in module.parameters() if p.requires_grad]
        held = [p if precision == "fp32" and stage == 0 else safe_get_full_fp32_param(p) for p in adapter]
        found = {
            "losses": [record[0] for record in records],
            "adapter": sorted({str(p.dtype) for p in adapter}),
            "compute": sorted({str(m.compute_dtype) for m in linear}),
            "masters": sorted({str(p.dtype) for p in held}),
            "quantised": len(before),
            "codes_kept": before == after,
            "repacks": sum(getattr(m, "support_avx512bf16_for_cpu", False) for m in module.modules()),
        }
    if RANK != 0:
        return found
    losses, weights = oracle(plan)
    return {**found, "expected": losses, "away": away(end, weights, start)}


def run_without_deepspeed(kind: str, precision: str) -> dict[str, Any]:
    """The same three steps with engine torch."""
    plan = plan_of(kind, precision, 0)
    plan = replace(plan, engine="torch", ds_config={})
    loaded = load_model(plan, load_tokenizer(plan.model, torch.float32))
    settings = TorchSettings(
        precision=plan.precision,
        gradient_accumulation_steps=1,
        gradient_clipping=0.0,
        fp16=Fp16Plan(initial_scale_power=4) if precision == "fp16" else None,
    )
    engine = initialize_torch(
        loaded.model,
        settings,
        lambda _: torch.optim.SGD(loaded.trainable, lr=LR),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        init_world().device,
        allow_emulated_fp16=True,
    )
    adapter = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    start, before = _values(adapter), codes(engine)
    records = train(engine)
    end = _values(adapter)
    found = {
        "losses": [record[0] for record in records],
        "adapter": sorted({str(p.dtype) for p in adapter.values()}),
        "quantised": len(before),
        "codes_kept": before == codes(engine),
        "end": end,
    }
    if RANK != 0:
        return found
    losses, weights = oracle(plan)
    return {**found, "expected": losses, "away": away(end, weights, start)}


def _values(parameters: Mapping[str, torch.Tensor]) -> Weights:
    return {name: p.detach().double().flatten().tolist() for name, p in parameters.items()}


def resumed(kind: str, precision: str, stage: int) -> dict[str, Any]:
    """Four steps straight; two, saved, and two more in a fresh engine: the same bits."""
    plan = plan_of(kind, precision, stage)
    root = OUT / f"{kind}-{precision}-{stage}"
    with engine_of(plan) as engine:
        train(engine, 0, 2)
        save_checkpoint(engine, root, 2, extra={})
        straight, straight_end = train(engine, 2, 4), trained(engine)
    with engine_of(plan) as engine:
        with torch.no_grad():  # as the probe of packed samples does before a checkpoint is loaded
            engine.module(input_ids=samples(0, RANK)[0], use_cache=False)
        load_checkpoint(engine, root)
        again, end = train(engine, 2, 4), trained(engine)
    size = sum(f.stat().st_size for f in root.rglob("*") if f.is_file())
    return {"same": again == straight and end == straight_end, "bytes": size}


def memory_of(kind: str, precision: str, stage: int, threshold: int = 0) -> dict[str, int]:
    """Bytes of the model's states at rest after a step, and what ``dslaunch plan`` says of this rank."""
    plan = plan_of(kind, precision, stage)
    settings = {**plan.ds_config, "zero_optimization": {**plan.ds_config["zero_optimization"]}}
    settings["zero_optimization"]["reduce_bucket_size"] = 2000
    if stage == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    sgd = OptimizerPlan(type="SGD", lr=LR, params={"lr": LR})  # as in settings
    plan = replace(plan, ds_config=settings, optimizer=sgd)
    gc.collect()
    ignore = set(storages(all_tensors()))
    loaded: list[int] = []
    with engine_of(plan, on_load=lambda model: loaded.append(_live(ignore))) as engine:
        train(engine, 0, 1)
        measured = live_bytes(engine, ignore)
    setup = setup_of_run(plan, load_model_facts(MODELS / "untied"))
    items = rank_items(setup, RANK)[0]
    return {
        "measured": measured,
        "planned": rest_size(items),
        "loaded": loaded[0],
        "planned_loaded": size_at([*items, *while_loading(setup, items)], LOADING),
    }


def _live(ignore: set[int]) -> int:
    """Bytes of every storage that some tensor refers to, before there is an engine."""
    gc.collect()
    return sum(size for pointer, size in storages(all_tensors()).items() if pointer not in ignore)


# --- what is refused, done all the same ---------------------------------------------------------------


def fails(kind: str, precision: str, stage: int) -> str:
    try:
        with engine_of(plan_of(kind, precision, stage)) as engine:
            train(engine)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
    return "nothing"


def whole_copies() -> list[bool]:
    """8 bit at stage 3, after a step: whether each layer has a whole copy beside its share."""
    import bitsandbytes

    with engine_of(plan_of("int8", "bf16", 3)) as engine:
        train(engine, 0, 1)
        layers = [m for m in engine.module.modules() if isinstance(m, bitsandbytes.nn.Linear8bitLt)]
        return [m.state.CB.numel() == m.in_features * m.out_features for m in layers]


def losses_of_storage(storage: str) -> list[float]:
    """fp16 with 4-bit weights that are packed in another type."""
    with engine_of(plan_of("nf4", "fp16", 2, storage)) as engine:
        ids, targets = samples(0, RANK)
        loss = token_nll(engine(input_ids=ids, use_cache=False).logits, targets)
        return [float(loss.sum)]


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    # First: what other cases leave for good would count. And bitsandbytes makes its tables once.
    cases["memory/tables"] = lambda: memory_of(*MEMORY[0])
    for memory in MEMORY:
        cases["memory/" + "/".join(map(str, memory))] = lambda m=memory: memory_of(*m)  # type: ignore[misc]
    for cell in RUNS:
        cases["run/" + "/".join(map(str, cell))] = lambda c=cell: run_of(*c)  # type: ignore[misc]
    for kind, precision in TORCH_RUNS:
        cases[f"torch/{kind}/{precision}"] = lambda k=kind, p=precision: run_without_deepspeed(k, p)  # type: ignore[misc]
    for cell in RESUMED:
        cases["resumed/" + "/".join(map(str, cell))] = lambda c=cell: resumed(*c)  # type: ignore[misc]
    cases["fails/qdora/3"] = lambda: fails("qdora", "bf16", 3)
    cases["fails/int8-dora/2"] = lambda: fails("int8-dora", "bf16", 2)
    cases["whole-copies"] = whole_copies
    for storage in ("uint8", "float16", "bfloat16"):
        cases[f"storage/{storage}"] = lambda s=storage: losses_of_storage(s)  # type: ignore[misc]
    return cases


if __name__ == "__main__":
    OUT, MODELS = Path(sys.argv[1]), Path(sys.argv[2])
    run_cases(all_cases(), OUT, RANK)
