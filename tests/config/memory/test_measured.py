"""The plan against DeepSpeed itself: two ranks, all stages x {full, LoRA} x accumulation, within 1 %."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks import REPO_ROOT, check_ranks, run_ranks

MOMENTS = {"rest", "after backward", "optimizer entry", "step peak"}


@pytest.mark.timeout(900)
def test_states_are_what_deepspeed_allocates(ops_dir: Path, tmp_path: Path) -> None:
    script = REPO_ROOT / "benchmarks" / "memory.py"
    check_ranks(run_ranks([script, "--worker", tmp_path], world_size=2, timeout_s=840))
    compared, wrong = set(), []
    for rank in (0, 1):
        for case, found in json.loads((tmp_path / f"rank-{rank}.json").read_text()).items():
            for moment, planned in found["planned"].items():
                measured = found["measured"][moment]
                compared.add((case, moment))
                if abs(planned - measured) > 0.01 * measured:
                    wrong.append(f"{case}, rank {rank}, {moment}: measured {measured}, planned {planned}")
    assert not wrong, "\n" + "\n".join(wrong)
    for stage in range(4):
        for method in ("full", "lora"):
            for accumulation in (1, 2):
                case = f"z{stage} {method} bf16 gas{accumulation}"
                assert {moment for name, moment in compared if name == case} == MOMENTS
    for stage in (2, 3):
        muon = f"z{stage} full bf16 gas1 Muon"
        assert {moment for name, moment in compared if name == muon} == MOMENTS
    ratio = "z3 full bf16 gas1 optimizer group20000 ratio0.3"
    sides = {"states on the device", "states in the host"}
    assert {moment for name, moment in compared if name == ratio} == sides | {"rest"}
