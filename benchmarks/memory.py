"""What DeepSpeed really allocates, against the formulas of ``dslaunch plan``.

    python benchmarks/memory.py [--world-size 2] [--all | --nvme] [--json FILE]

Trains a small random Llama of odd sizes for two steps in each case (ZeRO stage x full, LoRA or QLoRA x
precision x accumulation x offload) on CPU ranks, and compares four moments with the plan of the very rank:
at rest, after the last backward pass, at the entry of the optimizer, and the highest point of the step.
The first three walk all live storages; the last comes from the allocator's own events. Without ``--all``:
the cases that the tests run. Exits 1 where one differs by more than 1 %.

The ranks of a case run this file with ``--worker DIR``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_LOG_LEVEL", "error")

TOLERANCE = 0.01
MOMENTS = ("rest", "after backward", "optimizer entry", "step peak")
BUCKET, THRESHOLD, R = 20_000, 500, 3
NVME_BUFFER, NVME_IN_CPU = 1_500_000, 0
STEPS = 2


@dataclass(frozen=True)
class Case:
    """One way to run the small model."""

    stage: int
    method: str = "full"
    precision: str = "bf16"
    accumulation: int = 1
    offload: str = ""  # "optimizer", or "optimizer+param"
    nvme: str = (
        ""  # the parts of these that go to a disk; the model is larger then, as small tensors never go
    )
    tied: bool = False
    sub_group_size: int = 1_000_000_000
    bucket: int = 20_000
    hpz: int = 1
    ratio: float = 1.0  # of offload_optimizer, stage 3: the part of the sub-groups that goes to the host
    engine: str = "deepspeed"
    optimizer: str = "AdamW"
    task: str = "sft"  # "dpo" has a frozen reference beside it, "ppo" a reward model and a critic as well

    @property
    def name(self) -> str:
        shards = "torch" if self.engine == "torch" else f"z{self.stage}"
        parts = [shards, self.method, self.precision, f"gas{self.accumulation}", self.offload]
        parts += [self.optimizer] if self.optimizer != "AdamW" else []
        parts += ["tied"] if self.tied else []
        parts += [f"nvme:{self.nvme}"] if self.nvme else []
        parts += [self.task] if self.task != "sft" else []
        parts += [f"bucket{self.bucket}"] if self.bucket != BUCKET else []
        parts += [f"group{self.sub_group_size}"] if self.sub_group_size < 1_000_000_000 else []
        parts += [f"hpz{self.hpz}"] if self.hpz > 1 else []
        parts += [f"ratio{self.ratio}"] if self.ratio < 1 else []
        return " ".join(filter(None, parts))


def nvme_cases() -> Iterator[Case]:
    """What is offloaded to a disk: needs libaio and its headers, and DeepSpeed compiles an op for minutes."""
    for group in (1_000_000_000, 700_000):
        yield Case(3, offload="optimizer", nvme="optimizer", sub_group_size=group)
        yield Case(3, offload="optimizer", nvme="optimizer", sub_group_size=group, accumulation=2)
        for nvme in ("param", "optimizer+param"):
            yield Case(3, offload="optimizer+param", nvme=nvme, sub_group_size=group)
    yield Case(3, "lora", offload="optimizer+param", nvme="optimizer+param")
    yield Case(3, precision="fp32", offload="optimizer+param", nvme="optimizer+param")


def cases(everything: bool) -> Iterator[Case]:
    """The matrix. Without ``everything``: stages x {full, LoRA} x accumulation in bf16, and some more."""
    for stage in range(4):
        for method in ("full", "lora"):
            for accumulation in (1, 2):
                yield Case(stage, method, accumulation=accumulation)
    yield Case(2, precision="fp32")
    yield Case(2, offload="optimizer")
    yield Case(3, offload="optimizer+param", sub_group_size=20_000)
    for method in ("full", "lora"):
        yield Case(3, method, hpz=2)
    yield Case(3, offload="optimizer", sub_group_size=20_000, ratio=0.3)
    for stage in (2, 3):
        yield Case(stage, task="dpo")
        yield Case(stage, task="ppo")
    for method in ("full", "lora"):
        yield Case(0, method, engine="torch", accumulation=2)
    yield Case(0, engine="torch", precision="fp32")
    yield Case(0, precision="fp32", optimizer="Adafactor")
    yield Case(2, optimizer="AdEMAMix")
    yield Case(3, optimizer="AdamW8bit")
    for stage in (2, 3):
        yield Case(stage, optimizer="Muon")
    if not everything:
        return
    for optimizer in ("SGD", "Lion", "AdEMAMix", "AdamW8bit"):
        yield Case(0, precision="fp32", optimizer=optimizer)
        for stage in (1, 2, 3):
            yield Case(stage, optimizer=optimizer)
        yield Case(2, optimizer=optimizer, offload="optimizer")
        yield Case(0, optimizer=optimizer, engine="torch")
    for stage in range(4):
        yield Case(stage, precision="fp32", optimizer="Muon")
        low = "bf16" if stage else "fp32"  # bf16 at stage 0 is stage 1 under dslaunch
        yield Case(stage, "lora", low, optimizer="Muon", accumulation=2)
    yield Case(1, optimizer="Muon", tied=True)
    yield Case(3, optimizer="Muon", sub_group_size=20_000)
    yield Case(0, engine="torch", tied=True)
    yield Case(0, "lora", engine="torch", precision="fp32")
    for stage in (0, 2, 3):
        for accumulation in (1, 2):
            yield Case(stage, "qlora", accumulation=accumulation)
    yield Case(3, sub_group_size=20_000)
    for ratio, group in ((0.75, 20_000), (0.5, 30_000), (0.9, 1_000_000_000), (0.0, 20_000)):
        yield Case(3, offload="optimizer", sub_group_size=group, ratio=ratio)
    yield Case(3, "lora", offload="optimizer", sub_group_size=500, ratio=0.6)
    yield Case(3, precision="fp32", offload="optimizer", sub_group_size=20_000, ratio=0.6, accumulation=2)
    for stage in (1, 3):
        yield Case(stage, offload="optimizer")
    for stage in range(4):
        if stage != 2:
            yield Case(stage, precision="fp32")
        yield Case(stage, precision="fp32", accumulation=3)
        yield Case(stage, "lora", precision="fp32")
        yield Case(stage, tied=True, precision="fp32")
        yield Case(stage, precision="fp16")
        yield Case(stage, precision="fp16", accumulation=2)
    for stage in (1, 2, 3):
        yield Case(stage, accumulation=2, offload="optimizer")
        yield Case(stage, "lora", offload="optimizer")
        yield Case(stage, "lora", accumulation=2, offload="optimizer")
        yield Case(stage, "qlora", offload="optimizer")
        yield Case(stage, precision="fp32", accumulation=2, offload="optimizer")
        yield Case(stage, precision="fp32", offload="optimizer")


# --- one rank -----------------------------------------------------------------------------------


def model_config(case: Case) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=1009 if not case.nvme else 8009,
        hidden_size=60 if not case.nvme else 180,
        intermediate_size=151,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=case.tied,
    )


def ds_config(case: Case) -> dict[str, Any]:
    """The DeepSpeed JSON as ``gen-config`` writes it, with a bucket that suits the size of the model."""
    zero: dict[str, Any] = {"stage": case.stage, "reduce_bucket_size": case.bucket}
    if case.stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": THRESHOLD,
            "stage3_prefetch_bucket_size": BUCKET,
            "sub_group_size": case.sub_group_size,
        }
    if case.hpz > 1:
        zero["zero_hpz_partition_size"] = case.hpz
    for part in filter(None, case.offload.split("+")):
        zero[f"offload_{part}"] = {"device": "cpu", "pin_memory": False}
        if part == "optimizer" and case.ratio < 1:
            zero["offload_optimizer"]["ratio"] = case.ratio
        if part in case.nvme.split("+"):
            zero[f"offload_{part}"] |= {"device": "nvme", "nvme_path": str(Path(tempfile.gettempdir()))}
    if "param" in case.nvme:
        # DeepSpeed 0.19.8 fails where it prefetches a tensor that is on its way already:
        # "param 29 already assigned swap buffer id 3" (partitioned_param_swapper.py).
        zero["stage3_prefetch_bucket_size"] = 0
        zero["offload_param"] |= {"buffer_count": 5, "buffer_size": NVME_BUFFER, "max_in_cpu": NVME_IN_CPU}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
    }
    plan = optimizer_plan(case)
    if plan.made_by == "deepspeed":
        config["optimizer"] = {"type": plan.type, "params": dict(plan.params)}
    if case.precision != "fp32":
        config[case.precision] = {"enabled": True}
    if accumulates_in_fp32(case):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def optimizer_plan(case: Case) -> Any:
    """As a run file's is resolved for CPUs; SGD with momentum."""
    from dslaunch.config.optimizer import KINDS
    from dslaunch.core.plan import OptimizerPlan

    kind = KINDS[case.optimizer]
    params = {key: value for key, value in kind.defaults.items() if value is not None} | {"lr": 1e-4}
    params |= {"momentum": 0.9} if case.optimizer == "SGD" else {}
    ours = kind.ours or case.optimizer == "Lion" or case.engine == "torch"
    if case.optimizer == "AdamW" and not ours and case.ratio == 1:
        params["torch_adam"] = True
    made_by = "dslaunch" if ours else "deepspeed"
    return OptimizerPlan(type=case.optimizer, lr=1e-4, params=params, made_by=made_by)


