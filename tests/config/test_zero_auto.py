"""zero_optimization's auto: the first candidate that fits, and what is said where none does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.hosts import resolve_hosts
from dslaunch.config.load import LoadedSpec, load_flags
from dslaunch.config.memory.architectures import dimensions, parameters
from dslaunch.config.memory.of_run import Training, setup_of_spec
from dslaunch.config.memory.planner import plan_memory
from dslaunch.config.memory.tensors import ModelFacts
from dslaunch.config.report import Report
from dslaunch.config.resolve import resolve
from dslaunch.config.spec import RunSpec
from dslaunch.config.zero import auto_keys
from dslaunch.config.zero_auto import settle_zero
from dslaunch.core.errors import ConfigError
from tests.config.build import engine_of, facts_of, load, resolved

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MODEL = ModelFacts(parameters(LLAMA_8B) or (), dimensions(LLAMA_8B), "config.json")
RUN = """\
model: {path: org/model, gradient_checkpointing: true}
data: {train: org/data, max_length: 2048}
train_batch_size: 8
train_micro_batch_size_per_gpu: 1
cluster: {num_nodes: 1, num_gpus_per_node: 8, gpu: %s}
zero_optimization: {stage: auto, offload_optimizer: auto, offload_param: auto}
"""


def settled(text: str, *overrides: str) -> LoadedSpec[RunSpec]:
    loaded = load(text, *overrides)
    return settle_zero(loaded, facts_of(loaded), MODEL)


def chosen(text: str, *overrides: str) -> tuple[Any, str | None, str | None]:
    spec = settled(text, *overrides).spec
    zero = spec.zero_optimization
    assert not auto_keys(spec)
    devices = [part.device if part else None for part in (zero.offload_optimizer, zero.offload_param)]
    return zero.stage, devices[0], devices[1]


def takes(text: str, stage: int, optimizer: str | None = None, param: str | None = None) -> float:
    """GiB of a device with the block written by hand."""
    values = [f"zero_optimization.stage={stage}"]
    values += [f"zero_optimization.offload_optimizer={optimizer or 'null'}"]
    values += [f"zero_optimization.offload_param={param or 'null'}"]
    engine, config, _ = engine_of(text, *values)
    loaded = load(text, *values)
    hosts = resolve_hosts(loaded.spec.cluster, facts_of(loaded))
    return (
        plan_memory(setup_of_spec(loaded.spec, engine, hosts, config, MODEL, "sdpa"), 1.0).total_bytes / 2**30
    )


# Each device with what the plan written by hand says of the one before: it does not fit.
@pytest.mark.parametrize(
    ("gpu", "usable", "wanted"),
    [
        ("h200", 138.9, (1, None, None)),
        ("a100-40g", 39.4, (2, None, None)),
        ("v100-32gb", 31.52, (3, None, None)),
        ("v100-16gb", 15.76, (3, "cpu", None)),
    ],
)
def test_the_first_that_fits_is_chosen(
    gpu: str, usable: float, wanted: tuple[int, str | None, str | None]
) -> None:
    text = RUN % gpu
    assert chosen(text) == wanted
    assert takes(text, *wanted) <= usable
    order: list[tuple[int, str | None, str | None]] = [(1, None, None), (2, None, None), (3, None, None)]
    order += [(1, "cpu", None), (2, "cpu", None), (3, "cpu", None), (3, None, "cpu"), (3, "cpu", "cpu")]
    for earlier in order[: order.index(wanted)]:
        assert takes(text, *earlier) > usable, earlier


def test_what_is_written_stays() -> None:
    text = RUN % "h200"
    assert chosen(text, "zero_optimization.stage=3") == (3, None, None)
    assert chosen(text, "zero_optimization.offload_optimizer=cpu") == (1, "cpu", None)
    assert chosen(text, "zero_optimization.offload_param=cpu") == (3, None, "cpu")


def test_pin_memory_is_kept_with_the_choice() -> None:
    text = (RUN % "v100-16gb").replace(
        "offload_optimizer: auto", "offload_optimizer: {device: auto, pin_memory: true}"
    )
    zero = settled(text).spec.zero_optimization
    assert zero.offload_optimizer is not None
    assert (zero.offload_optimizer.device, zero.offload_optimizer.pin_memory) == ("cpu", True)


def test_a_key_that_only_one_stage_reads_decides() -> None:
    assert chosen(RUN % "h200", "zero_optimization.stage3_prefetch_bucket_size=1000000") == (3, None, None)


def test_fp32_may_run_unsharded_and_16_bit_never() -> None:
    small = RUN % "b200"
    assert chosen(small, "precision=fp32", "adapter={}")[0] == 0
    assert chosen(small, "precision=bf16", "adapter={}")[0] == 1


def test_the_reason_is_in_the_plan_and_in_a_note() -> None:
    plan, notes = resolved_from(settled(RUN % "a100-40g"))
    reason = plan.origins["zero_stage"].reason
    assert reason.startswith("stage 2 fits: ")
    assert "of 39.4 GiB a device; stage 1 would take" in reason
    assert f"zero_optimization: {reason}" in notes


def resolved_from(loaded: LoadedSpec[RunSpec]) -> tuple[Any, tuple[str, ...]]:
    where = Path("/runs/r")
    return resolve(loaded, facts=facts_of(loaded), run_dir=where, cwd=where, python="/py", default_name="run")


def refused(text: str, *overrides: str) -> ConfigError:
    loaded = load(text, *overrides)
    with pytest.raises(ConfigError) as caught:
        settle_zero(loaded, facts_of(loaded), MODEL)
    assert caught.value.exit_code == 2
    return caught.value


def test_where_nothing_fits_the_nearest_change_that_does_is_named() -> None:
    text = (RUN % "a100-80g").replace("num_gpus_per_node: 8", "num_gpus_per_node: 1")
    error = refused(text, "zero_optimization.offload_optimizer=null", "zero_optimization.offload_param=null")
    assert error.message.startswith(
        "run.yaml:6: zero_optimization.stage auto: nothing fits; the least, stage 2, takes"
    )
    assert "of 78.8 GiB a device, most of it optimizer states" in error.message
    assert error.hint is not None
    assert error.hint.startswith("this fits, from stage 2: --set zero_optimization.offload_optimizer=cpu (")


def test_where_no_change_fits_what_costs_more_than_time_is_named() -> None:
    error = refused((RUN % "t4").replace("max_length: 2048", "max_length: 400000"))
    assert error.hint is not None
    assert error.hint.startswith(
        "from stage 3 with offload_optimizer cpu and offload_param cpu, these would fit:"
    )
    assert "--set data.max_length=2048" in error.hint
    assert "longer samples are cut" in error.hint


def test_an_unknown_device_is_asked_for() -> None:
    error = refused(RUN % "sm_80", "precision=bf16")
    assert error.message == (
        "run.yaml:6: zero_optimization.stage auto: how much memory the devices have is not known here"
    )


def test_an_adapter_that_matches_nothing_is_an_error_and_not_a_candidate_that_fails() -> None:
    assert "nope" in refused(RUN % "h200", "adapter.target_modules=nope").message


def test_other_problems_are_left_to_be_shown_all_at_once() -> None:
    loaded = settled(RUN % "h200", "train_batch_size=7")
    report = Report(loaded)
    assert not report.problems
    with pytest.raises(ConfigError, match="train_batch_size 7"):
        resolved_from(loaded)


def test_a_script_of_ones_own_says_what_it_trains() -> None:
    loaded = load_flags(
        ["zero_optimization.stage=auto", "cluster.gpu=v100-32gb", "cluster.num_gpus_per_node=8",
         "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=1"]
    )  # fmt: skip
    full = settle_zero(loaded, facts_of(loaded), MODEL, Training(max_length=256))
    lora = settle_zero(loaded, facts_of(loaded), MODEL, Training(method="lora", max_length=256))
    assert (full.spec.zero_optimization.stage, lora.spec.zero_optimization.stage) == (3, 1)
    assert full.notes[-1].endswith("(--method full, --max-length 256)")


def test_without_auto_everything_is_as_before() -> None:
    text = (RUN % "h200").replace("{stage: auto, offload_optimizer: auto, offload_param: auto}", "{stage: 2}")
    assert auto_keys(load(text).spec) == []
    plan, _ = resolved(text)
    assert dataclasses.asdict(plan)["zero_stage"] == 2


def test_offload_that_the_host_cannot_hold_is_not_chosen() -> None:
    """On one device nothing fits without offload, and that needs more RAM than 64 GiB."""
    one = (RUN % "a100-80g", "cluster.num_gpus_per_node=1")
    assert chosen(*one, "cluster.host_memory_gib=512") == (1, "cpu", None)
    error = refused(*one, "cluster.host_memory_gib=64")
    assert "GiB of 64.0 GiB RAM a host when training, most of it optimizer states" in error.message
    assert error.hint is not None
    assert "devices, a smaller" not in error.hint
    assert error.hint.endswith("; hosts with 138 GiB of RAM or more")


def test_what_could_only_not_be_resumed_there_is_taken_with_a_note() -> None:
    """Stage 1 with its optimizer in the host trains in 137 GiB of it, and reads a checkpoint in 231."""
    one = (RUN % "a100-80g", "cluster.num_gpus_per_node=1")
    loaded = settled(*one, "cluster.host_memory_gib=150")
    assert (loaded.spec.zero_optimization.stage, auto_keys(loaded.spec)) == (1, [])
    assert "cannot be resumed on such hosts: that takes " in loaded.notes[-1]
    assert "of 150.0 GiB RAM a host when resuming, most of it checkpoint being read" in loaded.notes[-1]
    assert not any("resumed" in note for note in settled(*one, "cluster.host_memory_gib=512").notes)


ALONE = RUN.replace("train_micro_batch_size_per_gpu: 1\n", "").replace("batch_size: 8", "batch_size: 64")


def test_a_micro_batch_that_was_our_own_choice_is_halved_until_it_fits() -> None:
    text = (ALONE % "a100-80g").replace("max_length: 2048", "max_length: 8192")
    loaded = settled(text)
    plan, notes = resolved_from(loaded)
    batch = plan.batch
    assert (batch.train_batch_size, batch.train_micro_batch_size_per_gpu) == (64, 2)
    assert batch.gradient_accumulation_steps == 4
    assert plan.launch.topology.world_size == 8
    reason = plan.origins["batch.train_micro_batch_size_per_gpu"].reason
    assert reason.startswith("by the memory plan: 4 would take ")
    assert f"train_micro_batch_size_per_gpu 2, {reason}" in notes
    assert loaded.spec.zero_optimization.offload_optimizer is None


def test_a_micro_batch_that_is_written_or_follows_stays() -> None:
    text = (ALONE % "a100-80g").replace("max_length: 2048", "max_length: 8192")
    for written in ("train_micro_batch_size_per_gpu=8", "gradient_accumulation_steps=1"):
        error = refused(text, written)
        assert "micro-batch" not in error.message
        assert error.hint is not None
        assert "--set train_micro_batch_size_per_gpu=1 --set gradient_accumulation_steps=8" in error.hint
    assert settled(ALONE % "h200", "data.max_length=512").spec.train_micro_batch_size_per_gpu is None


ON_CPU = ("cluster.gpu=cpu", "cluster.num_gpus_per_node=2", "precision=fp32")


def test_on_cpus_the_ram_of_a_host_decides() -> None:
    text = RUN % "cpu"
    assert chosen(text, *ON_CPU, "cluster.host_memory_gib=900") == (0, None, None)
    small = settled(text, *ON_CPU, "cluster.host_memory_gib=230")
    assert small.spec.zero_optimization.stage == 3
    assert "GiB of 230.0 GiB RAM a host; stage" in small.notes[-1]
    error = refused(text, *ON_CPU, "cluster.host_memory_gib=20")
    assert "nothing fits; the least, stage" in error.message
    assert "GiB of 20.0 GiB RAM a host when" in error.message


def test_ram_that_is_not_known_is_asked_for() -> None:
    assert refused(RUN % "cpu", *ON_CPU).hint == (
        "say it: cluster.host_memory_gib (--host-memory-gib), or set the value"
    )


RECOMPUTE = RUN.replace("gradient_checkpointing: true", "gradient_checkpointing: auto")
BY_HAND = RECOMPUTE.replace("stage: auto, offload_optimizer: auto, offload_param: auto", "stage: 2")


def recomputes(text: str, *overrides: str) -> tuple[bool, str]:
    loaded = settled(text, *overrides)
    assert not auto_keys(loaded.spec)
    assert isinstance(loaded.spec.model.gradient_checkpointing, bool)
    return loaded.spec.model.gradient_checkpointing, loaded.settled["model.gradient_checkpointing"]


def test_checkpointing_is_off_where_it_fits_without() -> None:
    assert recomputes(BY_HAND % "h100") == (False, "stage 2 fits: 46.6 GiB of 78.8 GiB a device")
    loaded = settled(BY_HAND % "h100")
    assert loaded.notes == (
        "model.gradient_checkpointing false: stage 2 fits: 46.6 GiB of 78.8 GiB a device",
    )
    assert "zero_stage" not in loaded.settled  # the stage is as written


def test_checkpointing_is_on_where_it_needs_it() -> None:
    used, why = recomputes(BY_HAND % "a100-40g")
    assert used
    assert why == (
        "stage 2, gradient checkpointing fits: 36.5 GiB of 39.4 GiB a device; "
        "stage 2 would take 46.6 GiB of 39.4 GiB a device, most of it weights"
    )


def test_checkpointing_comes_before_offload_and_after_a_higher_stage() -> None:
    used, why = recomputes(RECOMPUTE % "v100-32g")
    assert used and "stage 3, gradient checkpointing fits" in why and "; stage 3 would take" in why
    assert chosen(RECOMPUTE % "v100-32g") == (3, None, None)
    assert recomputes(RECOMPUTE % "h100")[0] is False


def test_16_bit_stage_0_that_is_written_and_torch_can_have_it_chosen_too() -> None:
    """They run what needs no sharding: DeepSpeed's stage 0 as stage 1, torch as it is."""
    text = BY_HAND.replace("stage: 2", "stage: 0")
    assert recomputes(text % "h100")[1].startswith("stage 0 fits")
    torch = BY_HAND.replace("zero_optimization: {stage: 2}", "engine: torch\nadapter: {r: 8}")
    assert recomputes(torch % "h100")[1].startswith("engine torch fits")


def test_checkpointing_auto_without_known_memory_or_where_nothing_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        settled(BY_HAND % "sm_80")
    assert caught.value.message.startswith(
        "run.yaml:1: model.gradient_checkpointing auto: how much memory the devices have is not known"
    )
    with pytest.raises(ConfigError) as caught:
        settled(BY_HAND % "v100-32g")
    assert "nothing fits; the least, stage 2, gradient checkpointing" in caught.value.message
    assert "--set zero_optimization.stage=3" in str(caught.value.hint)
