# ruff: noqa: E501 (a row of the tables in a line)
"""What people meet in practice, row by row: mistakes counted in published configs, and field reports about configs.

A row names the mistakes of test_mistakes.py that show it, or has small texts of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main
from dslaunch.config.check import Target, check_config
from dslaunch.config.check.files import check_file
from dslaunch.config.check.repair import repair_config
from dslaunch.core.finding import Finding
from tests.config.check.test_mistakes import CPU, GOOD, MISTAKES, SAVES, found, fp16, the, zero

Capture = pytest.CaptureFixture[str]
BY_NAME = {row[0]: row for row in MISTAKES}

# The row, and the mistakes that stand for it.
PUBLISHED: dict[str, list[str]] = {
    "auto outside the HF Trainer": ["auto in a batch size", "auto silently off", "auto in an argument"],
    "cpu_offload deprecated": ["cpu_offload", "old and new offload"],
    "removed features": ["compression_training", "curriculum_learning", "quantize_training", "amp", "eigenvalue", "sparse_attention"],
    "fp16.fp16, bf16.bf16, fp16.type": ["fp16.fp16", "bf16.bf16", "fp16.type"],
    "initial_scale_power 32": ["initial_scale_power 32"],
    "one-bit optimizers": ["OneBitAdam", "OnebitAdam", "OneBitLamb", "ZeroOneAdam"],
    "fp16 off with scale keys": ["scale keys while off"],
    "stage 0 with ZeRO tuning": ["tuning at stage 0"],
    "prescale_gradients with ZeRO": ["prescale with ZeRO 2"],
    "stage3_gather_fp16_weights_on_model_save": ["renamed gather key"],
    "keys of another stage": ["allgather at 3", "stage3_* at 2", "offload_param at 2", "sub_group_size at 1"],
    "torch_adam with CPU offload": ["torch_adam with offload"],
    "offload device none with other keys": ["offload none with keys"],
    "lr differs from warmup_max_lr": ["two learning rates"],
    "contiguous_memory_optimization": ["contiguous memory"],
    "tensor_parallel and compile": ["tensor_parallel.enabled", "compile.backend"],
    "fp16 scale keys in bf16": ["scale keys in bf16"],
    "param_persitence (sic)": ["persitence"],
    "max_grad_norm": ["max_grad_norm as argument", "max_grad_norm on top"],
    "zero_optimization a bool, a list of stages": ["zero a bool", "stage list of autotuning"],
    "single ones": ["min_loss_scale 1000", "bf16 a bool", "static scale 1", "bucket 0", "aio inside zero"],
    "unknown top-level keys": ["log", "cuda_visible_devices", "monitor_config"],
}  # fmt: skip


@pytest.mark.parametrize("row", PUBLISHED)
def test_a_published_mistake(row: str) -> None:
    for name in PUBLISHED[row]:
        _, config, code, severity, key = BY_NAME[name]
        assert [(f.severity, f.key) for f in found(config) if f.code == code] == [(severity, key)]


MORE: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("batch sizes for another world size", {"train_batch_size": 6}, {"world_size": 4}, "batch", "error"),
    ("no batch size", {"train_micro_batch_size_per_gpu": None}, {}, "batch-missing", "error"),
    ("a hard-coded size beside auto", {"gradient_accumulation_steps": "auto"}, {"reader": "hf-trainer"}, "batch-beside-auto", "warning"),
    ("offload without an optimizer block", {"optimizer": None, **zero(2, offload_optimizer=CPU)}, {}, "offload-optimizer", "warning"),
    ("tensor_parallel.tp_size", {"tensor_parallel": {"tp_size": 2}}, {}, "unknown-key", "error"),
    ("compile.disable", {"compile": {"disable": True}}, {}, "unknown-key", "error"),
    ("int8", {"int8": {"enabled": True}}, {}, "unknown-key", "error"),
    ("num_gpus", {"num_gpus": 8}, {}, "unknown-key", "error"),
    ("comms_config", {"comms_config": {}}, {}, "unknown-key", "error"),
    ("#flops_profiler", {"#flops_profiler": {}}, {}, "unknown-key", "error"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "target", "code", "severity"), [r[1:] for r in MORE], ids=[r[0] for r in MORE]
)
def test_another_published_mistake(
    config: dict[str, Any], target: dict[str, Any], code: str, severity: str
) -> None:
    text = json.dumps({k: v for k, v in {**GOOD, **config}.items() if v is not None}, indent=1)
    assert severity in [f.severity for f in check_config(text, Target(**target)).findings if f.code == code]


@pytest.mark.parametrize(
    ("text", "severity", "line"),
    [
        ("a slots=8x\nb slots=8\n", "error", 1),
        ("a slots=8 max_slots=16\n", "error", 1),
        ("a slots=8\nb slots=0\n", "error", 2),
        ("a slots=8\nnode2\n", "error", 2),
        ("a slots=8\nb:8\n", "error", 2),
        ("a slots=8\nb,8\n", "error", 2),
        ("a slots=8\na slots=8\n", "error", 2),
        ("<worker-1> slots=8\n", "error", 1),
        ("localhost slots=8\nb slots=8\n", "warning", None),
        ("me@10.0.0.1 slots=8\r\nme@10.0.0.2 slots=4  # half\r\n", None, None),
        ("a.lab.org slots=08\n", None, None),
    ],
)
def test_a_published_hostfile(text: str, severity: str | None, line: int | None) -> None:
    checked = check_file("hosts", text.encode(), Target())
    assert checked.kind == "hostfile"
    assert [(f.severity, f.line) for f in checked.findings] == ([(severity, line)] if severity else [])


def run_file(path: Path, engine: str) -> str:
    """The path of a small run file with these lines."""
    path.write_text(f"model: org/model\ndata: {{train: org/data}}\ntrain_batch_size: 8\n{engine}\n")
    return str(path)


def rendered(tmp_path: Path, capsys: Capture, engine: str, *flags: str) -> tuple[dict[str, Any], str]:
    """What gen-config makes of a run file with these lines, and what it says beside it."""
    run = run_file(tmp_path / "run.yaml", engine)
    capsys.readouterr()
    code = main(["gen-config", run, "--num-gpus-per-node", "2", "--gpu", "a100", *flags])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out), err


class TestFieldReports:
    """Named by the number of the report."""

    def test_6_a_fraction_where_a_whole_number_is_needed(self, tmp_path: Path, capsys: Capture) -> None:
        finding = the("fraction", zero(3, stage3_prefetch_bucket_size=15099494.4, **SAVES))
        assert finding.fix == "write 15099494"
        assert not [f for f in found(zero(2, reduce_bucket_size=5e8)) if f.severity == "error"]
        config, _ = rendered(tmp_path, capsys, "zero_optimization: {stage: 2, reduce_bucket_size: 5e8}")
        assert type(config["zero_optimization"]["reduce_bucket_size"]) is int

    def test_7_types_and_settings_in_two_places(self) -> None:
        finding = the("type", {"gradient_accumulation_steps": "8"})
        assert "a text, but a whole number is expected" in finding.message
        rates = the("contradiction", {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-5}}})
        assert "scheduler.params.warmup_max_lr" in rates.message and "optimizer.params.lr" in rates.message
        steps = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}}
        assert the("range", steps).severity == "error"

    def test_10_a_path_that_is_not_there(
        self, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("playground").mkdir()
        Path("playground/z2.json").write_text(json.dumps(GOOD))
        assert main(["check", "playgroundd/z2.json"]) == 2
        out = capsys.readouterr().out
        assert "not found" in out and "did you mean playground/z2.json?" in out

    def test_11_the_batch_equation(self) -> None:
        config = {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": None,
        }
        hint = str(the("batch", config, world_size=7).hint)
        assert "252 (gradient_accumulation_steps 18) or 266 (gradient_accumulation_steps 19)" in hint

    def test_41_numbers_as_yaml_reads_them(self, tmp_path: Path, capsys: Capture) -> None:
        lines = "optimizer: {lr: 2e-5}\nzero_optimization: {stage: 2, reduce_bucket_size: 5e8}"
        config, _ = rendered(tmp_path, capsys, lines)
        assert config["optimizer"]["params"]["lr"] == 2e-5
        assert config["zero_optimization"]["reduce_bucket_size"] == 500_000_000

    def test_46_offload_with_a_client_optimizer(self, tmp_path: Path, capsys: Capture) -> None:
        without = {k: v for k, v in {**GOOD, **zero(2, offload_optimizer=CPU)}.items() if k != "optimizer"}
        assert the("offload-optimizer", json.dumps(without)).severity == "warning"
        config, _ = rendered(
            tmp_path, capsys, "zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}"
        )
        assert "optimizer" in config
        assert not wrong(json.dumps(config), world_size=2)

    def test_65_an_untested_optimizer(self) -> None:
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        assert the("untested-optimizer", sgd).fix == "write zero_allow_untested_optimizer: true"
        repaired = repair_config(json.dumps({**GOOD, **sgd}), Target())
        assert repaired is not None and json.loads(repaired.text)["zero_allow_untested_optimizer"] is True
        assert the("untested-optimizer", {"optimizer": {"type": "Adafactor", "params": {}}}).fix is None

    def test_82_misspelt_keys_at_every_level(self) -> None:
        assert the("unknown-key", {"gradient_clipp1ng": 1}).hint == "did you mean gradient_clipping?"
        adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decai": 0.1}}}
        assert the("unknown-key", adam).hint == "did you mean weight_decay?"
        assert the("unknown-key", zero(2, overlap_com=True)).severity == "error"

    def test_87_one_precision_and_real_booleans(self) -> None:
        assert the("fp16-and-bf16", {"fp16": {"enabled": True}}).severity == "error"
        assert the("type", {"bf16": {"enabled": "true"}}).fix == "write true"
        both = {**fp16(), "bf16": {"enabled": "auto"}}
        assert not wrong(json.dumps({**GOOD, **both}), reader="hf-trainer")

    def test_91_auto_is_left_nowhere(self, tmp_path: Path, capsys: Capture) -> None:
        assert the("auto", {"gradient_clipping": "auto"}).severity == "error"
        config, _ = rendered(tmp_path, capsys, "precision: auto")
        assert '"auto"' not in json.dumps(config)

    def test_100_scale_keys_in_bf16(self) -> None:
        keys = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
        text = json.dumps({**GOOD, "bf16": {"enabled": True, **dict.fromkeys(keys, 1)}})
        named = [f.key for f in check_config(text).findings if f.code == "unknown-key"]
        assert named == [f"bf16.{key}" for key in keys]
        repaired = repair_config(text, Target())
        assert repaired is not None and json.loads(repaired.text)["bf16"] == {"enabled": True}

    def test_16_overlap_that_races(self) -> None:
        racing = zero(2, overlap_comm=True)
        assert the("overlap-race", racing, version="0.14.5").severity == "warning"
        assert not [f for f in found(racing) if f.code == "overlap-race"]

    def test_29_a_model_that_is_saved_empty(self) -> None:
        off = {"stage3_gather_16bit_weights_on_model_save": False}
        for reader, what in [("raw", "no weights"), ("hf-trainer", "checkpoint"), ("accelerate", "stop")]:
            for config in (zero(3, **off), zero(3)):
                finding = the("saves-nothing", config, reader=reader)
                assert finding.severity == "warning" and what in finding.message


def wrong(text: str, **target: Any) -> list[Finding]:
    return [f for f in check_config(text, Target(**target)).findings if f.severity != "info"]
