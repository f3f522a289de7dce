"""Save and resume are bit-exact in every stage and precision; what is broken is never loaded.

All cases run once, on two ranks (ranks_checkpoint.py).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from safetensors import SafetensorError

from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.train.checkpoint.save import _write_errors
from tests.train.case_results import CaseResults, run_case_ranks

PRECISIONS = ("fp32", "bf16", "bf16-accum32", "fp16")
CELLS = [f"resume/{stage}/{precision}" for stage in (0, 1, 2, 3) for precision in PRECISIONS]


@pytest.fixture(scope="module")
def saved(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_case_ranks(
        "tests.train.checkpoint.ranks_checkpoint", tmp_path_factory.mktemp("checkpoints"), 2
    )


@pytest.mark.parametrize("cell", CELLS)
def test_resumed_equals_straight_to_the_last_bit(saved: CaseResults, cell: str) -> None:
    """Loss, norm, rate, scale, weights and the draws of three generators, on each rank.

    With dropout, accumulation, clipping, a schedule, and (fp16) overflows and growths
    on both sides of the save.
    """
    for rank in range(saved.world_size):
        result = saved.of_rank(rank, cell)
        assert result["resumed"] == result["straight"]
        assert result["resumed_end"] == result["straight_end"]
        assert result["continued"] == result["straight"]  # saving disturbs nothing
        assert result["extra"] == {"position": [6, "a"]}
        assert result["step"] == 6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_scale_grew_and_steps_were_skipped_in_the_resumed_part(saved: CaseResults, stage: int) -> None:
    """So that the test above says something about the loss scale."""
    result = saved[f"resume/{stage}/fp16"]
    scales = [record[4] for record in result["resumed"]]
    assert any(b > a for a, b in pairwise(scales))
    assert result["skipped"] == 3


def test_ranks_draw_different_numbers(saved: CaseResults) -> None:
    """So that one rank's generators could not pass for the other's."""
    first, second = (saved.of_rank(rank, "resume/1/fp32")["resumed"] for rank in (0, 1))
    assert [r[5:] for r in first] != [r[5:] for r in second]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_to_fp32_reads_the_masters_back(saved: CaseResults, stage: int, precision: str) -> None:
    """Odd sizes, so shards are padded; every bit is that of the optimizer's fp32 weights."""
    result = saved[f"converted/{stage}/{precision}"]
    assert result["read"] == result["held"]


def test_upstream_cannot_convert_bf16_with_fp32_accumulation_at_stage_1(saved: CaseResults) -> None:
    """F12, cured in dslaunch/train/engine/cures.py."""
    assert "is not a zero checkpoint" in saved["bare-converted"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_are_left_out_and_missing_ones_noticed(saved: CaseResults, stage: int) -> None:
    result = saved[f"adapters/{stage}"]
    assert result["resumed"] == result["expected"]
    if stage < 3:
        assert result["keys"] == ["head.bias", "head.weight"]
    assert result["error"].startswith("ConfigError: checkpoint ")
    assert "trained parameter embedding.weight has shape none: not saved" in result["error"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("truncated", "bytes, the manifest says"),
        ("missing", "optim_states.pt: No such file or directory"),
        ("flipped", "is not what was saved (SHA-256 differs)"),
        ("no-manifest", "has no manifest.json: saving it did not finish"),
        ("bad-manifest", "is not a manifest"),
        ("no-rng", "rng/rank-1.json: No such file or directory"),
    ],
)
def test_a_broken_checkpoint_is_passed_over_by_all_ranks(
    saved: CaseResults, damage: str, reason: str
) -> None:
    for rank in range(saved.world_size):
        result = saved.of_rank(rank, f"damaged/{damage}")
        assert (result["extra"], result["weight"], result["error"]) == ({"step": 1}, -1.0, None)
        (note,) = result["notes"]
        assert note.startswith("checkpoint step-2 is passed over: ")
        assert reason in note


@pytest.mark.parametrize(
    ("damage", "step"),
    [
        ("none", 2),
        ("latest-missing", 2),
        ("latest-empty", 2),
        ("latest-names-nothing", 2),
        ("half-saved", 2),
        ("latest-names-the-older", 1),
    ],
)
def test_which_checkpoint_is_loaded(saved: CaseResults, damage: str, step: int) -> None:
    result = saved[f"damaged/{damage}"]
    assert (result["extra"], result["weight"]) == ({"step": step}, -float(step))
    assert result["notes"] == []