def accumulates_in_fp32(case: Case) -> bool:
    return case.precision == "bf16" and case.accumulation > 1 and case.stage > 0


def build_model(case: Case) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(model_config(case))
    if case.method == "qlora":
        model = quantised(model)
    if case.method != "full":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(task_type="CAUSAL_LM", r=R, target_modules="all-linear")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model.train()


def other_engines(case: Case) -> list[Any]:
    """The other models of the task, as a script keeps them: engines, or plain modules below stage 3."""
    import deepspeed

    if case.task == "sft":
        return []
    found = [frozen_model(case, value_head=False)]
    if case.task == "ppo":
        critic = value_model(case)
        found.append(frozen_model(case, value_head=True))
        found.append(deepspeed.initialize(model=critic, config=ds_config(case))[0])
    return found


def frozen_model(case: Case, *, value_head: bool) -> Any:
    """A model in evaluation: at stage 3 in an engine without optimizer, else in 16 bit as it is."""
    import deepspeed
    import torch

    model = value_model(case) if value_head else build_model(case)
    model = model.eval().requires_grad_(False).to(torch.bfloat16)
    if case.stage < 3:
        return model
    config = {key: value for key, value in ds_config(case).items() if key != "optimizer"}
    return deepspeed.initialize(model=model, config=config)[0]


