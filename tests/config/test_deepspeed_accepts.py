"""The real DeepSpeedConfig reads what is rendered, at the very world size, and means the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from dslaunch.config.facts import PathFact
from dslaunch.config.schema import top_level_keys
from dslaunch.config.spec_engine import Fp16Spec, ZeroSpec
from dslaunch.config.zero import ACTING_STAGES
from dslaunch.core.batch_size import solve_batch_sizes
from dslaunch.core.errors import ConfigError
from tests.config.build import engine_of, gpus
from tests.support.deepspeed_config import read_by_deepspeed

NEEDS = "model: org/model\ndata: {train: org/data}\n"


def matrix() -> Iterator[tuple[int, str, int, str]]:
    sizes = ("train_batch_size: 84", "train_micro_batch_size_per_gpu: 3\ngradient_accumulation_steps: 5")
    yield from itertools.product((0, 1, 2, 3), ("bf16", "fp16", "fp32"), (1, 2, 6, 7), sizes)


def test_every_stage_precision_and_world_size() -> None:
    for stage, precision, world_size, sizes in matrix():
        text = (
            f"{NEEDS}{sizes}\nprecision: {precision}\nzero_optimization: {{stage: {stage}}}\n"
            f"gradient_clipping: 0.5\ncluster: {{gpu: a100, num_gpus_per_node: {world_size}}}\n"
        )
        engine, config, _ = engine_of(text)
        read = read_by_deepspeed(config, world_size)
        assert read.train_batch_size == engine.batch.train_batch_size
        assert read.train_micro_batch_size_per_gpu == engine.batch.train_micro_batch_size_per_gpu
        assert read.gradient_accumulation_steps == engine.batch.gradient_accumulation_steps
        assert read.gradient_clipping == 0.5
        assert read.zero_optimization_stage == stage
        assert (read.float16_config.enabled, read.bfloat16_config.enabled) == (
            precision == "fp16",
            precision == "bf16",
        )
        assert (read.optimizer_name, read.optimizer_params["lr"]) == ("adamw", 2e-5)


def test_no_clipping_is_no_clipping() -> None:
    """DeepSpeed 0.19.8 takes 1.0 where the key is left out, so 0 must be written."""
    assert read_by_deepspeed({"train_batch_size": 1}, 1).gradient_clipping == 1.0
    config = engine_of(NEEDS + "train_batch_size: 1\ngradient_clipping: 0\n")[1]
    assert read_by_deepspeed(config, 1).gradient_clipping == 0


def test_the_loss_scale_means_what_was_written() -> None:
    base = NEEDS + "train_batch_size: 1\nprecision: fp16\n"
    facts = {"inventory": gpus("v100")}
    config = engine_of(base + "fp16: {initial_scale_power: 8, hysteresis: 3}\n", **facts)[1]
    dynamic = read_by_deepspeed(config, 1)
    assert dynamic.float16_config.loss_scale == 0
    assert dynamic.float16_config.dynamic_loss_scale_args() == {
        "init_scale": 256,
        "scale_window": 1000,
        "delayed_shift": 3,
        "consecutive_hysteresis": False,
        "min_scale": 1,
    }
    static = read_by_deepspeed(engine_of(base + "fp16: {loss_scale: 128}\n", **facts)[1], 1)
    assert static.float16_config.loss_scale == 128


def test_every_zero_key_is_read_by_deepspeed() -> None:
    values: dict[str, Any] = {
        "offload_optimizer": "{device: cpu, pin_memory: true}",
        "offload_param": "{device: nvme, nvme_path: /nvme}",
    }
    fields = ZeroSpec.model_fields
    for key, stages in ACTING_STAGES.items():
        kind = str(fields[key].annotation)
        text = values.get(key) or ("true" if "bool" in kind else "12346")
        for stage in stages:
            written = f"{NEEDS}train_batch_size: 1\nzero_optimization: {{stage: {stage}, {key}: {text}}}\n"
            nvme = {"zero_optimization.offload_param.nvme_path": PathFact("directory", "/nvme")}
            zero = read_by_deepspeed(engine_of(written, paths=nvme)[1], 1).zero_config
            name = next(n for n, f in type(zero).model_fields.items() if key in (n, f.alias))
            found = getattr(zero, name)
            if key == "offload_param":
                assert (found.device, str(found.nvme_path)) == ("nvme", "/nvme")
            elif key == "offload_optimizer":
                assert (found.device, found.pin_memory) == ("cpu", True)
            else:
                assert found == (True if text == "true" else 12346)


def test_names_and_defaults_are_deepspeeds_own() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    theirs = DeepSpeedFP16Config()
    for name, field in Fp16Spec.model_fields.items():
        assert hasattr(theirs, name)
        if name != "loss_scale":
            assert getattr(theirs, name) == field.default
    names = {alias for n, f in DeepSpeedZeroConfig.model_fields.items() for alias in (n, f.alias)}
    assert set(ZeroSpec.model_fields) <= names
    assert set(ACTING_STAGES) == set(ZeroSpec.model_fields) - {"stage"}


class Recorder(dict[str, Any]):
    """A config that remembers which top-level keys DeepSpeed looked for."""

    asked: set[str]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # `key in config.keys()` is a look-up too


def test_the_list_of_top_level_keys_is_deepspeeds_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    import deepspeed.runtime.config as theirs

    config = Recorder({"train_batch_size": 1})
    monkeypatch.setattr(copy, "copy", lambda value: value)  # it works on a copy, which would not record
    read_by_deepspeed(config, 1)
    removed = set(theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS)  # looked up to be refused
    # sequence_parallel_size is read only where there is no mpu.
    assert {"train_batch_size", "zero_optimization", *removed} < config.asked
    assert (config.asked - removed) | {"sequence_parallel_size"} == top_level_keys()


def test_the_batch_triangle_agrees_with_deepspeed() -> None:
    """Where ours gives sizes DeepSpeed takes them; where it refuses, DeepSpeed asserts or floors."""
    refused = 0
    for train, micro, world in itertools.product((6, 7, 8, 12), (1, 2, 4), (1, 2, 3)):
        given = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro}
        try:
            batch = solve_batch_sizes(**given, gradient_accumulation_steps=None, world_size=world).batch
        except ConfigError:
            refused += 1
            with pytest.raises(AssertionError):
                read_by_deepspeed(given, world)
            continue
        read = read_by_deepspeed(given, world)
        assert read.gradient_accumulation_steps == batch.gradient_accumulation_steps
        assert math.prod((micro, batch.gradient_accumulation_steps, world)) == train
    assert refused > 5
