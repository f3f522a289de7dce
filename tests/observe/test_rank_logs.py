"""Last lines of logs, groups of ranks that say the same, and following."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.topology import span
from dslaunch.observe.rank_logs import find_ranks, follow, group_tails, read_tail, read_tails


def write(tmp_path: Path, **texts: str) -> None:
    (tmp_path / "logs").mkdir(exist_ok=True)
    for name, text in texts.items():
        (tmp_path / "logs" / f"rank-{name[1:]}.log").write_bytes(text.encode("utf-8", "surrogateescape"))


@pytest.mark.parametrize(
    ("text", "count", "wanted"),
    [
        ("", 5, []),
        ("a\nb\nc\n", 2, ["b", "c"]),
        ("a\nb\nc", 2, ["b", "c"]),
        ("a\nb\nc\n", 9, ["a", "b", "c"]),
        ("a\n\n\n", 2, ["", ""]),
        ("a\n", 0, []),
        ("10%\r20%\r30%\rdone\nnext\r\n", 5, ["done", "next"]),
        ("\udcff\n", 1, ["\ufffd"]),
    ],
)
def test_last_lines(tmp_path: Path, text: str, count: int, wanted: list[str]) -> None:
    write(tmp_path, r0=text)
    assert list(read_tail(tmp_path / "logs/rank-0.log", count, finished=False).lines) == wanted


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    write(tmp_path, r0="x" * 200_000 + "\n" + "".join(f"{i}\n" for i in range(100_000)))
    tail = read_tail(tmp_path / "logs/rank-0.log", 3, finished=False)
    assert tail.lines == ("99997", "99998", "99999")
    assert tail.end == (tmp_path / "logs/rank-0.log").stat().st_size


def test_of_a_line_without_end_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "logs/rank-0.log"
    write(tmp_path, r0="first\n" + "x" * 20_000_000)
    tail = read_tail(path, 2, finished=False)  # in parts that add up, not each anew
    assert [len(line) for line in tail.lines] == [3 << 16]
    tail = read_tail(path, 2, finished=True)
    assert (tail.lines, tail.end) == ((), path.stat().st_size - (3 << 16))


def test_ranks_that_say_the_same_are_one_group(tmp_path: Path) -> None:
    write(tmp_path, r0="a: rank 0\n", r1="a: rank 0\n", r2="a: rank 2\n", r10="a: rank 10\n")
    assert find_ranks(tmp_path) == [0, 1, 2, 10]
    tails = read_tails(tmp_path, [0, 1, 2, 10], 5, finished=False)
    assert group_tails(tails) == [([0, 2, 10], ("a: rank 0",)), ([1], ("a: rank 0",))]
    assert span([0, 1, 2, 4, 7, 8]) == "0-2, 4, 7-8"


def test_a_rank_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rank has written a log"):
        find_ranks(tmp_path)
    write(tmp_path, r0="", r1="")
    with pytest.raises(ConfigError, match="rank 7 has no log") as caught:
        find_ranks(tmp_path, [1, 7])
    assert caught.value.hint == "there are ranks 0-1"


def test_following_a_run_whose_directory_goes(tmp_path: Path) -> None:
    write(tmp_path, r0="a\n")
    (tmp_path / "logs/rank-0.log").unlink()
    assert list(follow(tmp_path, {0: 2}, lambda: True)) == []


def test_following_shows_what_is_added_and_ends_with_the_run(tmp_path: Path) -> None:
    write(tmp_path, r0="old\n", r1="old\n")
    added = iter(((0, "one\ntw"), (1, "x\n"), (0, "o\n10%\r20%")))

    def is_over() -> bool:
        rank, text = next(added, (0, ""))
        with (tmp_path / f"logs/rank-{rank}.log").open("a") as stream:
            stream.write(text)
        return not text

    lines = list(follow(tmp_path, {0: 4, 1: 4}, is_over))
    assert sorted(lines) == [(0, "20%"), (0, "one"), (0, "two"), (1, "x")]
    assert [line for rank, line in lines if rank == 0] == ["one", "two", "20%"]


@pytest.mark.parametrize(("text", "count"), [("a\nb\nc", 9), ("a\nb\n", 1), ("a", 3), ("", 3), ("a\nb", 0)])
def test_nothing_is_lost_or_shown_twice_between_tail_and_following(
    tmp_path: Path, text: str, count: int
) -> None:
    write(tmp_path, r0=text)
    tail = read_tail(tmp_path / "logs/rank-0.log", count, finished=True)
    with (tmp_path / "logs/rank-0.log").open("a") as stream:
        stream.write("+\nmore\n")  # before following begins
    lines = [*tail.lines, *(line for _, line in follow(tmp_path, {0: tail.end}, lambda: True))]
    finished = text.count("\n")
    assert lines == (text + "+\nmore\n").splitlines()[max(0, finished - count) :]
