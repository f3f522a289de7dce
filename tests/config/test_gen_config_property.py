"""Any valid run file or set of flags gives JSON that DeepSpeed accepts and ``check`` has nothing against.

Seeded: case N is the same on every machine, and a failure shows its number and its run file.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslaunch.cli.main import main
from dslaunch.config.check import Target, check_config
from dslaunch.config.zero import ACTING_STAGES
from dslaunch.core.devices import lookup_device
from tests.support.deepspeed_config import read_by_deepspeed

NUM_CASES = 320
# Keys that are valid each, but not together: gen-config says so and renders nothing.
REFUSALS = (
    "is above the first scale",
    "Lion: no DeepSpeed JSON can name it for a CPU",
    "AdEMAMix: no DeepSpeed JSON can name it",
    ": DeepSpeed keeps on NVMe what its own",
    "Adafactor: at ZeRO stage",
    "which runs as ZeRO stage 1, it would get flat shards",
    "fp16 at zero_optimization.stage 0",
    "is for a dynamic scale",
    "nvme needs stage 3",
    "save_16bit_model and save_model write no weights",
    "with offload_optimizer torch's Adam runs on the CPU",
)
FLAGS = {
    "precision": "--precision",
    "gradient_clipping": "--gradient-clipping",
    "train_batch_size": "--train-batch-size",
    "train_micro_batch_size_per_gpu": "--train-micro-batch-size-per-gpu",
    "gradient_accumulation_steps": "--gradient-accumulation-steps",
}


def random_run_file(rng: random.Random) -> dict[str, Any]:
    """A run file of keys that are valid each; a few of them do not go together."""
    gpu = rng.choice(["cpu", "v100", "a100", "h100", "a100-80g", "mi250x"])
    precision = rng.choice(["auto", "bf16", "fp32"] + ["fp16"] * (gpu != "cpu"))
    world = rng.choice([1, 2, 3, 4, 6, 7, 8, 16])
    spec: dict[str, Any] = {
        "model": "org/model",
        "data": {"train": "org/data"},
        "precision": precision,
        "gradient_clipping": rng.choice([0, 0.3, 1, 1.0, 100.5]),
        "cluster": {"gpu": gpu, "num_gpus_per_node": world},
        **_sizes(rng, world),
        "zero_optimization": _zero(rng),
        "optimizer": _optimizer(rng, gpu),
    }
    if rng.random() < 0.6:
        spec["fp16"] = _fp16(rng)
    if rng.random() < 0.4:
        spec["adapter"] = {"r": 8}
    if rng.random() < 0.3:
        spec["deepspeed"] = _raw(rng, spec["zero_optimization"]["stage"])
    return spec


def _sizes(rng: random.Random, world: int) -> dict[str, int]:
    micro, steps = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 5, 16])
    sizes = {
        "train_batch_size": micro * steps * world,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    names = list(sizes)
    kept = rng.choice([names, names[:1], names[:2], names[1:], [names[0], names[2]]])
    return {name: sizes[name] for name in kept}


def _zero(rng: random.Random) -> dict[str, Any]:
    stage = rng.randrange(4)
    zero: dict[str, Any] = {"stage": stage}
    for key, stages in ACTING_STAGES.items():
        if stage in stages and rng.random() < 0.4:
            zero[key] = _zero_value(rng, key, stage)
    return zero


def _zero_value(rng: random.Random, key: str, stage: int) -> Any:
    if key.startswith("offload_"):
        device = rng.choice(["cpu", "nvme"])
        block: dict[str, Any] = {"device": device, "pin_memory": rng.random() < 0.5}
        return {**block, "nvme_path": "/nvme"} if device == "nvme" else block
    if key == "allgather_bucket_size":
        return rng.choice([2, 1000, 5 * 10**7, 10**9])
    if "size" in key or "distance" in key or "threshold" in key or "live" in key:
        return rng.choice([1, 1000, 5 * 10**7, 10**9])
    return rng.random() < 0.5


def _optimizer(rng: random.Random, gpu: str) -> dict[str, Any]:
    name = rng.choice(["AdamW", "Adam", "SGD"] * 6 + ["Lion", "AdEMAMix", "Adafactor"])
    choices: dict[str, list[Any]] = {
        "AdamW": [{}, {"betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}, {"torch_adam": True}],
        "Adam": [{}, {"weight_decay": 0.01}, {"torch_adam": False}],
        "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}],
        "Lion": [{}, {"betas": [0.95, 0.98]}],
        "AdEMAMix": [{}],
        "Adafactor": [{}, {"beta2_decay": -0.5, "d": 2}],
    }
    optimizer: dict[str, Any] = {"type": name, "params": rng.choice(choices[name])}
    if name == "Adafactor" or rng.random() < 0.8:
        optimizer["lr"] = rng.choice([1e-6, 2e-5, 3e-4, 1, 0.1])
    return optimizer


def _fp16(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"loss_scale": rng.choice([128, 1024.0, 65536, 1.5])}
    block = {
        "loss_scale": "dynamic",
        "initial_scale_power": rng.choice([0, 8, 12, 16, 20, 32]),
        "loss_scale_window": rng.choice([1, 100, 1000]),
        "hysteresis": rng.choice([1, 2, 5]),
        "consecutive_hysteresis": rng.random() < 0.5,
        "min_loss_scale": rng.choice([1, 2, 1024]),
    }
    return {key: value for key, value in block.items() if rng.random() < 0.6}


def _raw(rng: random.Random, stage: int) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
        "dump_state": False,
        "memory_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 3},
        "activation_checkpointing": {"partition_activations": True},
        "aio": {"block_size": 262144, "queue_depth": 8, "single_submit": False},
        "comms_logger": {"enabled": False},
        "checkpoint": {"tag_validation": "Warn"},
    }
    if stage in (1, 2):
        choices["zero_optimization"] = {"ignore_unused_parameters": False}
    return {key: choices[key] for key in rng.sample(sorted(choices), 3)}


def as_flags(spec: dict[str, Any]) -> list[str]:
    """The same for someone's own script: flags where there are some, --set for the rest."""
    cluster, zero, optimizer = spec["cluster"], spec["zero_optimization"], spec["optimizer"]
    argv = [f"--gpu={cluster['gpu']}", f"--num-gpus-per-node={cluster['num_gpus_per_node']}"]
    argv += [f"--zero-stage={zero['stage']}", f"--optimizer={optimizer['type']}"]
    argv += [f"{FLAGS[key]}={value}" for key, value in spec.items() if key in FLAGS]
    rest = {f"zero_optimization.{key}": value for key, value in zero.items() if key != "stage"}
    rest |= {f"optimizer.{key}": value for key, value in optimizer.items() if key != "type"}
    rest |= {key: spec[key] for key in ("fp16", "deepspeed") if key in spec}
    for key, value in rest.items():
        argv += ["--set", f"{key}={json.dumps(value)}"]
    return argv


