"""The ranks of test_fp32_modules.py: ``python -m tests.train.ranks_fp32_modules OUT_DIR [all]``.

The suite runs a cover of the cases, which takes a third of the time of ``all``.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers.integrations import HfDeepSpeedConfig

from dslaunch.core.plan import ModelPlan, RunPlan
from dslaunch.train.checkpoint import find_whole_checkpoint, restore_checkpoint, save_checkpoint
from dslaunch.train.dist import init_world, shutdown
from dslaunch.train.engine import Engine, initialize
from dslaunch.train.engine.cures import permit_emulated_fp16
from dslaunch.train.fp32_modules import set_dtypes
from dslaunch.train.model import DTYPES, LoadedModel, load_base_model, load_model, load_tokenizer
from dslaunch.train.quiet import quiet_libraries
from tests.support.plans import LORA, make_plan
from tests.support.tiny import make_tiny_model_dir
from tests.train import rotary_models
from tests.train.rank_cases import RANK, Case, bare_deepspeed, config, run_cases

PATTERNS = ("*norm*", "lm_head")
SUITE = (
    "update/0 bf16 accumulation", "update/1 fp16 offload", "update/2 fp16 tied", "update/3 bf16 offload",
    "update/3 fp16 sub-groups", "resume/0 bf16", "resume/3 fp16", "lora/3",
    *(f"rotary/{name}" for name in rotary_models.NAMES), "upstream",
)  # fmt: skip
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 10}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SGD = {"type": "SGD", "params": {"lr": 1e-2}}  # its update is the gradient: nothing hides an error in it


def cases(root: Path, everything: bool) -> dict[str, Case]:
    """Stage x precision, with what else changes DeepSpeed's classes and buffers spread over them."""
    kinds: dict[str, tuple[int, str, dict[str, Any]]] = {
        "0 bf16 accumulation": (0, "bf16", {"accumulation": 2}),
        "0 fp16": (0, "fp16", {}),
        "1 bf16 fp32 sums": (1, "bf16", {"accumulation": 2, "data_types": {"grad_accum_dtype": "fp32"}}),
        "1 fp16 offload": (1, "fp16", {"zero_optimization": OFFLOAD}),
        "2 bf16 overlap": (2, "bf16", {"zero_optimization": {"overlap_comm": True}}),
        "2 fp16 tied": (2, "fp16", {"tie": True}),
        "3 bf16": (3, "bf16", {}),
        "3 bf16 offload": (
            3,
            "bf16",
            {"zero_optimization": {**OFFLOAD, "stage3_param_persistence_threshold": 0}},
        ),
        "3 bf16 tied": (3, "bf16", {"tie": True}),
        "3 fp16 sub-groups": (
            3,
            "fp16",
            {"zero_optimization": {"sub_group_size": 3000}, "model": {"gradient_checkpointing": True}},
        ),
    }
    found: dict[str, Case] = {}
    for name, (stage, precision, settings) in kinds.items():
        found[f"update/{name}"] = lambda s=stage, p=precision, o=settings: updates(root, s, p, **o)
    for stage, precision in ((0, "bf16"), (1, "fp16"), (2, "bf16"), (3, "fp16")):
        found[f"resume/{stage} {precision}"] = lambda s=stage, p=precision: resumes(root, s, p)
    for stage in (1, 3):
        found[f"lora/{stage}"] = lambda s=stage: adapters(root, s)
    for name in rotary_models.NAMES:
        found[f"rotary/{name}"] = lambda n=name: rotary(root, n)
    found["upstream"] = upstream
    return found if everything else {name: found[name] for name in SUITE}


def updates(root: Path, stage: int, precision: str, **settings: Any) -> dict[str, Any]:
    """Three steps against float64: what is fp32, what forward saw, and how far the updates are off."""
    plan = _plan(root, stage, precision, optimizer=SGD, zero_allow_untested_optimizer=True, **settings)
    accumulation = plan.batch.gradient_accumulation_steps
    file = _load_file(plan)
    with _engine(plan) as (engine, loaded):
        assert loaded.fp32 is not None
        start = _values(loaded.model)
        seen = _first_forward(engine, loaded)
        for step in range(3):
            for micro in range(accumulation):
                engine.backward(_loss(engine, _ids(step * accumulation + micro, RANK)))
                engine.step()
        here, masters = _values(loaded.model), _masters(loaded.model)
        dtypes = {name: str(p.dtype) for name, p in loaded.model.named_parameters()}
        wide = [name for name, p in loaded.model.named_parameters() if p in loaded.fp32.parameters]
        after = float(_loss(engine, _ids(0, RANK)))
        tables = _rotary_errors(loaded.model, rotary_models.plain(16, 10000.0))
    # The weights as loaded, those of PATTERNS exactly as in the file.
    reference = _rounded(file, DTYPES[precision], wide)
    exact = {name: bool(torch.equal(start[name].double(), p)) for name, p in reference.named_parameters()}
    moved = _reference_steps(reference, accumulation)
    return {
        "wide": wide,
        "dtypes": dtypes,
        "starts exactly": all(exact[name] for name in wide),
        "forward": seen,
        "is master": all(torch.equal(here[name], masters[name]) for name in wide),
        "not 16-bit": all(not torch.equal(here[n], here[n].to(DTYPES[precision]).float()) for n in wide),
        "update error": {n: _relative(masters[n].double() - start[n].double(), moved[n]) for n in wide},
        "other errors": {
            n: _relative(masters[n].double() - start[n].double(), moved[n]) for n in masters if n not in wide
        },
        "loss": after,
        "rotary": tables,
    }


