"""Clipping and norms in every precision, results read late, and what is refused."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.errors import ConfigError, EnvironmentNotReady
from dslaunch.train.engine import ds_config
from dslaunch.train.engine.version import TESTED_DEEPSPEED, check_deepspeed_version
from tests.train.case_results import CaseResults

CLIP_CELLS = [f"clip/{s}/{p}" for s in (0, 1, 2, 3) for p in ("fp32", "bf16", "fp16")]


@pytest.mark.parametrize("cell", [*CLIP_CELLS, "clip/1/bf16-accum32"])
def test_gradient_3_4_clipped_to_1(two_ranks: CaseResults, cell: str) -> None:
    result = two_ranks[cell]
    assert result["grad_norm"] == pytest.approx(5.0, rel=1e-7)  # unscaled, before the clip
    assert result["grad_norm_clipped"] == pytest.approx(5.0 / 5.000001, rel=1e-7)
    assert result["end"] == pytest.approx([-3.0 / 5.000001, -4.0 / 5.000001], rel=2e-7)
    assert result["loss_scale"] == (1024.0 if cell.endswith("fp16") else 1.0)


@pytest.mark.parametrize("cell", [*(f"autocast/{s}/bfloat16" for s in (0, 1, 2, 3)), "autocast/0/float16"])
def test_autocast_clips_and_skips(two_ranks: CaseResults, cell: str) -> None:
    """Gradient (3, 4), inf, (3, 4) with clip 1: norm, skipped, weights."""
    x, y = -3.0 / 5.000001, -4.0 / 5.000001
    first, second, third = two_ranks[cell]["steps"]
    assert first == pytest.approx([5.0, False, x, y], rel=2e-7)
    assert second == [float("inf"), True, *first[2:]]
    assert third == pytest.approx([5.0, False, 2 * x, 2 * y], rel=2e-7)


@pytest.mark.parametrize("cell", ["0/fp32", "3/bf16", "3/fp16"])
def test_without_an_optimizer_it_runs_forward(two_ranks: CaseResults, cell: str) -> None:
    assert two_ranks[f"frozen/{cell}"] == [6.0, int(cell[0]), 1.0]


def test_an_optimizer_may_be_given_as_a_callable(two_ranks: CaseResults) -> None:
    assert two_ranks["callable"] == [1, -1.0]


def test_an_elementwise_optimizer_of_ones_own_gets_the_flags_that_deepspeed_asks_for_and_a_note(
    two_ranks: CaseResults,
) -> None:
    (vouched,), trained = two_ranks["own/2"]
    assert vouched.startswith("zero_allow_untested_optimizer is set: SGD treats each element by itself")
    (vouched, offloaded), also = two_ranks["own/3/offload"]
    assert offloaded.startswith(
        "offload_optimizer cpu with an optimizer of your own: zero_force_ds_cpu_optim"
    )
    assert vouched and trained == also == [-1.0]
    said, by_a_function = two_ranks["own/2/function"]  # of which nobody knows the class yet
    assert said == [] and by_a_function == pytest.approx([-1.0], rel=1e-6)


def test_no_flag_is_given_that_nobody_asked_for_or_over_the_users_own() -> None:
    stage_2 = {"zero_optimization": {"stage": 2}}
    for name, is_client in (("AdamW", True), ("Lion", False), ("<lambda>", True), (None, False)):
        assert ds_config.vouch_for_elementwise(stage_2, name, is_client=is_client) == (stage_2, None)
    refusing = {**stage_2, "zero_allow_untested_optimizer": False}
    assert ds_config.vouch_for_elementwise(refusing, "Lion", is_client=True) == (refusing, None)
    cpu = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    forcing = {**cpu, "zero_force_ds_cpu_optimizer": True}
    for config, name in ((stage_2, "SGD"), (cpu, "DeepSpeedCPUAdam"), (forcing, "SGD")):
        assert ds_config.let_own_optimizer_be_offloaded(config, name) == (config, None)
    assert ds_config.let_own_optimizer_be_offloaded(cpu, "DeepSpeedCPUAdagrad")[1] is not None


def test_a_flag_of_one_rank_reaches_the_others_and_results_may_be_read_late(two_ranks: CaseResults) -> None:
    # Loss w * step + step with w = 0, 0, -1: 0, 1, 0. Rank 1 reads nothing, and nothing hangs.
    assert two_ranks["lazy"] == {"flags": [False, True, False], "losses": [0.0, 1.0, 0.0]}
    assert two_ranks.of_rank(1, "lazy") == {"read": "nothing"}


def test_token_counts_must_be_positive_and_one_per_window(two_ranks: CaseResults) -> None:
    zero, changed = two_ranks["token-counts"]
    assert zero == "ConfigError: step 0: 0 supervised tokens in the whole batch"
    assert changed.startswith("ValueError: num_tokens changed inside an accumulation window, from 5 to 6")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("both", "fp16.enabled and bf16.enabled are both true"),
        ("autocast", "torch_autocast.dtype float16 with zero_optimization.stage 2"),
        ("adafactor", "Adafactor with bf16 at zero_optimization.stage 0"),
        ("callable", "Adafactor with bf16 at zero_optimization.stage 0"),
        ("shards", "Adafactor at zero_optimization.stage 2: ZeRO gives it flat shards"),
        ("enabled", "bf16.enabled is 'yes'; it must be true or false"),
        ("batch", "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 7"),
        ("stage", "zero_optimization.stage is 5; it must be 0, 1, 2 or 3"),
        ("mics", "DeepSpeed 0.19.8 refuses this configuration: MiCS ZeRO-3 sharding has been removed"),
        ("norm", "zero_optimization.compute_grad_norm is false"),
        ("check", "bf16.check_grad_overflow is false"),
        ("muon", "Muon as an optimizer of your own at zero_optimization.stage 2"),
        ("muon-offload", "Muon with offload_optimizer cpu: its matrix products would run on the CPU"),
        ("muon-key", "optimizer.params.per_head_muon True: dslaunch's Muon"),
        ("path", "cannot read the DeepSpeed config nowhere/ds.json: No such file or directory"),
    ],
)
def test_refused_with_one_sentence_on_every_rank(two_ranks: CaseResults, case: str, words: str) -> None:
    for rank in range(two_ranks.world_size):
        error = two_ranks.of_rank(rank, f"refused/{case}")
        assert error.startswith("ConfigError: ")
        assert words in error
        assert "\n" not in error


def test_an_untested_deepspeed_is_refused_unless_its_version_is_named(two_ranks: CaseResults) -> None:
    refused, _ = two_ranks["version/unknown"]
    assert refused.startswith("EnvironmentNotReady: DeepSpeed 0.99.1+cu130 was never tested here, only 0.19")
    assert two_ranks["version/allowed"] == [
        "accepted",
        ["DeepSpeed 0.99.1+cu130 is untested here and allowed by name (allow_untested_deepspeed)"],
    ]
    refused, _ = two_ranks["version/another"]
    assert "allow_untested_deepspeed names 0.99.2" in refused


def test_the_tested_version_is_the_one_that_is_pinned() -> None:
    pins = (Path(__file__).resolve().parents[3] / "constraints.txt").read_text().splitlines()
    assert f"deepspeed=={TESTED_DEEPSPEED[-1]}" in pins
    with pytest.raises(EnvironmentNotReady) as caught:
        check_deepspeed_version("0.20.1")
    assert caught.value.exit_code == 3
    assert caught.value.hint is not None
    assert "`dslaunch doctor --numerics`" in caught.value.hint
    assert "allow_untested_deepspeed: 0.20.1" in caught.value.hint
    shown = "".join(traceback.format_exception(caught.value))  # of a script that does not catch it
    assert caught.value.hint in shown or sys.version_info < (3, 11)


# The config alone, without ranks


def test_a_muon_of_ones_own_is_refused_under_zero_alone() -> None:
    stage_2 = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match="Muon as an optimizer of your own at"):
        ds_config.refuse_client_muon(stage_2, "Muon")
    ds_config.refuse_client_muon({}, "Muon")
    ds_config.refuse_client_muon(stage_2, "AdamW")


def test_a_config_file_may_have_comments_but_no_key_twice(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{ # a comment\n  "bf16": {"enabled": true}, "zero_optimization": {"stage": 2} }')
    loaded = ds_config.load_ds_config(path)
    assert (ds_config.precision_of(loaded), ds_config.zero_stage_of(loaded)) == ("bf16", 2)
    path.write_text('{"train_batch_size": 1, "train_batch_size": 2}')
    with pytest.raises(ConfigError, match="train_batch_size"):
        ds_config.load_ds_config(path)
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="holds a list, not a JSON object"):
        ds_config.load_ds_config(path)


def test_the_callers_config_is_left_as_it_was() -> None:
    given: dict[str, Any] = {
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW"},
    }
    own = ds_config.load_ds_config(given)
    changed, note = ds_config.run_16bit_stage_0_as_stage_1(own, None)
    assert changed["zero_optimization"]["stage"] == 1 and note is not None
    assert given["zero_optimization"]["stage"] == 0 and own["zero_optimization"]["stage"] == 0


def test_fp32_and_higher_stages_are_not_touched() -> None:
    for given in (
        {"zero_optimization": {"stage": 0}},
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
    ):
        assert ds_config.run_16bit_stage_0_as_stage_1(given, None) == (given, None)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "FusedAdam", "AdEMAMix"])
def test_elementwise_optimizers_may_be_flattened(name: str) -> None:
    config, note = ds_config.run_16bit_stage_0_as_stage_1({"bf16": {"enabled": True}}, name)
    assert config["zero_optimization"] == {"stage": 1} and note is not None


@pytest.mark.parametrize("name", ["Adafactor", "Lamb", "LARS", "Muon", "SomethingOfMine"])
def test_optimizers_that_look_at_whole_tensors_may_not(name: str) -> None:
    with pytest.raises(ConfigError, match="flattens the parameters"):
        ds_config.run_16bit_stage_0_as_stage_1({"bf16": {"enabled": True}}, name)
    vouched = {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    assert ds_config.run_16bit_stage_0_as_stage_1(vouched, name)[1] is not None


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", "fp16", "half"])
def test_float16_autocast_is_refused_in_every_spelling(dtype: str) -> None:
    block = {"enabled": True, "dtype": dtype}
    with pytest.raises(ConfigError, match="skips every step"):
        ds_config.refuse_fp16_autocast_under_zero(
            {"torch_autocast": block, "zero_optimization": {"stage": 1}}
        )
    ds_config.refuse_fp16_autocast_under_zero({"torch_autocast": block, "zero_optimization": {"stage": 0}})
    ds_config.refuse_fp16_autocast_under_zero(
        {"torch_autocast": {**block, "enabled": False}, "zero_optimization": {"stage": 1}}
    )