def value_model(case: Case) -> Any:
    from transformers import LlamaForSequenceClassification

    config = model_config(case)
    config.num_labels, config.pad_token_id = 1, 0
    return LlamaForSequenceClassification(config).train()


def quantised(model: Any) -> Any:
    """The same model with its linear layers in NF4 with double quantisation, loaded as users load it."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        model.should_save_on_this_rank = lambda is_main_process: True  # transformers 5 writes on rank 0 alone
        model.to(torch.bfloat16).save_pretrained(folder)
        del model
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4, dtype=torch.bfloat16)


def live_bytes(engine: Any, ignore: set[int]) -> int:
    """Bytes of every storage that some tensor in this process still refers to, once each."""
    time.sleep(0.1)  # gloo's threads let go of the buffers of a finished reduction a moment later
    gc.collect()
    grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
    found = storages([*all_tensors(), *grads])
    return sum(size for pointer, size in found.items() if pointer not in ignore)


def all_tensors() -> list[Any]:
    import torch

    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


def storages(tensors: list[Any]) -> dict[int, int]:
    """Address -> bytes of every storage behind ``tensors``."""
    found: dict[int, int] = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = max(found.get(storage.data_ptr(), 0), storage.nbytes())
        except (NotImplementedError, RuntimeError):  # meta, fake and wrapper tensors hold nothing
            continue
    found.pop(0, None)
    return found


def measure(case: Case, *, repeats: int = 1) -> dict[str, int]:
    """Bytes at each of MOMENTS on this rank.

    ``repeats``: steps of which the lowest peak counts. On a busy machine a thread of gloo may
    let go of a gathered parameter only when the next one is there already.
    """
    import deepspeed
    import torch
    from torch.profiler import record_function

    from dslaunch.train.engine.muon import place_muon, take_muon
    from dslaunch.train.optimizers import build_optimizer

    gc.collect()
    gc.freeze()  # what is here already is neither walked nor counted: each walk is then short
    ignore = set(storages(all_tensors()))
    with memory_events() as events:
        model = build_model(case)
        trained = [p for p in model.parameters() if p.requires_grad]
        if case.engine == "torch":
            engine = torch_engine(case, model)
        else:
            with device_apart(case):
                config, muon, _ = take_muon(ds_config(case), model)
                engine = deepspeed.initialize(
                    model=model,
                    config=config,
                    optimizer=muon or build_optimizer(optimizer_plan(case), model),
                    model_parameters=trained,
                )[0]
                place_muon(engine)
        others = other_engines(case)
        ids = torch.arange(16).unsqueeze(0)
        ignore.add(ids.untyped_storage().data_ptr())
        seen: dict[str, int] = {}
        inner = engine.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        stepped = inner.step

        def at_entry(*args: Any, **kwargs: Any) -> Any:
            seen["optimizer entry"] = max(seen.get("optimizer entry", 0), live_bytes(engine, ignore))
            return stepped(*args, **kwargs)

        train_critic(others)
        for step in range(STEPS):
            run_passes(engine, case, ids)
            seen["after backward"] = live_bytes(engine, ignore)
            if step == STEPS - 1:  # the states are made in the first step: the second is the one that counts
                inner.step = at_entry
            engine.step()
        inner.step = stepped
        seen["rest"] = live_bytes(engine, ignore)
        if case.ratio < 1:
            seen |= states_by_side(engine.optimizer)
        before = []
        for step in range(repeats):
            with record_function(f"dslaunch passes {step}"):
                run_passes(engine, case, ids)
            before.append(live_bytes(engine, ignore))
            with record_function(f"dslaunch peak {step}"), waiting_for_gloo():
                engine.step()
    peaks = [bytes_ + growth_in(events, f"dslaunch peak {step}") for step, bytes_ in enumerate(before)]
    passes = [seen["rest"] + growth_in(events, f"dslaunch passes {step}") for step in range(repeats)]
    seen["step peak"] = min(peaks)
    seen["highest"] = min(map(max, zip(peaks, passes, strict=True)))
    for part in (engine, *others):
        if hasattr(part, "destroy"):
            part.destroy()
    return seen


@contextlib.contextmanager
def waiting_for_gloo() -> Iterator[None]:
    """Lets gloo's threads let go of what Muon has reduced before the next matrix is there."""
    import torch

    reduce = torch.distributed.all_reduce

    def and_wait(*args: Any, **kwargs: Any) -> Any:
        work = reduce(*args, **kwargs)
        time.sleep(0.05)
        return work

    torch.distributed.all_reduce = and_wait
    try:
        yield
    finally:
        torch.distributed.all_reduce = reduce