def test_none_whole_is_an_error_and_none_at_all_is_not(saved: CaseResults) -> None:
    result = saved["damaged/all"]
    assert result["error"].startswith("ConfigError: no whole checkpoint in ")
    assert "step-2: " in result["error"] and "step-1: " in result["error"]
    assert result["weight"] == 0.0
    assert saved["nothing"] == {"loaded": None, "weight": [0.0]}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stage", "was saved with ZeRO stage 2, this run has 1"),
        ("precision", "was saved with precision bf16, this run has fp32"),
        ("world", "was saved with world size 4, this run has 2"),
        ("engine", "was saved with engine torch, this run has deepspeed"),
        ("shape", "trained parameter w has shape (3,), in this run (5,)"),
    ],
)
def test_what_differs_is_named_before_anything_is_loaded(saved: CaseResults, kind: str, words: str) -> None:
    for rank in range(saved.world_size):
        error = saved.of_rank(rank, "mismatch")[kind]
        assert error.startswith("ConfigError: ") and words in error
        assert saved.of_rank(rank, "mismatch")["none: an older manifest"] == "{'step': 2}"


def test_old_ones_are_pruned_and_newer_ones_are_not(saved: CaseResults) -> None:
    def steps(names: list[str]) -> list[str]:
        return [name for name in names if name.startswith((".", "step"))]

    result = saved["pruned"]
    assert steps(result["first"]) == ["step-10", "step-11"]
    assert steps(result["second"]) == ["step-10", "step-11", "step-3"]
    assert steps(result["third"]) == steps(result["second"])
    assert result["extra"] == {"again": True}  # `latest` follows the last save, not the largest step


def test_a_failed_write_leaves_the_old_checkpoint_and_the_next_save_works(saved: CaseResults) -> None:
    result = saved["full"]
    assert result["error"].startswith("EnvironmentNotReady: the checkpoint could not be written to ")
    assert result["latest"] == "step-2\n"
    assert result["intact"] == {"step": 2}
    assert [n for n in result["left"] if n.startswith((".", "step"))] == ["step-1", "step-2", "step-4"]


def test_a_save_killed_between_its_renames_loses_nothing(saved: CaseResults) -> None:
    for rank in range(saved.world_size):
        result = saved.of_rank(rank, "interrupted")
        assert result["loaded"] == {"step": 2}
        assert [n for n in result["left"] if n.startswith((".", "step"))] == ["step-1", "step-2", "step-3"]


def test_every_file_is_in_the_manifest_where_ranks_list_different_ones(saved: CaseResults) -> None:
    result = saved["stale-listing"]
    assert any("rank_1" in name for name in result["there"])
    assert result["manifest"] == result["there"]


def test_a_foreign_pickle_is_refused_before_it_runs(saved: CaseResults) -> None:
    for rank in range(saved.world_size):
        result = saved.of_rank(rank, "foreign-pickle")
        assert result["error"].startswith("ConfigError: ") and "refers to posix.system" in result["error"]
        assert (result["ran"], result["weight"]) == (False, 0.0)


def test_a_lost_rank_is_not_taken_for_a_full_disk(saved: CaseResults) -> None:
    assert saved["lost-peer"].startswith("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed")


@pytest.mark.parametrize(
    ("error", "is_write"),
    [
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), True),
        (RuntimeError("basic_ios::clear: iostream error"), True),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device"), True),
        (OSError(28, "No space left on device"), True),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (TimeoutError(110, "Connection timed out"), False),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), False),
        (ValueError("a bug"), False),
    ],
)
def test_which_errors_are_failed_writes(tmp_path: Path, error: Exception, is_write: bool) -> None:
    with pytest.raises(EnvironmentNotReady if is_write else type(error)), _write_errors(tmp_path):
        raise error


def test_too_little_room_is_noticed_before_writing(saved: CaseResults) -> None:
    for rank in range(saved.world_size):
        error = saved.of_rank(rank, "no-room")
        assert error.startswith("EnvironmentNotReady: ")
        assert "a checkpoint needs about" in error and "no checkpoint was written" in error


def test_a_root_that_cannot_be_made(saved: CaseResults) -> None:
    for rank in range(saved.world_size):
        assert "a-file/checkpoints: Not a directory" in saved.of_rank(rank, "not-writable")


def test_a_rank_that_never_comes_is_named(saved: CaseResults) -> None:
    error = saved["missing-rank"]
    assert error.startswith("LaunchFailed: not every rank reached save_state of ")
    assert "step-5 within 1 s" in error
    assert "1" in error.split("Ranks", 1)[1]