def resumes(root: Path, stage: int, precision: str) -> dict[str, Any]:
    """Losses of steps 2 to 4 straight on, and after saving at 2 and loading into a fresh engine."""
    plan = _plan(root, stage, precision)
    folder = root / f"checkpoints-{precision}-{stage}"
    with _engine(plan) as (engine, _):
        _train(engine, 0, 2)
        save_checkpoint(engine, folder, 2, extra={})
        straight = _train(engine, 2, 4)
    with _engine(replace(plan, seed=8)) as (engine, loaded):
        path = find_whole_checkpoint(folder)
        assert path is not None and loaded.fp32 is not None
        restore_checkpoint(engine, path)
        dtypes = {str(p.dtype) for p in loaded.fp32.parameters}
        resumed = _train(engine, 2, 4)
    return {"straight": straight, "resumed": resumed, "dtypes": sorted(dtypes)}


def adapters(root: Path, stage: int) -> dict[str, Any]:
    """LoRA on attention and head, with fp32 norms that are frozen: dtypes and gradients."""
    lora = replace(LORA, target_modules=("q_proj", "lm_head"))
    plan = replace(_plan(root, stage, "bf16"), adapter=lora)
    file = dict(_load_file(plan).named_parameters())
    with _engine(plan) as (engine, loaded):
        dtypes = {name: str(p.dtype) for name, p in loaded.model.named_parameters()}
        before = _masters(loaded.model, trained_only=True)
        values = _values(loaded.model)
        _train(engine, 0, 2)
        after = _masters(loaded.model, trained_only=True)
        frozen = _values(loaded.model)
    moved = {name: not torch.equal(before[name], after[name]) for name in before}
    kept = {n: bool(torch.equal(v, frozen[n])) for n, v in values.items() if n not in before}
    norms = [n for n in kept if "norm" in n]
    exact = all(torch.equal(values[n].double(), file[n.removeprefix("base_model.model.")]) for n in norms)
    return {"dtypes": dtypes, "moved": moved, "kept": kept, "norms are the file's": exact}


