"""What would fit where no change of stage, offload, checkpointing or micro-batch does.

These change the outcome of training, or need more machines, so each is named with its price.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.config.memory.alternatives import Alternative, nearest_that_fits, rank_alternatives
from dslaunch.config.memory.planner import plan_memory
from dslaunch.config.memory.setup import Method, Setup, adapted
from dslaunch.config.memory.typed import MAX_LENGTH, typed

_SHORTEST = 256
_MOST_DEVICES_A_HOST, _MOST_NODES = 8, 64
_LORA_R = 16


@dataclass(frozen=True)
class LargerChange:
    """``changes``: what is typed to get there; ``price`` says what else they change, in words."""

    changes: tuple[str, ...]
    price: str


def larger_changes(setup: Setup, capacity_gib: float | None, host_gib: float | None) -> list[LargerChange]:
    """The smallest of each kind that fits, with what it takes besides: shorter, adapters, more devices."""
    found = [
        _first(kind, capacity_gib, host_gib) for kind in (_shorter(setup), _adapters(setup), _more(setup))
    ]
    return [change for change in found if change]


_Step = tuple[Setup, str, str]


def _first(steps: Iterator[_Step], capacity_gib: float | None, host_gib: float | None) -> LargerChange | None:
    for setup, flag, price in steps:
        plan = plan_memory(setup, capacity_gib, host_gib=host_gib)
        same = Alternative(setup, plan, (), 0)
        options = [same] if plan.fits else rank_alternatives(setup, capacity_gib, host_gib=host_gib)
        if nearest := nearest_that_fits(options):
            return LargerChange((flag, *nearest.changes), price)
    return None


def _shorter(setup: Setup) -> Iterator[_Step]:
    length = 1 << (setup.max_length - 1).bit_length() - 1  # the next smaller power of two
    while length >= _SHORTEST:
        changed = dataclasses.replace(setup, max_length=length)
        yield changed, typed(setup, MAX_LENGTH, length), "longer samples are cut"
        length //= 2


def _adapters(setup: Setup) -> Iterator[_Step]:
    methods: dict[Method, tuple[Method, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}
    for method in methods[setup.method]:
        r = setup.lora_r or _LORA_R
        trained, frozen = adapted(
            setup.model, method, r=r, bytes_each=setup.bytes_each, value_head=setup.value_head
        )
        zero = dataclasses.replace(setup.zero, offload_param=None) if method == "qlora" else setup.zero
        changed = dataclasses.replace(
            setup, method=method, trainable=trained, frozen=frozen, lora_r=r, exclude_frozen=True, zero=zero
        )
        flag = _typed(setup, method) if setup.in_run_file else f"--method {method}"
        price = (
            "quantises what is not trained" if setup.method == "lora" else f"trains adapters of rank {r} only"
        )
        yield changed, flag, price


def _typed(setup: Setup, method: Method) -> str:
    """What makes a run file's training ``method``."""
    found = ["--set adapter.type=lora"] if setup.method == "full" else []
    found += ["--set model.quantization_config.load_in_4bit=true"] if method == "qlora" else []
    return " ".join(found)


def _more(setup: Setup) -> Iterator[_Step]:
    if setup.device_type == "cpu":
        return
    hosts = max(1, setup.world_size // setup.ranks_per_host)
    each = setup.ranks_per_host
    while hosts == 1 and each < _MOST_DEVICES_A_HOST:
        each = min(2 * each, _MOST_DEVICES_A_HOST)
        changed = dataclasses.replace(setup, world_size=each, ranks_per_host=each)
        yield changed, f"--num-gpus-per-node {each}", _larger_batch(setup, each)
    while hosts < _MOST_NODES:
        hosts *= 2
        changed = dataclasses.replace(setup, world_size=hosts * each, ranks_per_host=each)
        more = f"--num-nodes {hosts}" + (f" --num-gpus-per-node {each}" * (each != setup.ranks_per_host))
        yield changed, more, _larger_batch(setup, hosts * each)


def _larger_batch(setup: Setup, world_size: int) -> str:
    return f"{world_size} devices, and so a global batch {world_size / setup.world_size:g} times as large"