@contextlib.contextmanager
def device_apart(case: Case) -> Iterator[None]:
    """Where a part of the sub-groups stays on the device: lets DeepSpeed tell the device from the host.

    On CPUs both are called cpu; here the device is cpu:0, which is the same memory. DeepSpeed takes
    its CPU Adam alone for this, whose kernel (it allocates nothing) need not be compiled: torch does the sum.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import CPUAdamBuilder

    if case.ratio == 1:
        yield
        return
    accelerator, load = get_accelerator(), CPUAdamBuilder.load
    accelerator._name, CPUAdamBuilder.load = "cpu:0", lambda self, verbose=False: AdamInTorch()
    try:
        yield
    finally:
        accelerator._name, CPUAdamBuilder.load = "cpu", load


class AdamInTorch:
    """The calls of DeepSpeed's cpu_adam op, in place and without a temporary."""

    def create_adam(self, *args: Any) -> None: ...

    def destroy_adam(self, *args: Any) -> None: ...

    def adam_update(self, number: int, step: int, lr: float, b1: float, b2: float, *args: Any) -> None:
        *_, weights, gradient, mean, square = args
        mean.lerp_(gradient, 1 - b1)
        square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        weights.addcdiv_(mean, gradient.copy_(square).sqrt_().add_(1e-8), value=-lr)