def test_what_is_rendered_is_accepted_and_has_no_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rendered: Counter[tuple[int, str]] = Counter()
    for seed in range(NUM_CASES):
        spec = random_run_file(random.Random(seed))
        text = yaml.safe_dump(spec)
        Path("run.yaml").write_text(text)
        code = main(["gen-config", *(["run.yaml"] if seed % 2 else as_flags(spec))])
        captured = capsys.readouterr()
        case = f"seed {seed}\n{text}\n{captured.err}"
        if code != 0:
            errors = [line for line in captured.err.splitlines() if line.startswith("Error: ")]
            assert code == 2 and errors, case
            assert all(any(part in error for part in REFUSALS) for error in errors), case
            continue
        check_accepted(json.loads(captured.out), spec, case)
        check_clean(captured.out, spec, captured.err, case)
        config = json.loads(captured.out)
        precision = next((name for name in ("fp16", "bf16") if config[name]["enabled"]), "fp32")
        rendered[config["zero_optimization"]["stage"], precision] += 1
    assert rendered.total() > 0.65 * NUM_CASES
    every = {(stage, name) for stage in range(4) for name in ("fp16", "bf16", "fp32")} - {(0, "fp16")}
    assert set(rendered) == every


def check_accepted(config: dict[str, Any], spec: dict[str, Any], case: str) -> None:
    """The real DeepSpeedConfig takes it at this world size, and means what was asked for."""
    read = read_by_deepspeed(config, spec["cluster"]["num_gpus_per_node"])
    for size in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert getattr(read, size) == config[size] == spec.get(size, config[size]), case
    assert read.zero_optimization_stage == spec["zero_optimization"]["stage"], case
    assert read.gradient_clipping == spec["gradient_clipping"], case
    assert read.optimizer_name.lower() == spec["optimizer"]["type"].lower(), case


def check_clean(text: str, spec: dict[str, Any], notes: str, case: str) -> None:
    """No error and no warning of ``check --world-size N --gpu GPU``.

    But one that must be there: bf16 asked for on a device that has none is what the plan warns of.
    """
    cluster = spec["cluster"]
    target = Target(world_size=cluster["num_gpus_per_node"], devices=(lookup_device(cluster["gpu"]),))
    found = [f for f in check_config(text, target).findings if f.severity != "info"]
    if cluster["gpu"] == "v100" and spec["precision"] == "bf16":
        assert [(f.code, f.severity) for f in found] == [("device", "warning")], f"{found}\n{case}"
        assert "bf16" in notes, case
    else:
        assert not found, f"{found}\n{case}"