def upstream() -> dict[str, Any]:
    """Bare DeepSpeed with a norm in fp32: what is left of it, and what stage 3 says of two dtypes."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16(), torch.nn.LayerNorm(4))
    with bare_deepspeed(model, config(2, "bf16")):
        dtypes = sorted({str(p.dtype) for p in model.parameters()})
    with deepspeed.zero.Init(config_dict_or_path=config(3, "bf16")):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    set_dtypes(model, torch.bfloat16, model[1].parameters())
    raised = None
    try:
        with bare_deepspeed(model, config(3, "bf16")):
            pass
    except AssertionError as error:
        raised = type(error).__name__
    return {"after stage 2": dtypes, "stage 3": raised}


def rotary(root: Path, name: str) -> dict[str, list[float]]:
    """precision and stage -> how far the rotary tables of a loaded model are off the formula, relatively."""
    found: dict[str, list[float]] = {}
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for stage in (2, 3):
            gc.collect()
            settings = {"zero_optimization": {"stage": 3}, precision: {"enabled": True}}
            keep = (
                HfDeepSpeedConfig({**settings, "train_micro_batch_size_per_gpu": 1}) if stage == 3 else None
            )
            model = load_base_model(ModelPlan(path=str(root / name), kind="directory"), dtype)
            found[f"{precision} {stage}"] = _rotary_errors(model, rotary_models.expected(name))
            del keep, model
    return found


def _rotary_errors(model: Any, expected: torch.Tensor) -> list[float]:
    tables = [b for name, b in model.named_buffers() if name.endswith("inv_freq")]
    assert tables
    return [float(((table.double() - expected) / expected).abs().max()) for table in tables]


@contextlib.contextmanager
def _engine(plan: RunPlan) -> Iterator[tuple[Engine, LoadedModel]]:
    gc.collect()  # the ZeRO-3 config of one plan must not outlive it
    loaded = load_model(plan, load_tokenizer(plan.model, DTYPES[plan.precision]))
    assert loaded.fp32 is not None
    with loaded.fp32.admitted():
        engine = initialize(
            loaded.model,
            dict(plan.ds_config),
            model_parameters=loaded.fp32.groups(loaded.trainable),
            allow_emulated_fp16=True,
            on_note=lambda text: None,
        )
    try:
        yield engine, loaded
    finally:
        engine.deepspeed.destroy()


def _plan(root: Path, stage: int, precision: str, **settings: Any) -> RunPlan:
    model_dir = root / ("tied" if settings.pop("tie", False) else "model")
    accumulation = settings.pop("accumulation", 1)
    model = settings.pop("model", {})
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    config = {**(FP16 if precision == "fp16" else {}), "gradient_clipping": 0.0, **settings}
    config["zero_optimization"] = {**zero, **settings.get("zero_optimization", {})}
    plan = make_plan(
        root / "run", model_dir, root / "none", zero_stage=stage, precision=precision, micro=1,
        accumulation=accumulation, ds_config=config, model=model,
    )  # fmt: skip
    return replace(plan, fp32_modules=PATTERNS)


def _ids(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 260, (1, 12), generator=generator)


def _loss(forward: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = forward(input_ids=ids, use_cache=False).logits
    assert logits.dtype in (torch.float32, torch.float64)  # the head's own, not rounded to 16 bit
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])


def _train(engine: Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = _loss(engine, _ids(step, RANK))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _first_forward(engine: Engine, loaded: LoadedModel) -> dict[str, Any]:
    """Of each fp32 module: whether its output is that of fp32 arithmetic with its fp32 weights."""
    assert loaded.fp32 is not None
    found: dict[str, Any] = {}
    weights = _values(loaded.model)
    calls: dict[str, tuple[Any, Any]] = {}
    hooks = []
    for name, module in loaded.fp32.modules.items():

        def keep(_: Any, args: Any, output: Any, name: str = name) -> None:
            calls[name] = (args[0], output)

        hooks.append(module.register_forward_hook(keep, prepend=True))  # before the cast back
    with torch.no_grad():
        _loss(engine, _ids(0, RANK))
    for hook in hooks:
        hook.remove()
    for name, (given, output) in calls.items():
        weight = weights.get(f"{name}.weight")
        if weight is None or not given.is_floating_point():
            continue  # an embedding, or a head under the embedding's name
        if "norm" in name:
            rms = torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + 1e-6)
            expected = weight * (given * rms)
        else:
            expected = torch.nn.functional.linear(given, weight)
        found[name] = bool(
            output.dtype == torch.float32 and torch.allclose(output, expected, rtol=2e-6, atol=1e-7)
        )
    return found


def _values(model: Any) -> dict[str, torch.Tensor]:
    """What forward sees, whole, on every rank, as fp32."""
    import deepspeed

    found = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone().float()
    return found


def _masters(model: Any, *, trained_only: bool = False) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in model.named_parameters():
        if not trained_only or parameter.requires_grad:
            value = safe_get_full_fp32_param(parameter)
            assert value is not None, name
            found[name] = value.detach().clone()
    return found


def _load_file(plan: RunPlan) -> Any:
    """The model as it is in its file, in float64. Not while a ZeRO-3 config is alive."""
    from transformers import LlamaForCausalLM

    gc.collect()
    return LlamaForCausalLM.from_pretrained(plan.model.path, dtype=torch.float32).double()


def _rounded(model: Any, dtype: torch.dtype, wide: list[str]) -> Any:
    """``model`` with everything but ``wide`` rounded to ``dtype`` once."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in wide:
                parameter.copy_(parameter.to(dtype).double())
    return model


def _reference_steps(model: Any, accumulation: int) -> dict[str, torch.Tensor]:
    """The updates of three SGD steps on the mean loss over the ranks and the window."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["params"]["lr"])
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(accumulation):
            for rank in range(2):
                (_loss(model, _ids(step * accumulation + micro, rank)) / (2 * accumulation)).backward()
        optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _make_models(root: Path) -> None:
    """Weights that no 16-bit number is, norms among them."""
    from transformers import LlamaForCausalLM

    for name, tie in (("model", False), ("tied", True)):
        path = make_tiny_model_dir(root / name, tie=tie, layers=1, vocab_size=311)
        model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3).add_(0.05 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(path)


def main(out_dir: Path, everything: bool = False) -> None:
    quiet_libraries()
    permit_emulated_fp16()
    init_world()
    if RANK == 0:
        _make_models(out_dir)
        rotary_models.save(out_dir)
    torch.distributed.barrier()
    run_cases(cases(out_dir, everything), out_dir, RANK)
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), everything=sys.argv[2:] == ["all"])