def states_by_side(optimizer: Any) -> dict[str, int]:
    """Bytes of states in DeepSpeed's own assignment of sub-groups to device and host."""
    found = {"states on the device": 0, "states in the host": 0}
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        in_host = optimizer.subgroup_to_device[number] == "cpu"
        updating = optimizer.optimizer if in_host else optimizer.backup_optimizer
        states = [value for value in updating.state[master].values() if getattr(value, "ndim", 0)]
        side = "states in the host" if in_host else "states on the device"
        found[side] += sum(storages([master, master.grad, *states]).values())
    return found


def run_passes(engine: Any, case: Case, ids: Any) -> None:
    """The forward and backward passes of one step, up to the step itself."""
    for left in reversed(range(case.accumulation)):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        if left:
            engine.step()


def torch_engine(case: Case, model: Any) -> Any:
    """The engine without DeepSpeed, its weights as the worker loads them."""
    import torch

    from dslaunch.train.dist import init_world
    from dslaunch.train.engine import TorchSettings, initialize_torch
    from dslaunch.train.optimizers import build_optimizer

    if case.method != "full" and case.precision == "bf16":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    settings = TorchSettings(
        precision=case.precision,  # type: ignore[arg-type]
        gradient_accumulation_steps=case.accumulation,
        gradient_clipping=1.0,
    )
    return initialize_torch(
        model,
        settings,
        build_optimizer(optimizer_plan(case), model),
        lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0),
        init_world().device,
    )


def train_critic(others: list[Any]) -> None:
    """One step, in which its optimizer's states are made."""
    import torch

    for part in others:
        if getattr(part, "optimizer", None) is not None and part.module.training:
            values = part(input_ids=torch.arange(16).unsqueeze(0)).logits
            part.backward(values.float().sum())
            part.step()


@contextlib.contextmanager
def memory_events() -> Iterator[list[Any]]:
    """Every allocation, release and marked block of the ``with`` block, in the list once it is left.

    torch.profiler.profile would do, but spends seconds on tables that nobody reads here.
    """
    import torch.autograd as autograd
    from torch._C._profiler import ProfilerActivity, _ExperimentalConfig

    config = autograd.ProfilerConfig(
        autograd.ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig()
    )
    events: list[Any] = []
    autograd._prepare_profiler(config, {ProfilerActivity.CPU})
    autograd._enable_profiler(config, {ProfilerActivity.CPU})
    try:
        yield events
    finally:
        events += autograd._disable_profiler().events()


def growth_in(events: list[Any], mark: str) -> int:
    """How far the allocated bytes rose above where they were when the block named ``mark`` began."""
    block = next(e for e in events if e.name() == mark)
    begin, end = block.start_ns(), block.start_ns() + block.duration_ns()
    inside = [e for e in events if e.name() == "[memory]" and begin <= e.start_ns() <= end]
    current = highest = 0
    for event in sorted(inside, key=lambda e: e.start_ns()):
        current += event.nbytes()
        highest = max(highest, current)
    return highest


