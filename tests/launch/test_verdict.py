"""The words for how a launch ended."""

from __future__ import annotations

from pathlib import Path

from dslaunch.core.run_dir import RunDir
from dslaunch.launch.verdict import Outcome, RankEnd, describe_code, render_end, render_failure, summarise


def end(rank: int, code: int, *, asked: bool = False, tail: tuple[str, ...] = ()) -> RankEnd:
    return RankEnd(
        rank=rank, host="n1", code=code, seconds=1.25, max_rss_bytes=3 * 2**30, asked=asked, tail=tail
    )


def test_codes_in_words() -> None:
    assert describe_code(3, own_worker=True) == "exited with code 3 (the environment is not ready)"
    assert describe_code(3) == "exited with code 3"
    assert describe_code(42, own_worker=True) == "exited with code 42"
    assert describe_code(-9).startswith(
        "was killed by signal 9 (SIGKILL: often the kernel's out-of-memory killer"
    )
    assert "/dev/shm" in describe_code(-7)
    assert describe_code(-13) == "was killed by signal 13 (SIGPIPE)"
    assert describe_code(-40) == "was killed by signal 40"


def test_exit_code_as_a_shell_gives_it() -> None:
    assert [end(0, code).exit_code for code in (0, 7, -9, -40)] == [0, 7, 137, 168]


def test_the_last_block() -> None:
    first = end(5, -9, tail=tuple(f"line {i}" for i in range(30)))
    others = tuple(end(rank, -15, asked=True) for rank in range(20) if rank != 5)
    block = render_failure(Outcome(ends=(first, *others), first_failure=first), "/r/logs/rank-5.log")
    assert block == (
        "dslaunch: rank 5 on n1 failed first: it was killed by signal 9 (SIGKILL: often the kernel's "
        "out-of-memory killer: see `dmesg`, or use less host memory) 1.2 s after the start\n"
        "  peak memory  3.00 GiB resident\n"
        "  last lines of its stderr:\n"
        + "".join(f"    | line {i}\n" for i in range(18, 30))
        + "  log          /r/logs/rank-5.log\n"
        "  others       ranks 0, 1, 2, 3, 4, 6, 7, 8 and 11 more stopped by dslaunch (signal 15)\n"
        "  exit code    137\n"
    )


def test_ends_are_grouped() -> None:
    ends = [end(0, 0), end(1, -15, asked=True), end(2, 0), end(3, 1)]
    assert summarise(ends) == (
        "ranks 0, 2 ended (code 0); rank 1 stopped by dslaunch (signal 15); rank 3 ended (code 1)"
    )


def test_only_what_obeyed_was_stopped() -> None:
    codes = (-15, -9, 143, 75, 70, 0)
    assert [end(0, code, asked=True).was_stopped for code in codes] == [True, True, True, True, False, False]
    assert not end(0, -9).was_stopped


def test_a_signal_too_late_to_stop_anything_is_no_cancel() -> None:
    ends = (end(0, 0, asked=True), end(1, 0, asked=True))
    late = Outcome(ends=ends, cancelled_by=15, num_ranks=2)
    assert late.exit_code == 0
    assert "cancelled" not in render_end(late, RunDir(Path("/r")), shown=frozenset())
    assert Outcome(ends=ends, cancelled_by=15, num_ranks=3).exit_code == 143  # one had not even started


def test_the_resume_command_can_be_copied() -> None:
    stopped = Outcome(ends=(end(0, 75, asked=True),), cancelled_by=2, num_ranks=1, own_worker=True)
    text = render_end(stopped, RunDir(Path("/my runs/r")), shown=frozenset())
    assert text.splitlines()[-1] == "  '/my runs/r/launch.sh' --resume"
