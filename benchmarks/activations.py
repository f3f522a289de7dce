"""What a forward and a backward pass really hold, against the formulas of ``dslaunch plan``.

    python benchmarks/activations.py [--family NAME ...]

For small decoders of every family, in fp32 and bf16, with and without gradient checkpointing: what one layer
keeps for the backward pass (the difference between two depths), and the highest point of the forward and of
the backward pass where logits outweigh the layers. By the allocator's own events, in one process on a CPU,
with transformers' own loss, without DeepSpeed. Exits 1 where one differs by more than 2 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from memory import memory_events

TOLERANCE = 0.02
TOKENS, SHALLOW, DEEP = 512, 2, 6
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 24}
EXPERTS: dict[str, Any] = {
    **GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 132,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": GROUPED,
    "qwen3_moe": EXPERTS,
    "gemma": GROUPED,
    "gemma2": {**GROUPED, "query_pre_attn_scalar": 24},
    "gemma3_text": {**GROUPED, "query_pre_attn_scalar": 24},
    "phi": {},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt2": {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {},
}


@dataclass(frozen=True)
class Case:
    family: str
    precision: str
    checkpointing: bool
    layers: int = SHALLOW
    vocab: int = 64

    @property
    def name(self) -> str:
        return f"{self.family} {self.precision}{' checkpointed' if self.checkpointing else ''}"


@dataclass(frozen=True)
class Difference:
    name: str
    moment: str
    measured: float
    planned: float

    @property
    def relative(self) -> float:
        return self.planned / self.measured - 1


def model_config(case: Case) -> Any:
    from transformers import AutoConfig

    sizes = {
        "vocab_size": case.vocab,
        "hidden_size": 96,
        "num_hidden_layers": case.layers,
        "num_attention_heads": 4,
        "max_position_embeddings": TOKENS,
        "n_inner" if case.family == "gpt2" else "intermediate_size": 264,
    }
    config = AutoConfig.for_model(case.family, **sizes, **FAMILIES[case.family])
    config.use_cache = False
    return config


def measure(case: Case) -> dict[str, int]:
    """Bytes above the weights: ``kept`` from the forward pass, and the peaks ``forward`` and ``backward``."""
    import torch
    from torch.profiler import record_function
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(model_config(case), dtype=dtype).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 60, (1, TOKENS))
    model(input_ids=ids, labels=ids).loss.backward()  # gradients, and what is made only once, are there then
    gc.collect()
    with memory_events() as events:
        with record_function("dslaunch forward"):
            loss = model(input_ids=ids, labels=ids).loss
        gc.collect()
        with record_function("dslaunch backward"):
            loss.backward()
    return levels(events)


def levels(events: list[Any]) -> dict[str, int]:
    marks = {event.name(): event for event in events if event.name().startswith("dslaunch")}
    starts = [marks[f"dslaunch {name}"].start_ns() for name in ("forward", "backward")]
    found = {"kept": 0, "forward": 0, "backward": 0}
    level = 0
    memory = (event for event in events if event.name() == "[memory]" and event.start_ns() >= starts[0])
    for event in sorted(memory, key=lambda event: event.start_ns()):
        level += event.nbytes()
        name = "forward" if event.start_ns() < starts[1] else "backward"
        found[name] = max(found[name], level)
        if name == "forward":
            found["kept"] = level
    return found


def setup_of(case: Case) -> Any:
    from dslaunch.config.memory.architectures import dimensions, parameters
    from dslaunch.config.memory.setup import Setup
    from dslaunch.config.memory.tensors import ModelFacts

    config = model_config(case).to_dict()
    facts = ModelFacts(parameters(config) or (), dimensions(config), "config")
    return Setup(
        model=facts,
        trainable=facts.tensors,
        frozen=(),
        precision=case.precision,  # type: ignore[arg-type]
        zero_stage=0,
        world_size=1,
        ranks_per_host=1,
        micro_batch=1,
        accumulation=1,
        max_length=TOKENS,
        gradient_checkpointing=case.checkpointing,
        device_type="cpu",
    )


def layer_difference(case: Case) -> Difference:
    """What one more layer keeps for one token."""
    from dslaunch.config.memory.activations import kept_by_a_layer

    # Of six layers of Gemma 3 one is of another kind, with tables of its own.
    depths = (6, 12) if case.family == "gemma3_text" else (SHALLOW, DEEP)
    few, many = (measure(dataclasses.replace(case, layers=layers))["kept"] for layers in depths)
    planned = kept_by_a_layer(setup_of(case)) / TOKENS
    return Difference(case.name, "one layer", (many - few) / (depths[1] - depths[0]) / TOKENS, planned)


def peak_differences(case: Case) -> Iterator[Difference]:
    """The peaks of both passes where the logits weigh most."""
    from dslaunch.config.memory.activations import activation_items
    from dslaunch.config.memory.items import FORWARD, LAYERS, LOSS, size_at

    heavy = dataclasses.replace(case, vocab=8192)
    real, items = measure(heavy), activation_items(setup_of(heavy))
    yield Difference(case.name, "forward", real["forward"], size_at(items, FORWARD))
    yield Difference(
        case.name, "backward", real["backward"], max(size_at(items, LOSS), size_at(items, LAYERS))
    )


def differences(
    families: Iterable[str], precisions: Iterable[str] = ("fp32", "bf16")
) -> Iterator[Difference]:
    for family, precision, again in itertools.product(families, precisions, (False, True)):
        if "num_experts" in FAMILIES[family] and precision == "bf16":
            continue  # torch's grouped product refuses such small experts in bf16
        case = Case(family, precision, again)
        yield layer_difference(case)
        yield from peak_differences(case)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", action="append", choices=FAMILIES, help="repeatable; default: all")
    args = parser.parse_args()
    worst: dict[str, float] = {}
    print(f"{'case':<28} {'moment':<10} {'measured':>12} {'planned':>12}  difference")
    for found in differences(args.family or FAMILIES):
        worst[found.moment] = max(worst.get(found.moment, 0.0), abs(found.relative))
        flag = "  <-- more than 2 %" if abs(found.relative) > TOLERANCE else ""
        print(
            f"{found.name:<28} {found.moment:<10} {found.measured:>12,.0f} {found.planned:>12,.0f}"
            f"  {100 * found.relative:+.2f} %{flag}",
            flush=True,
        )
    print("\nlargest difference: " + ", ".join(f"{m} {100 * w:.2f} %" for m, w in worst.items()))
    return int(any(w > TOLERANCE for w in worst.values()))


if __name__ == "__main__":
    sys.exit(main())