def setup_of(case: Case, world_size: int) -> Any:
    from dslaunch.config.memory.adapter import adapter_tensors
    from dslaunch.config.memory.architectures import dimensions, parameters
    from dslaunch.config.memory.of_run import cost_of
    from dslaunch.config.memory.setup import NF4, Setup, ZeroOptions, frozen_tensors
    from dslaunch.config.memory.tensors import ModelFacts

    config, plan = model_config(case).to_dict(), optimizer_plan(case)
    facts = ModelFacts(parameters(config) or (), dimensions(config), "config")
    full, e = case.method == "full", 4 if case.precision == "fp32" else 2

    def where(part: str) -> Any:
        return None if part not in case.offload else "nvme" if part in case.nvme else "cpu"

    return Setup(
        model=facts,
        trainable=facts.tensors if full else adapter_tensors(facts, r=R),
        frozen=()
        if full
        else frozen_tensors(facts, bytes_each=e, quantization=NF4 if case.method == "qlora" else None),
        method=case.method,  # type: ignore[arg-type]
        engine=case.engine,  # type: ignore[arg-type]
        autocast=case.engine == "torch" and case.precision != "fp32",
        precision="fp32" if case.engine == "torch" else case.precision,  # type: ignore[arg-type]
        zero_stage=case.stage,
        zero=ZeroOptions(
            reduce_bucket_size=case.bucket,
            sub_group_size=case.sub_group_size,
            hpz_partition_size=case.hpz,
            stage3_param_persistence_threshold=THRESHOLD,
            offload_optimizer=where("optimizer"),
            offload_param=where("param"),
            optimizer_ratio=case.ratio,
            param_buffer_size=NVME_BUFFER,
            max_in_cpu=NVME_IN_CPU,
        ),
        world_size=world_size,
        ranks_per_host=world_size,
        micro_batch=1,
        accumulation=case.accumulation,
        max_length=16,
        grad_accum_fp32=accumulates_in_fp32(case),
        optimizer=cost_of(plan.type, plan.params, "cpu", ours=plan.made_by == "dslaunch"),
        device_type="cpu",
        task=case.task,  # type: ignore[arg-type]
    )


def advised(case: Case, world_size: int) -> tuple[Case, int] | None:
    """(the case as ``dslaunch plan`` proposes to change it, bytes that this takes off the peak)."""
    from dslaunch.config.memory.planner import plan_memory
    from dslaunch.config.memory.surprises import surprises

    setup = setup_of(case, world_size)
    for surprise in surprises(setup, plan_memory(setup)):
        if surprise.setting:
            key, value = surprise.setting
            assert key == "zero_optimization.reduce_bucket_size"
            return dataclasses.replace(case, bucket=value), surprise.saves
    return None


def planned(case: Case, world_size: int, rank: int) -> dict[str, int]:
    """What the plan says for the same moments."""
    from dslaunch.config.memory.items import CONVERT, UPDATE, rest_size, size_at
    from dslaunch.config.memory.offload import rank_items
    from dslaunch.config.memory.roles import with_other_models
    from dslaunch.config.memory.states import SECOND_COPY

    setup = setup_of(case, world_size)
    items, host = with_other_models(setup, *rank_items(setup, rank))
    rest = rest_size([*items, *host])
    if case.task != "sft":
        return {"rest": rest}
    if case.ratio < 1:
        return {"rest": rest, **planned_by_side(setup, rank)}
    if case.offload:
        # On a CPU both sides of an offload are one memory: only their sum can be told.
        both = [*items, *host]
        return {"rest": rest, "step peak": max(size_at(both, CONVERT), size_at(both, UPDATE))}
    waiting = [i for i in items if i.name in ("gradients", SECOND_COPY) and "always" not in i.when]
    idle = dataclasses.replace(setup, optimizer=without_temporaries(setup.optimizer))
    entry = [i for i in rank_items(idle, rank)[0] if i.name != "optimizer's temporaries"]
    return {
        "rest": rest,
        "after backward": rest + sum(item.size for item in waiting),
        "optimizer entry": size_at(entry, UPDATE),
        "step peak": max(size_at(items, CONVERT), size_at(items, UPDATE)),
    }


def without_temporaries(cost: Any) -> Any:
    """What an optimizer needs where its step is entered, and no more."""
    matrices = cost.matrices and without_temporaries(cost.matrices)
    return dataclasses.replace(cost, temporary=0, orthogonal=False, matrices=matrices)


