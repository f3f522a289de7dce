"""The real DeepSpeedConfig as judge: what it refuses has an error, what it takes has none without reason."""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import pytest

from dslaunch.config.check import Target, check_config
from dslaunch.config.facts import PathFact
from dslaunch.config.schema import key_table
from tests.config.build import engine_of, gpus
from tests.config.check.test_mistakes import GOOD, MISTAKES
from tests.support.deepspeed_config import read_by_deepspeed

WORLD_SIZE = 8
# Errors about configs that the parser takes: it would stop at initialize, ignore the key, or read
# another value than was meant.
PARSER_IS_SILENT = {
    "auto", "unknown-key", "misplaced-key", "type", "range", "fraction", "choice", "bare-word", "placeholder",
    "optimizer-type", "scheduler-type", "untested-optimizer", "needs", "prescale", "grad-accum-dtype",
    "stage",
    "removed-key", "contradiction", "world-size", "muon-stage-3",
}  # fmt: skip


def refusal(config: dict[str, Any]) -> str | None:
    """What DeepSpeed says against a config; None where it takes it."""
    return refusal_at(config, WORLD_SIZE)


def refusal_at(config: dict[str, Any], world_size: int) -> str | None:
    """The same at another world size."""
    try:
        read_by_deepspeed(copy.deepcopy(config), world_size)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def error_codes(config: dict[str, Any]) -> set[str]:
    findings = check_config(json.dumps(config), Target(world_size=WORLD_SIZE)).findings
    return {finding.code for finding in findings if finding.severity == "error"}


def judge(config: dict[str, Any]) -> str | None:
    """A disagreement in words; None where the two agree."""
    said, codes = refusal(config), error_codes(config)
    if said is not None and not codes:
        return f"DeepSpeed refuses ({said.splitlines()[0]}), no error here: {config}"
    if said is None and codes - PARSER_IS_SILENT:
        return f"DeepSpeed accepts, {codes} here: {config}"
    return None


@pytest.mark.parametrize("config", [row[1] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_every_mistake(config: dict[str, Any]) -> None:
    assert judge({**GOOD, **config}) is None


VALUES: list[Any] = [
    True, False, None, 0, 1, -1, 3, 2.5, 1e9, "auto", "true", "2", "cpu", "none", "", [], [1], {}, {"a": 1},
    "fp32",
    {"enabled": True}, {"device": "cpu"},
]  # fmt: skip


def test_any_value_in_any_key() -> None:
    """Each key of the table with each of many values, right and wrong."""
    wrong = []
    for path in key_table():
        if path.startswith(
            ("data_efficiency.data_routing.random_ltd", "data_efficiency.data_sampling.curriculum")
        ):
            continue  # their keys come and go with the others
        for value in VALUES:
            if path == "aio.use_gds" and value in (True, 1):
                continue  # refused on this CPU alone; --gpu cpu says so
            config = copy.deepcopy(GOOD)
            block = config
            *sections, name = path.split(".")
            for section in sections:
                block = block.setdefault(section, {})
            if name == "bfloat16" or path.startswith("bfloat16"):
                config.pop("bf16", None)
            block[name] = value
            said = judge(config)
            if said:
                wrong.append(f"{path} = {value!r}: {said.split(': {')[0]}")
    assert not wrong, "\n".join(wrong)


def test_random_batch_sizes() -> None:
    rng = random.Random(5)
    accepted = 0
    for _ in range(400):
        config: dict[str, Any] = {"gradient_clipping": 1.0}
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            if rng.random() < 0.7:
                config[name] = rng.choice([0, 1, 2, 3, 4, 8, 16, 24, 32, 48, 64, None])
        assert judge(config) is None
        accepted += refusal(config) is None
    assert 20 < accepted < 380


ZERO_OPTIONS = {
    0: [""],
    1: ["", "overlap_comm: true, round_robin_gradients: true", "offload_optimizer: {device: cpu}"],
    2: ["", "reduce_bucket_size: 50000000, allgather_bucket_size: 5e8", "offload_optimizer: {device: cpu}"],
    3: [
        "",
        "stage3_max_reuse_distance: 1000, sub_group_size: 1000000",
        "offload_optimizer: {device: cpu}, offload_param: {device: cpu, pin_memory: false}",
        "offload_optimizer: {device: nvme, nvme_path: /n}, offload_param: {device: nvme, nvme_path: /n}",
    ],
}


@pytest.mark.parametrize("stage", ZERO_OPTIONS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_what_gen_config_renders_is_clean(stage: int, precision: str) -> None:
    """DeepSpeed takes it at its world size, and check has no error or warning about it.

    fp16 at stage 0 has a warning, as it should: it is right only in our own engine.
    """
    optimizers = ("{type: Adam, lr: 1e-5}", "{type: SGD, lr: 0.1}", "{type: Lion, lr: 1e-5}")
    sizes = ("train_batch_size: 48", "train_micro_batch_size_per_gpu: 3\ngradient_accumulation_steps: 4")
    matrix = itertools.product(ZERO_OPTIONS[stage], optimizers, sizes, (1, 6, 8), (0, 0.5))
    for options, optimizer, size, world_size, clipping in matrix:
        if "offload" in options and "SGD" in optimizer:
            continue  # warned of on purpose: torch's SGD runs slowly on the CPU
        text = (
            f"model: org/model\ndata: {{train: org/data}}\n{size}\nprecision: {precision}\n"
            f"zero_optimization: {{stage: {stage}{', ' if options else ''}{options}}}\n"
            f"gradient_clipping: {clipping}\noptimizer: {optimizer}\n"
            f"cluster: {{gpu: a100, num_gpus_per_node: {world_size}}}\n"
        )
        paths = {
            f"zero_optimization.{name}.nvme_path": PathFact("directory", "/n")
            for name in ("offload_optimizer", "offload_param")
        }
        config = engine_of(text, inventory=gpus("a100"), paths=paths)[1]
        findings = check_config(json.dumps(config), Target(world_size=world_size)).findings
        codes = {finding.code for finding in findings if finding.severity != "info"}
        assert codes <= (
            {"fp16-stage-0", "ignored-at-stage"} if (stage, precision) == (0, "fp16") else set()
        ), text
        assert refusal_at(config, world_size) is None
