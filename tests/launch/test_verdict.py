"""The words for how a launch ended."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.run_dir import RunDir
from dslaunch.launch.cause import Cause
from dslaunch.launch.ends import HostFacts, LostHost, RankEnd, list_ranks
from dslaunch.launch.places import describe_places
from dslaunch.launch.progress import Progress
from dslaunch.launch.verdict import (
    Outcome,
    describe_code,
    render_end,
    render_failure,
    summarise,
)


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


def test_the_last_block_of_a_lost_host() -> None:
    others = tuple(f"n{number}" for number in range(3, 13))
    lost = LostHost(host="n2", how="no sign of life from n2 for 30 s", seconds=61.25, others=others)
    outcome = Outcome(
        ends=(end(0, -15, asked=True),), lost=lost, num_ranks=3, own_worker=True, unshared_hosts=("n2",)
    )
    assert render_end(outcome, RunDir(Path("/r")), shown=None) == (
        "dslaunch: host n2 was lost 61.2 s after the start: no sign of life from n2 for 30 s\n"
        "  steps        none was logged\n"
        "  also lost    n3, n4, n5, n6, n7, n8, n9, n10 and 2 more\n"
        "  ranks        ranks 1-2: how they ended is not known\n"
        "  log          n2:/r/logs/rank-1.log\n"
        "  others       rank 0 stopped by dslaunch (signal 15)\n"
        "  exit code    77\n"
    )


def test_the_last_block() -> None:
    first = end(5, -9, tail=tuple(f"line {i}" for i in range(30)))
    others = tuple(end(rank, -15, asked=True) for rank in range(20) if rank != 5)
    outcome = Outcome(ends=(first, *others), first_failure=first, num_ranks=30)
    block = render_failure(outcome, "/r/logs/rank-5.log")
    assert block == (
        "dslaunch: rank 5 on n1 failed first: it was killed by signal 9 (SIGKILL: often the kernel's "
        "out-of-memory killer: see `dmesg`, or use less host memory) 1.2 s after the start\n"
        "  peak memory  3.00 GiB resident\n"
        "  last lines of its stderr:\n"
        + "".join(f"    | line {i}\n" for i in range(18, 30))
        + "  log          /r/logs/rank-5.log\n"
        "  others       ranks 0-4, 6-19 stopped by dslaunch (signal 15); ranks 20-29 not started, or lost\n"
        "  exit code    137\n"
    )


@pytest.mark.parametrize(
    ("code", "facts", "words"),
    [
        (
            -9,
            HostFacts(memory_limit_bytes=16 * 2**30, oom_kills=1),
            "SIGKILL: the kernel's out-of-memory killer struck there: use less host memory, or ask for more",
        ),
        (-9, HostFacts(oom_kills=2), "SIGKILL: the kernel's out-of-memory killer struck there: use less"),
        (
            -9,
            HostFacts(memory_limit_bytes=2**30, oom_kills=0),
            "SIGKILL: not the kernel's out-of-memory killer",
        ),
        (-9, HostFacts(), "SIGKILL: often the kernel's out-of-memory killer"),
        (-7, HostFacts(shm_bytes=64 * 2**20), "SIGBUS: bus error, often /dev/shm (0.06 GiB there) is full"),
        (-7, HostFacts(), "SIGBUS: bus error, often /dev/shm is full"),
        (-11, HostFacts(oom_kills=1), "SIGSEGV: a crash in native code"),
    ],
)
def test_what_the_host_says_of_a_kill(code: int, facts: HostFacts, words: str) -> None:
    assert f"({words}" in describe_code(code, facts=facts)


def test_the_block_of_our_own_worker_says_how_far_it_was() -> None:
    first = RankEnd(
        rank=0, host="n1", code=-9, seconds=9.0, max_rss_bytes=2**30, asked=False,
        facts=HostFacts(memory_limit_bytes=2**31, oom_kills=0),
    )  # fmt: skip
    outcome = Outcome(
        ends=(first,), first_failure=first, own_worker=True, progress=Progress(step=12, total=100, loss=2.0)
    )
    block = render_failure(outcome, "/r/logs/rank-0.log").splitlines()
    assert block[1] == "  steps        the last logged was step 12 of 100"
    assert block[2] == "  peak memory  1.00 GiB resident, the limit of its cgroup is 2.00 GiB"
    early = render_failure(Outcome(ends=(first,), first_failure=first, own_worker=True), "/r/logs/rank-0.log")
    assert "  steps        none was logged\n" in early


def test_a_log_that_stays_on_its_host_is_named_with_it() -> None:
    first = end(0, 1)
    for unshared, path in ((("n1",), "n1:/r/logs/rank-0.log"), (("n2",), "/r/logs/rank-0.log")):
        outcome = Outcome(ends=(first,), first_failure=first, unshared_hosts=unshared)
        assert f"  log          {path}\n" in render_end(outcome, RunDir(Path("/r")), shown=frozenset())


def test_the_end_of_a_rank_as_its_agent_reports_it() -> None:
    event = {
        "rank": 1, "code": -9, "asked": True, "max_rss_kib": 3, "tail": ["a", "b"], "last": "b", "state": "D",
        "facts": {"oom_kills": 2},
    }  # fmt: skip
    assert RankEnd.from_event(event, host="n2", seconds=4.5) == RankEnd(
        rank=1, host="n2", code=-9, seconds=4.5, max_rss_bytes=3072, asked=True, tail=("a", "b"), last="b",
        state="D", facts=HostFacts(oom_kills=2),
    )  # fmt: skip


def test_a_diverged_run_that_kept_its_last_step_is_replayed_next() -> None:
    first = end(0, 76)
    outcome = Outcome(ends=(first,), first_failure=first, own_worker=True)
    block = render_end(outcome, RunDir(Path("/my runs/r")), shown=frozenset(), can_replay=True)
    assert block.endswith("  next         dslaunch replay '/my runs/r'\n")
    assert "replay" not in render_end(outcome, RunDir(Path("/my runs/r")), shown=frozenset())


def test_known_words_are_put_into_one_line() -> None:
    first = end(3, 1, tail=("[rank3]: ModuleNotFoundError: No module named 'peft'",))
    block = render_failure(Outcome(ends=(first,), first_failure=first), "/r/logs/rank-3.log")
    known = "the ranks' Python has no module peft; install the package that has it, on every host"
    assert f"  looks like   {known}\n" in block


def test_of_a_silent_rank_the_block_has_the_words_of_one_that_ended_alike() -> None:
    first = end(1, 2)
    ends = (first, end(0, 2, tail=("Error: no such key",)), end(2, 1, tail=("a traceback",)))
    block = render_failure(Outcome(ends=ends, first_failure=first), "/r/logs/rank-1.log")
    words = "rank 0 on n1 ended in the same way and wrote:\n    | Error: no such key\n"
    assert f"  it wrote nothing to stderr; {words}" in block
    assert "traceback" not in block
    stopped = (first, end(0, 143, asked=True, tail=("Error: no such key",)))
    block = render_failure(Outcome(ends=stopped, first_failure=first), "/r/logs/rank-1.log")
    assert "  it wrote nothing to stderr\n" in block


def test_after_a_time_out_the_block_says_where_each_rank_was() -> None:
    waited = "Error: a time-out: rank 0 waited 4 s in all_reduce for a rank that did not come"
    place = "at step 5, waiting in all_reduce (train/dist.py:1, f)"
    first = end(0, 77, tail=(waited,))
    others = [end(rank, 143, asked=True, tail=(f"dslaunch: rank {rank} is {place}",)) for rank in range(3, 9)]
    lost = [
        dataclasses.replace(end(1, -9, asked=True), state="T"),
        dataclasses.replace(end(2, 143, asked=True, tail=("careful",)), last="loading shard 3"),
        dataclasses.replace(end(9, 143, asked=True), state="S"),
    ]
    outcome = Outcome(ends=(first, *lost, *others), first_failure=first)
    block = render_failure(outcome, "/r/logs/rank-0.log", shown=None)
    assert "  looks like" not in block  # its own words say it
    assert (
        "  where the ranks were:\n"
        "    | rank 1 on n1: its process was stopped (SIGSTOP)\n"
        "    | rank 2 on n1: the last that it wrote: loading shard 3\n"
        "    | rank 9 on n1: it wrote nothing\n"
        "    | rank 0 on n1: waiting in all_reduce\n"
        f"    | ranks 3-8: {place}\n"
        "  log "
    ) in block


def test_of_many_places_the_first_are_shown() -> None:
    ends = [dataclasses.replace(end(rank, 1), last=f"line {rank}") for rank in range(20)]
    assert describe_places(ends)[-2:] == ["rank 7 on n1: the last that it wrote: line 7", "and 12 more"]
    assert "where the ranks were" not in render_failure(
        Outcome(ends=tuple(ends), first_failure=ends[0]), "/r/logs/rank-0.log"
    )


def test_a_thousand_ranks_in_one_line() -> None:
    ends = [end(rank, 1) for rank in range(3, 18)] + [end(20, 1)]
    assert summarise(ends) == "ranks 3-17, 20 ended (code 1)"
    assert list_ranks(list(range(0, 1000, 2))) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 492 more"
    assert list_ranks([7]) == "rank 7"


def test_ends_are_grouped() -> None:
    ends = [end(0, 0), end(1, -15, asked=True), end(2, 0), end(3, 1)]
    assert summarise(ends) == (
        "ranks 0, 2 ended (code 0); rank 1 stopped by dslaunch (signal 15); rank 3 ended (code 1)"
    )


def test_only_what_obeyed_was_stopped() -> None:
    codes = (-15, -9, 143, 75, 70, 0)
    assert [end(0, code, asked=True).was_stopped for code in codes] == [True, True, True, True, False, False]
    assert not end(0, -9).was_stopped


@pytest.mark.parametrize(
    ("later", "is_cause"),
    [
        ({"code": -9}, True),
        ({"code": -11, "seconds": 3.0}, True),
        ({"code": -9, "seconds": 3.5}, False),  # another event
        ({"code": -9, "host": "n1"}, False),  # of one host the news come in their order
        ({"code": -9, "asked": True}, False),
        ({"code": 1}, False),
        ({"code": 0}, False),
        ({"code": -6}, False),  # as NCCL and gloo end a rank that another one left
        ({"code": -15}, False),
    ],
)
def test_what_a_signal_killed_is_the_cause_of_an_exception_elsewhere(
    later: dict[str, Any], is_cause: bool
) -> None:
    first, killed = end(0, 1), dataclasses.replace(end(1, 0), **{"host": "n2", **later})
    cause = Cause(first_failure=first)
    assert cause.revise(killed) == is_cause
    assert cause.first_failure is (killed if is_cause else first)
    signalled = Cause(first_failure=end(0, -9))
    assert not signalled.revise(killed)
    assert not Cause().revise(killed)


def test_the_loss_of_a_host_is_the_cause_of_what_fails_elsewhere_at_once() -> None:
    follows, first = Cause(first_failure=end(0, 1)), Cause()  # n1, at 1.25 s
    assert [cause.note_lost("n2", "gone", 3.0) for cause in (follows, first)] == [True, True]
    lost = LostHost(host="n2", how="gone", seconds=3.0)
    assert follows == first == Cause(lost=lost)
    for host, seconds in (("n1", 1.5), ("n2", 3.5)):  # its own rank had failed; much later
        own = Cause(first_failure=end(0, 1))
        assert not own.note_lost(host, "gone", seconds)
        assert own == Cause(first_failure=end(0, 1))
    assert not Cause(cancelled_by=2).note_lost("n2", "gone", 3.0)


def test_only_a_stop_of_all_is_a_stop_at_a_checkpoint() -> None:
    assert Outcome(ends=(end(0, 75), end(1, 0)), num_ranks=2).exit_code == 75
    assert Outcome(ends=(end(0, 75), end(1, -9, asked=True)), num_ranks=2, late=(1,)).exit_code == 1
    assert Outcome(ends=(end(0, 75), end(1, -9, asked=True)), num_ranks=2, cancelled_by=2).exit_code == 130


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