def planned_by_side(setup: Any, rank: int) -> dict[str, int]:
    """What the plan for a GPU says of the states that DeepSpeed assigns by sub-groups."""
    from dslaunch.config.memory.items import rest_size
    from dslaunch.config.memory.offload import rank_items

    names = ("fp32 master weights", "optimizer states", "fp32 gradients")
    sides = rank_items(dataclasses.replace(setup, device_type="cuda"), rank)
    sizes = [rest_size(item for item in side if item.name in names) for side in sides]
    return dict(zip(("states on the device", "states in the host"), sizes, strict=True))


ADVISED = (
    Case(1, "lora", bucket=2_000_000),
    Case(2, "lora", bucket=2_000_000),
    Case(3, "lora", bucket=2_000_000),
)


def measure_advice(world_size: int) -> Iterator[tuple[str, dict[str, dict[str, int]]]]:
    """How far the peak falls where what ``dslaunch plan`` proposes is done, and how far it says."""
    for case in ADVISED:
        change = advised(case, world_size)
        assert change is not None, f"{case.name}: nothing is proposed"
        changed, saves = change
        fallen = measure(case, repeats=4)["highest"] - measure(changed, repeats=4)["highest"]
        yield f"{case.name} -> {changed.name}", {"measured": {"saved": fallen}, "planned": {"saved": saves}}


def worker(out: Path, everything: bool, only: str, nvme: bool) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    get_accelerator().is_fp16_supported = lambda: True  # emulated: only sizes matter here
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {}
    for case in nvme_cases() if nvme else cases(everything):
        if only and only not in case.name:
            continue
        results[case.name] = {
            "measured": measure(case),
            "planned": planned(case, world_size, rank),
        }
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # hpZ's: the next engine would take it for its own
        gc.collect()
        (out / f"rank-{rank}.json").write_text(json.dumps(results))
    if not nvme and (not only or only == "advice"):
        results |= measure_advice(world_size)
        (out / f"rank-{rank}.json").write_text(json.dumps(results))


# --- all ranks ----------------------------------------------------------------------------------


def run(world_size: int, everything: bool, only: str, nvme: bool = False) -> list[dict[str, Any]]:
    """Every rank's results, in rank order."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            sys.executable,
            __file__,
            "--worker",
            folder,
            "--only",
            only,
            *(["--all"] if everything else []),
            *(["--nvme"] if nvme else []),
        ]
        base = {**os.environ, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        base |= {"TMPDIR": folder}  # what is offloaded to a disk
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(argv, env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world_size)
        ]
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                time.sleep(0.2)
            codes = [rank.poll() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def differences(results: list[dict[str, Any]]) -> Iterator[tuple[str, int, str, int, int, float]]:
    """(case, rank, moment, measured, planned, relative difference) of everything that was compared."""
    for rank, by_case in enumerate(results):
        for name, found in by_case.items():
            for moment, plan in found["planned"].items():
                real = found["measured"][moment]
                yield name, rank, moment, real, plan, (plan - real) / max(real, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="the larger matrix")
    parser.add_argument("--nvme", action="store_true", help="the cases with offload to a disk alone")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--json", type=Path, help="write every number here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.all, args.only, args.nvme)
        return 0
    started = time.monotonic()
    results = run(args.world_size, args.all, args.only, args.nvme)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    worst: dict[str, float] = {}
    print(f"{'case':<34} rank  {'moment':<16} {'measured':>12} {'planned':>12}  difference")
    for name, rank, moment, real, plan, off in differences(results):
        worst[moment] = max(worst.get(moment, 0.0), abs(off))
        if rank == 0 or abs(off) > TOLERANCE:
            flag = "  <-- more than 1 %" if abs(off) > TOLERANCE else ""
            print(f"{name:<34} {rank:>4}  {moment:<16} {real:>12,} {plan:>12,}  {100 * off:+.3f} %{flag}")
    print("\nlargest difference: " + ", ".join(f"{m} {100 * w:.3f} %" for m, w in worst.items()))
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    return int(any(w > TOLERANCE for w in worst.values()))


if __name__ == "__main__":
    sys.exit(main())
