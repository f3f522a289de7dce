"""What a host needs, against what it has."""

from __future__ import annotations

import dataclasses

import pytest

from dslaunch.config.memory.alternatives import nearest_that_fits, rank_alternatives
from dslaunch.config.memory.host import PROCESS_BYTES
from dslaunch.config.memory.larger_changes import larger_changes
from dslaunch.config.memory.planner import MemoryPlan, plan_memory
from dslaunch.config.memory.setup import Setup, ZeroOptions
from tests.config.memory.models import LLAMA_2_7B, LLAMA_2_13B, LLAMA_3_70B, setup

BOTH = ZeroOptions(offload_optimizer="cpu", offload_param="cpu")


def one_gpu(**changes: object) -> Setup:
    return setup(LLAMA_2_13B, zero_stage=3, world_size=1, ranks_per_host=1, zero=BOTH, **changes)


def on_host(plan: MemoryPlan, when: str) -> int:
    return sum(item.size for item in plan.host if when in item.when)


def test_13_billion_parameters_with_both_offloads_need_more_than_64_gib() -> None:
    """Master weights, states, both gradients and the weights: 20 bytes for each of 13 billion."""
    plan = plan_memory(one_gpu(), 80, host_gib=64)
    offloaded = sum(item.size for item in plan.host if item.name.endswith("(offloaded)"))
    assert offloaded == 20 * one_gpu().numel
    assert (plan.device_fits, plan.host_fits, plan.fits) == (True, False, False)
    assert plan.host_peak_bytes == PROCESS_BYTES + offloaded + 12 * one_gpu().numel
    assert (plan.host_phase, plan.host_binds) == ("resuming", "checkpoint being read")
    assert plan_memory(one_gpu(), 80, host_gib=512).fits is True


def test_an_unknown_host_leaves_the_verdict_to_the_device() -> None:
    plan = plan_memory(one_gpu(), 80)
    assert (plan.host_fits, plan.fits) == (None, True)
    assert plan_memory(one_gpu(), None, host_gib=512).fits is None
    assert plan_memory(one_gpu(), None, host_gib=64).fits is False


def test_on_a_cpu_the_host_decides() -> None:
    cpu = setup(device_type="cpu", world_size=2, ranks_per_host=2)
    needed = plan_memory(cpu).host_peak_bytes / 2**30
    assert plan_memory(cpu, host_gib=needed + 1).fits is True
    assert plan_memory(cpu, host_gib=needed - 1).fits is False


def test_mapped_files_are_no_need() -> None:
    """The kernel drops their pages where memory is short: 141 GB of weights load on a smaller host."""
    plan = plan_memory(setup(LLAMA_3_70B, "qlora", zero_stage=2, world_size=1, ranks_per_host=1))
    assert on_host(plan, "page cache") == 2 * setup(LLAMA_3_70B).numel
    assert plan.host_peak_bytes < 6 * 2**30


def test_loading_at_stage_3_holds_shards_only_where_they_live() -> None:
    away = plan_memory(setup(zero_stage=3, zero=BOTH))
    here = plan_memory(setup(zero_stage=3))
    assert on_host(away, "loading") == pytest.approx(2 * setup().numel, rel=1e-6)
    assert on_host(here, "loading") == 0
    cpu = setup(zero_stage=3, device_type="cpu")
    passing = on_host(plan_memory(cpu), "loading") - on_host(away, "loading")
    assert passing == pytest.approx(8 * 6 * 2 * 128256 * 4096, rel=1e-6)


def test_an_alternative_that_its_host_cannot_hold_does_not_fit_and_says_so() -> None:
    plain = setup(LLAMA_2_7B, world_size=1, ranks_per_host=1, max_length=2048)
    for host, fits in ((512.0, True), (64.0, False)):
        ranked = rank_alternatives(plain, 80, host_gib=host)
        offload = next(a for a in ranked if a.changes == ("--offload-optimizer cpu",))
        assert offload.plan.fits is fits
        assert offload.binds()["where"] == ("device" if fits else "host")
        assert (nearest_that_fits(ranked) is not None) is fits


def test_7_billion_on_a_small_host_are_told_what_would_fit() -> None:
    plain = setup(LLAMA_2_7B, zero_stage=3, zero=BOTH, world_size=1, ranks_per_host=1, max_length=2048)
    larger = larger_changes(plain, 80, 64)
    assert larger[0].changes == ("--method lora",)
    assert larger[1].changes[0].startswith("--num-nodes")
    assert "global batch" in larger[1].price


def test_pinned_memory_may_take_the_next_power_of_two() -> None:
    pinned = plan_memory(one_gpu(), 80)
    more = plan_memory(dataclasses.replace(one_gpu(), zero=dataclasses.replace(BOTH, pin_memory=True)), 80)
    rounding = more.host_peak_bytes - pinned.host_peak_bytes
    assert 0 < rounding <= sum(item.size for item in pinned.host if item.name.endswith("(offloaded)"))
    assert rounding == next(item.size for item in more.host if item.name.startswith("pinned memory"))


def test_nvme_leaves_buffers_in_the_host_and_the_rest_on_disk() -> None:
    nvme = ZeroOptions(offload_optimizer="nvme", offload_param="nvme", sub_group_size=10**8)
    plan = plan_memory(setup(zero_stage=3, zero=nvme))
    cpu = plan_memory(setup(zero_stage=3, zero=dataclasses.replace(BOTH, sub_group_size=10**8)))
    sizes = {item.name: item.size for item in plan.host}
    share = setup().numel // 8
    weights = next(i for i in plan.host if i.name == "weights (offloaded)" and i.when == ("on nvme",))
    # The last sub-group does not end within max_in_cpu, 10**9 elements.
    assert 0 < weights.size < 8 * 2 * 2 * 10**8
    assert on_host(plan, "on nvme") - weights.size == pytest.approx(8 * 16 * share, rel=1e-4)
    assert sizes["buffers for weights on nvme (offloaded)"] == 8 * 5 * 2 * 10**8
    room = sizes["room for the largest sub-group (offloaded)"]
    assert 8 * 8 * 2 * 10**8 <= room < 8 * 8 * 2 * 10**9, "tensors of one sub-group, undivided"
    assert sizes["weights (max_in_cpu) (offloaded)"] == pytest.approx(8 * 2 * 10**9, rel=0.01)
    assert sizes["gradients (offloaded)"] == pytest.approx(8 * 2 * share, rel=1e-4)
    assert on_host(plan, "training") < on_host(cpu, "training")


def test_stages_1_and_2_take_nvme_for_cpu() -> None:
    """stage_1_and_2.py asks only whether the device is none."""
    plans = [plan_memory(setup(zero=ZeroOptions(offload_optimizer=where))) for where in ("cpu", "nvme")]
    assert plans[0].host == plans[1].host
