# ruff: noqa: E501 (the table reads better with one mistake a line)
"""One small config for each mistake that people make, and what is said about it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dslaunch.config.check import Target, check_config
from dslaunch.core.devices import lookup_device
from dslaunch.core.finding import Finding

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def found(config: dict[str, Any] | str, **target: Any) -> list[Finding]:
    text = config if isinstance(config, str) else json.dumps({**GOOD, **config}, indent=1)
    return list(check_config(text, Target(**target)).findings)


def the(code: str, config: dict[str, Any] | str, **target: Any) -> Finding:
    """The one finding of this code."""
    all_ = found(config, **target)
    (one,) = [finding for finding in all_ if finding.code == code]
    return one


def test_a_good_config_has_nothing_wrong() -> None:
    assert [f for f in found({}) if f.severity != "info"] == []
    assert found({}, world_size=7) == found({})


FP16 = {"enabled": True}
OFF: dict[str, Any] = {"enabled": False}


def fp16(**keys: Any) -> dict[str, Any]:
    return {"bf16": OFF, "fp16": {**FP16, **keys}}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def bf16(**keys: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True, **keys}}


def adam(**keys: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, **keys}}}


def schedule(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


CPU = {"device": "cpu"}
SAVES = {"stage3_gather_16bit_weights_on_model_save": True}

# name, config, code, severity, key
MISTAKES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("auto in a batch size", {"train_micro_batch_size_per_gpu": "auto"}, "auto", "error", "train_micro_batch_size_per_gpu"),
    ("auto silently off", {"fp16": {"enabled": "auto"}}, "auto", "error", "fp16.enabled"),
    ("auto in an argument", {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "auto", "error",
     "optimizer.params.lr"),
    ("cpu_offload", zero(2, cpu_offload=True), "deprecated-key", "warning", "zero_optimization.cpu_offload"),
    ("old and new offload", zero(2, cpu_offload=True, offload_optimizer=CPU), "old-and-new", "error",
     "zero_optimization.cpu_offload"),
    ("compression_training", {"compression_training": {}}, "removed-key", "error", "compression_training"),
    ("curriculum_learning", {"curriculum_learning": {}}, "removed-key", "error", "curriculum_learning"),
    ("quantize_training", {"quantize_training": {}}, "removed-key", "error", "quantize_training"),
    ("amp", {"amp": {"enabled": True}}, "removed-key", "error", "amp"),
    ("eigenvalue", {"eigenvalue": {}}, "removed-key", "error", "eigenvalue"),
    ("sparse_attention", {"sparse_attention": {}}, "removed-key", "error", "sparse_attention"),
    ("fp16.fp16", fp16(fp16=True), "unknown-key", "error", "fp16.fp16"),
    ("fp16.type", fp16(type="fp16"), "unknown-key", "error", "fp16.type"),
    ("bf16.bf16", {"bf16": {"enabled": True, "bf16": True}}, "unknown-key", "error", "bf16.bf16"),
    ("initial_scale_power 32", fp16(initial_scale_power=32), "initial-scale", "info", "fp16.initial_scale_power"),
    ("aio.thread_count", {"aio": {"thread_count": 2}}, "removed-key", "error", "aio.thread_count"),
    ("the old name beside the new", {"aio": {"thread_count": 2, "intra_op_parallelism": 2}}, "removed-key", "error", "aio.thread_count"),
    ("seq_parallel_comm_data_type", {"seq_parallel_comm_data_type": "bf16"}, "removed-key", "error", "seq_parallel_comm_data_type"),
    ("OneBitAdam", {"optimizer": {"type": "OneBitAdam", "params": {}}}, "optimizer-type", "error", "optimizer.type"),
    ("OnebitAdam", {"optimizer": {"type": "OnebitAdam", "params": {}}}, "optimizer-type", "error", "optimizer.type"),
    ("OneBitLamb", {"optimizer": {"type": "OneBitLamb", "params": {}}}, "optimizer-type", "error", "optimizer.type"),
    ("ZeroOneAdam", {"optimizer": {"type": "ZeroOneAdam", "params": {}}}, "optimizer-type", "error", "optimizer.type"),
    ("a misspelt optimizer", {"optimizer": {"type": "AdamWW", "params": {}}}, "optimizer-type", "error",
     "optimizer.type"),
    ("scale keys while off", {"fp16": {"enabled": False, "loss_scale": 0}}, "fp16-off", "warning", "fp16.loss_scale"),
    ("tuning at stage 0", zero(0, overlap_comm=True), "ignored-at-stage", "warning", "zero_optimization.overlap_comm"),
    ("prescale with ZeRO 2", {"prescale_gradients": True}, "prescale", "error", "prescale_gradients"),
    ("renamed gather key", zero(3, stage3_gather_fp16_weights_on_model_save=True), "deprecated-key", "warning",
     "zero_optimization.stage3_gather_fp16_weights_on_model_save"),
    ("allgather at 3", zero(3, allgather_bucket_size=1, **SAVES), "ignored-at-stage", "warning",
     "zero_optimization.allgather_bucket_size"),
    ("stage3_* at 2", zero(2, stage3_max_live_parameters=1), "ignored-at-stage", "warning",
     "zero_optimization.stage3_max_live_parameters"),
    ("offload_param at 2", zero(2, offload_param=CPU), "ignored-at-stage", "warning", "zero_optimization.offload_param"),
    ("sub_group_size at 1", zero(1, sub_group_size=1), "ignored-at-stage", "warning", "zero_optimization.sub_group_size"),
    ("torch_adam with offload",
     {**zero(2, offload_optimizer=CPU), "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
     "slow", "warning", "optimizer.params.torch_adam"),
    ("offload none with keys", zero(2, offload_optimizer={"device": "none", "pin_memory": True}), "offload-off",
     "warning", "zero_optimization.offload_optimizer.pin_memory"),
    ("two learning rates", {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}, "contradiction",
     "warning", "scheduler.params.warmup_max_lr"),
    ("tensor_parallel.enabled", {"tensor_parallel": {"enabled": True}}, "unknown-key", "error", "tensor_parallel.enabled"),
    ("compile.backend", {"compile": {"backend": "inductor"}}, "unknown-key", "error", "compile.backend"),
    ("scale keys in bf16", {"bf16": {"enabled": True, "loss_scale": 0}}, "unknown-key", "error", "bf16.loss_scale"),
    ("persitence", zero(3, stage3_param_persitence_threshold=1, **SAVES), "unknown-key", "error",
     "zero_optimization.stage3_param_persitence_threshold"),
    ("max_grad_norm as argument", {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "misplaced-key",
     "error", "optimizer.params.max_grad_norm"),
    ("max_grad_norm on top", {"max_grad_norm": 1}, "unknown-key", "error", "max_grad_norm"),
    ("zero a bool", {"zero_optimization": True}, "deprecated-key", "warning", "zero_optimization"),
    ("stage list of autotuning", {"zero_optimization": {"stage": [0, 1]}}, "type", "error", "zero_optimization.stage"),
    ("min_loss_scale 1000", fp16(min_loss_scale=1000), "min-loss-scale", "info", "fp16.min_loss_scale"),
    ("bf16 a bool", {"bf16": True}, "type", "error", "bf16"),
    ("static scale 1", fp16(loss_scale=1.0), "no-loss-scaling", "warning", "fp16.loss_scale"),
    ("bucket 0", zero(2, reduce_bucket_size=0), "range", "error", "zero_optimization.reduce_bucket_size"),
    ("aio inside zero", zero(3, aio={"block_size": 1}, **SAVES), "misplaced-key", "error", "zero_optimization.aio"),
    ("log", {"log": True}, "unknown-key", "error", "log"),
    ("cuda_visible_devices", {"cuda_visible_devices": "0"}, "unknown-key", "error", "cuda_visible_devices"),
    ("monitor_config", {"monitor_config": {}}, "unknown-key", "error", "monitor_config"),
    ("a misspelt section", {"zero_optimisation": {"stage": 3}}, "unknown-key", "error", "zero_optimisation"),
    ("a key at the wrong level", {"overlap_comm": True}, "misplaced-key", "error", "overlap_comm"),
    ("contiguous memory", {"activation_checkpointing":
                           {"contiguous_memory_optimization": True, "partition_activations": True}},
     "needs", "warning", "activation_checkpointing.contiguous_memory_optimization"),
    ("partition_activation", {"activation_checkpointing": {"partition_activation": True}}, "unknown-key", "error",
     "activation_checkpointing.partition_activation"),
    ("stage in quotes", {"zero_optimization": {"stage": "2"}}, "type", "error", "zero_optimization.stage"),
    ("stage 4", zero(4), "range", "error", "zero_optimization.stage"),
    ("clip below 0", {"gradient_clipping": -1.0}, "range", "error", "gradient_clipping"),
    ("clip a text", {"gradient_clipping": "1.0"}, "type", "error", "gradient_clipping"),
    ("steps_per_print ten", {"steps_per_print": "ten"}, "type", "error", "steps_per_print"),
    ("enabled true as text", {"bf16": {"enabled": "true"}}, "type", "error", "bf16.enabled"),
    ("a bucket with a fraction", zero(3, stage3_prefetch_bucket_size=15099494.4, **SAVES), "fraction", "error",
     "zero_optimization.stage3_prefetch_bucket_size"),
    ("accumulation in quotes", {"gradient_accumulation_steps": "8"}, "type", "error", "gradient_accumulation_steps"),
    ("fp16 and bf16", {"fp16": FP16}, "fp16-and-bf16", "error", "bf16.enabled"),
    ("fp16 at stage 0", {**fp16(), **zero(0)}, "fp16-stage-0", "warning", "fp16.enabled"),
    ("bf16 at stage 0", zero(0), "bf16-stage-0", "info", "bf16.enabled"),
    ("fp16 states", {**fp16(fp16_master_weights_and_grads=True), **zero(2, offload_optimizer=CPU)}, "risky", "warning", "fp16.fp16_master_weights_and_grads"),
    ("a first scale that torch cannot take", fp16(initial_scale_power=64), "range", "error", "fp16.initial_scale_power"),
    ("hysteresis 0", fp16(hysteresis=0), "range", "error", "fp16.hysteresis"),
    ("total_num_steps 0", {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}}, "range", "error",
     "scheduler.params.total_num_steps"),
    ("no total_num_steps", {"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "needs", "error", "scheduler.params"),
    ("a misspelt schedule", {"scheduler": {"type": "WarmupDecay", "params": {}}}, "scheduler-type", "error",
     "scheduler.type"),
    ("a misspelt argument", {"optimizer": {"type": "AdamW", "params": {"weight_decai": 0}}}, "unknown-key", "error",
     "optimizer.params.weight_decai"),
    ("an untested optimizer", {"optimizer": {"type": "SGD", "params": {"lr": 1}}}, "untested-optimizer", "error",
     "optimizer.type"),
    ("Muon at stage 3", {**zero(3, **SAVES), "optimizer": {"type": "Muon", "params": {}}}, "muon-stage-3", "error",
     "optimizer.type"),
    ("Muon in 16 bit", {"bf16": {"enabled": True}, "gradient_clipping": 0.0, "optimizer": {"type": "Muon", "params": {}}},
     "muon-momentum", "warning", "optimizer.type"),
    ("Muon's norm", {"gradient_clipping": 0.0, "optimizer": {"type": "Muon", "params": {}}}, "muon-norm", "info",
     "optimizer.type"),
    ("Muon clipped", {"optimizer": {"type": "Muon", "params": {}}}, "muon-clipping", "warning", "optimizer.type"),
    ("nvme without a path", zero(3, offload_param={"device": "nvme"}, **SAVES), "needs", "error",
     "zero_optimization.offload_param.device"),
    ("nvme at stage 2", zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/n"}), "ignored-at-stage", "warning",
     "zero_optimization.offload_optimizer.device"),
    ("too few buffers on nvme", {**zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/n", "buffer_count": 3},
     **SAVES), "optimizer": {"type": "AdamW", "params": {"lr": 1}}}, "needs", "error",
     "zero_optimization.offload_optimizer.buffer_count"),
    ("a device that is none", zero(2, offload_optimizer={"device": "gpu"}), "choice", "error",
     "zero_optimization.offload_optimizer.device"),
    ("saves nothing", zero(3), "saves-nothing", "warning", "zero_optimization.stage"),
    ("fp32 accumulation at 0", {**zero(0), "data_types": {"grad_accum_dtype": "fp32"}}, "grad-accum-dtype", "error",
     "data_types.grad_accum_dtype"),
    ("autocast beside bf16", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "contradiction", "warning",
     "torch_autocast.enabled"),
    ("float16 autocast", {"bf16": OFF, "torch_autocast": {"enabled": True, "dtype": "float16"}}, "autocast-float16",
     "warning", "torch_autocast.dtype"),
    ("bf16 masters alone", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "needs", "error",
     "bf16.bf16_master_weights_and_grads"),
    ("bf16 states alone", bf16(bf16_optimizer_states=True), "needs", "error", "bf16.bf16_optimizer_states"),
    ("bf16 masters at 0", {**bf16(bf16_master_weights_and_grads=True), **zero(0)}, "stage", "error",
     "bf16.bf16_master_weights_and_grads"),
    ("bf16 masters with torch's Adam", {**bf16(bf16_master_weights_and_grads=True), **zero(2, offload_optimizer=CPU),
     **adam(torch_adam=True)}, "needs", "error", "bf16.bf16_master_weights_and_grads"),
    ("bf16 masters of another optimizer", {**bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
     **zero(2, offload_optimizer=CPU), "optimizer": {"type": "Lion", "params": {}}}, "needs", "error",
     "bf16.bf16_master_weights_and_grads"),
    ("bf16 masters that nothing reads", {**bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
     **zero(1), "data_types": {"grad_accum_dtype": "fp32"}}, "ignored", "warning", "bf16.bf16_master_weights_and_grads"),
    ("bf16 masters of fp32 weights", {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True,
     "bf16_optimizer_states": True}}, "contradiction", "warning", "bf16.bf16_master_weights_and_grads"),
    ("immediate update that nothing reads", {**bf16(immediate_grad_update=True), **zero(1)}, "ignored", "warning",
     "bf16.immediate_grad_update"),
    ("fp16 masters without offload", fp16(fp16_master_weights_and_grads=True), "needs", "error",
     "fp16.fp16_master_weights_and_grads"),
    ("AMSGrad of the fused Adam", adam(amsgrad=True), "needs", "error", "optimizer.params.amsgrad"),
    ("maximize of the fused Adam", adam(maximize=True), "needs", "error", "optimizer.params.maximize"),
    ("bias_correction of torch's Adam", adam(torch_adam=True, bias_correction=False), "needs", "error",
     "optimizer.params.bias_correction"),
    ("set_grad_none of the CPU Adam", {**adam(set_grad_none=True), **zero(2, offload_optimizer=CPU)}, "needs", "error",
     "optimizer.params.set_grad_none"),
    ("lr_decay of the CPU Adagrad", {"optimizer": {"type": "Adagrad", "params": {"lr_decay": 0.1}},
     **zero(2, offload_optimizer=CPU)}, "needs", "error", "optimizer.params.lr_decay"),
    ("legacy_fusion at stage 2", {"optimizer": {"type": "Adam", "params": {}, "legacy_fusion": True}},
     "ignored-at-stage", "warning", "optimizer.legacy_fusion"),
    ("warm-up downwards", schedule("WarmupLR", warmup_min_lr=0.01, warmup_max_lr=0.001), "order", "warning",
     "scheduler.params.warmup_min_lr"),
    ("warm-up below the default's top", schedule("WarmupLR", warmup_min_lr=0.01), "order", "warning",
     "scheduler.params.warmup_min_lr"),
    ("decay downwards", schedule("WarmupDecayLR", total_num_steps=9, warmup_min_lr=2, warmup_max_lr=1), "order",
     "warning", "scheduler.params.warmup_min_lr"),
    ("a cycle downwards", schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.01), "order", "warning",
     "scheduler.params.cycle_min_lr"),
    ("momentum downwards", schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1, cycle_max_mom=0.7), "order",
     "warning", "scheduler.params.cycle_max_mom"),
    ("a cosine that rises", schedule("WarmupCosineLR", total_num_steps=9, cos_min_ratio=10), "order", "warning",
     "scheduler.params.cos_min_ratio"),
    ("a warm-up from above", schedule("WarmupCosineLR", total_num_steps=9, warmup_min_ratio=2), "order", "warning",
     "scheduler.params.warmup_min_ratio"),
    ("a warm-up of no kind", schedule("WarmupLR", warmup_type="linaer"), "choice", "warning",
     "scheduler.params.warmup_type"),
    ("a cycle of no steps", schedule("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_first_step_size=0), "range",
     "error", "scheduler.params.cycle_first_step_size"),
    ("a range test of no steps", schedule("LRRangeTest", lr_range_test_step_size=0), "range", "error",
     "scheduler.params.lr_range_test_step_size"),
    ("betas that OneCycle replaces", {**adam(betas=[0.9, 0.95]), **schedule("OneCycle", cycle_min_lr=0, cycle_max_lr=1)},
     "contradiction", "warning", "optimizer.params.betas"),
    ("fp16 sums of bf16 gradients", {"communication_data_type": "fp16"}, "risky", "warning", "communication_data_type"),
    ("a remark in a strict section", zero(2, _note="x"), "comment-in-strict-section", "error",
     "zero_optimization._note"),
    ("a section that is null", {"fp16": None}, "type", "error", "fp16"),
    ("a secret", {"comet": {"enabled": True, "api_key": "k"}}, "secret", "warning", "comet.api_key"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "code", "severity", "key"), [row[1:] for row in MISTAKES], ids=[r[0] for r in MISTAKES]
)
def test_a_mistake_is_named(config: dict[str, Any], code: str, severity: str, key: str) -> None:
    finding = the(code, config)
    assert (finding.severity, finding.key) == (severity, key)
    assert finding.line is not None
    assert finding.message.startswith(key)


def test_bf16_masters_where_deepspeed_takes_them() -> None:
    masters = bf16(bf16_master_weights_and_grads=True)
    both = bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    offload = zero(2, offload_optimizer=CPU)
    for config in ({**masters, **offload}, {**both, **offload}, both, {**both, **adam(torch_adam=True)}):
        assert [finding for finding in found(config) if finding.severity != "info"] == []


def test_ten_thousand_unknown_keys_are_told_in_seconds() -> None:
    """Names are compared with all known ones for the first hundred only."""
    wrong = [f for f in found({f"kay_{n}": n for n in range(10_000)} | {"fp61": {}}) if f.severity == "error"]
    assert len(wrong) == 10_001 and all(f.hint for f in wrong)


def test_offload_without_an_optimizer_section() -> None:
    config = {key: value for key, value in GOOD.items() if key != "optimizer"}
    text = json.dumps({**config, **zero(2, offload_optimizer=CPU)})
    assert the("offload-optimizer", text).severity == "warning"
    assert not [f for f in found(text.replace('{"train', '{"zero_force_ds_cpu_optimizer": false, "train')) if
                f.code == "offload-optimizer"]  # fmt: skip


def test_what_is_not_turned_on_is_said() -> None:
    assert the("fp32", {"bf16": OFF}).severity == "info"
    text = json.dumps({key: value for key, value in GOOD.items() if key != "gradient_clipping"})
    assert the("clipping-default", text).severity == "info"


@pytest.mark.parametrize(
    ("version", "does"),
    [
        ("0.18", "does not clip"),
        ("0.19.2", "does not clip"),
        ("0.19.3", "clips at 1.0"),
        ("0.19.8", "clips at 1.0"),
    ],
)
def test_clipping_that_is_left_out_is_said_for_the_version(version: str, does: str) -> None:
    text = json.dumps({key: value for key, value in GOOD.items() if key != "gradient_clipping"})
    message = the("clipping-default", text, version=version).message
    assert message == f"gradient_clipping is not written: DeepSpeed {version} then {does}"


def test_torch_adam_is_right_on_a_cpu() -> None:
    config = {
        **zero(2, offload_optimizer=CPU),
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    assert the("slow", config).severity == "warning"
    assert not [f for f in found(config, devices=(lookup_device("cpu"),)) if f.code == "slow"]


def test_a_key_turned_off_by_a_hash() -> None:
    """DeepSpeed ignores it; putting the key back is not what its writer wants."""
    finding = the("unknown-key", {"#flops_profiler": {"enabled": True}})
    assert (finding.severity, finding.fix) == ("error", None)
    assert '"_flops_profiler"' in str(finding.hint)


def test_every_error_has_one_thing_to_do() -> None:
    for row in MISTAKES:
        assert [f for f in found(row[1]) if f.severity == "error" and not f.hint] == []


def test_remarks_are_no_keys() -> None:
    assert found({"_comment": 1, "// note": 2, "x-mine": {"a": 1}}) == found({})


def test_hints_name_what_was_meant() -> None:
    assert the("unknown-key", {"gradient_clipp1ng": 1}).hint == "did you mean gradient_clipping?"
    assert "initial_scale_power" in str(the("unknown-key", fp16(initial_scale_pwer=3)).hint)
    assert the("misplaced-key", {"overlap_comm": True}).hint == "overlap_comm belongs in zero_optimization"
    assert "15099494" in str(the("fraction", zero(3, stage3_prefetch_bucket_size=15099494.4, **SAVES)).fix)
    assert "4" in the("type", {"gradient_accumulation_steps": "4"}).message


@pytest.mark.parametrize(
    ("code", "config", "hint"),
    [
        (
            "fraction",
            fp16(min_loss_scale=0.5),
            "it must be greater than 0 and at most 1e308; the default is 1",
        ),
        ("fraction", zero(2, reduce_bucket_size=0.4), "it must be greater than 0; the default is 500000000"),
        ("fraction", {"zero_optimization": {"stage": 3.6}}, None),
        ("type", fp16(min_loss_scale="0"), None),
        ("type", {"gradient_clipping": "-1"}, None),
    ],
)
def test_no_number_out_of_range_is_proposed(code: str, config: dict[str, Any], hint: str | None) -> None:
    finding = the(code, config)
    assert (finding.fix, finding.edits) == (None, ())
    assert hint is None or finding.hint == hint


def test_numbers_as_people_write_them() -> None:
    """5e8 is a whole number to DeepSpeed."""
    text = json.dumps(GOOD)[:-1] + ', "steps_per_print": 1e5}'
    assert not [f for f in found(text) if f.severity == "error"]
    assert not [f for f in found(zero(2, reduce_bucket_size=5e8)) if f.severity == "error"]


@pytest.mark.parametrize(
    ("gpu", "precision", "severity"),
    [
        ("v100", "bf16", "warning"),
        ("t4", "bf16", "warning"),
        ("a100", "bf16", None),
        ("a100", "fp16", None),
        ("v100", "fp16", None),
        ("p100", "fp16", "error"),
        ("cpu", "fp16", "error"),
        ("cpu", "bf16", None),
    ],
)
def test_precision_against_the_device(gpu: str, precision: str, severity: str | None) -> None:
    config = fp16() if precision == "fp16" else {}
    findings = [f for f in found(config, devices=(lookup_device(gpu),)) if f.code == "device"]
    assert [f.severity for f in findings] == ([severity] if severity else [])


def test_the_weakest_of_several_devices_counts() -> None:
    devices = (lookup_device("a100"), lookup_device("v100"))
    assert "v100" in the("device", {}, devices=devices).message


def test_bf16_sums_over_amd_devices() -> None:
    finding = the("communication-type", {}, devices=(lookup_device("mi300x"),))
    assert (finding.severity, finding.key) == ("info", "bf16.enabled")
    for config in ({"communication_data_type": "fp32"}, fp16()):
        assert not [f for f in found(config, devices=(lookup_device("mi300x"),)) if f.code == finding.code]
    assert not [f for f in found({}, devices=(lookup_device("a100"),)) if f.code == finding.code]


def test_gds_on_a_cpu() -> None:
    assert the("device", {"aio": {"use_gds": True}}, devices=(lookup_device("cpu"),)).severity == "error"
    assert not [f for f in found({"aio": {"use_gds": True}}) if f.code == "device"]


def test_auto_may_be_fp16() -> None:
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "initial_scale_power": 32}}
    assert the("initial-scale", config, reader="hf-trainer").severity == "info"


def test_versions() -> None:
    newer = zero(2, parameter_alignment=True)
    assert the("too-new", newer, version="0.18.3").severity == "error"
    assert not [f for f in found(newer) if f.code == "too-new"]
    assert not [f for f in found({"amp": {"enabled": False}}, version="0.18.3") if f.code == "removed-key"]
    overlapping = zero(2, overlap_comm=True)
    assert the("overlap-race", overlapping, version="0.14.5").severity == "warning"
    assert not [f for f in found(overlapping) if f.code == "overlap-race"]
    assert the("unknown-version", {}, version="0.30.0").severity == "info"
    assert the("unknown-version", {}, version="0.7.0").severity == "info"
