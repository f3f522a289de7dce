"""The activation formulas against what transformers really keeps, for a family of each kind."""

from __future__ import annotations

import itertools
import sys

import pytest

from tests.support.ranks import REPO_ROOT

sys.path.insert(0, str(REPO_ROOT / "benchmarks"))

KINDS = ("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "phi")
PLAIN, CHECKPOINTED = False, True


@pytest.mark.parametrize(
    ("family", "precision", "checkpointing"),
    [
        *itertools.product(KINDS, ["fp32"], [PLAIN]),
        *itertools.product(["llama", "gemma2"], ["bf16"], [PLAIN]),
        ("llama", "bf16", CHECKPOINTED),
    ],
)
def test_one_layer_keeps_what_the_plan_says(family: str, precision: str, checkpointing: bool) -> None:
    from activations import Case, layer_difference

    assert abs(layer_difference(Case(family, precision, checkpointing)).relative) < 0.002


@pytest.mark.parametrize(
    ("family", "precision", "checkpointing"),
    [("llama", "bf16", PLAIN), ("llama", "fp32", CHECKPOINTED), ("gpt_neox", "fp32", PLAIN)],
)
def test_logits_make_the_peaks_that_the_plan_says(family: str, precision: str, checkpointing: bool) -> None:
    from activations import Case, peak_differences

    peaks = list(peak_differences(Case(family, precision, checkpointing)))
    assert [found.moment for found in peaks] == ["forward", "backward"]
    for found in peaks:
        assert abs(found.relative) < 0.002, found
