"""A thousand ranks that say the same, and progress bars in files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dslaunch.launch.folding import NEVER, BarFilter, LineFolder


class Folded:
    """A LineFolder with what it wrote, and how many lines were told to be out."""

    def __init__(self) -> None:
        self.text = b""
        self.told = 0
        self.folder = LineFolder(self.write)

    def write(self, data: bytes, on_written: Callable[[], None] | None) -> None:
        self.text += data
        if on_written is not None:
            on_written()

    def add(self, host: str, rank: int, text: str, now: float) -> None:
        self.folder.add(host, rank, text.encode(), self.count, now)

    def count(self) -> None:
        self.told += 1


def test_one_rank() -> None:
    folded = Folded()
    folded.add("node1", 3, "ValueError: x", 10.0)
    assert (folded.text, folded.told) == (b"", 1)
    assert folded.folder.deadline == pytest.approx(10.3)
    folded.folder.flush(10.2)
    assert folded.text == b""
    folded.folder.flush(10.3)
    assert folded.text == b"node1:3| ValueError: x\n"
    assert folded.folder.deadline == NEVER


def test_a_thousand_ranks_on_many_hosts() -> None:
    folded = Folded()
    for rank in range(1, 1000):
        folded.add(f"node{rank // 8}", rank, f"[rank{rank}]: RuntimeError: rank {rank} has no data", 10.0)
    folded.folder.flush()
    assert folded.text == b"125 hosts, ranks 1-999| [rank1]: RuntimeError: rank 1 has no data\n"
    assert folded.told == 999


def test_two_hosts_and_ranks_with_gaps() -> None:
    folded = Folded()
    for rank in (1, 3, 5, 7, 9, 11, 13, 15):
        folded.add("a" if rank < 15 else "b", rank, "ERROR x", 1.0)
    folded.folder.flush()
    assert folded.text == b"2 hosts, ranks 1, 3, 5, 7, 9, 11 and 2 more| ERROR x\n"


def test_ranks_of_one_host_and_other_lines_keep_their_order() -> None:
    folded = Folded()
    for rank, text in ((1, "ERROR a"), (1, "ERROR b"), (2, "ERROR a"), (4, "ERROR a"), (1, "ERROR a")):
        folded.add("n", rank, text, 1.0)
    folded.folder.flush()
    assert folded.text == b"n:1-2, 4 (4 times)| ERROR a\nn:1| ERROR b\n"


def test_numbers_of_other_ranks_are_not_the_same_line() -> None:
    folded = Folded()
    folded.add("n", 1, "ERROR rank 5 is gone", 1.0)
    folded.add("n", 2, "ERROR rank 6 is gone", 1.0)
    folded.folder.flush()
    assert folded.text == b"n:1| ERROR rank 5 is gone\nn:2| ERROR rank 6 is gone\n"


def test_a_flood_of_lines_is_told_by_what_they_have_in_common() -> None:
    folded = Folded()
    for rank in range(1, 1000):
        folded.folder.flush(10.0 + rank / 500)
        folded.add(f"node{rank // 8}", rank, f"ERROR: loss {rank / 7} of {rank * 37:#x}", 10 + rank / 500)
    assert folded.folder.deadline < 14.0
    folded.folder.flush(14.0)
    *single, last = folded.text.decode().splitlines()
    assert single[0] == "node0:1| ERROR: loss 0.14285714285714285 of 0x25"
    assert len(single) == 20 and folded.folder.has_left_out
    alike = "ERROR: loss 3.0 of 0x309 (and 978 lines alike, with other numbers)"
    assert last == f"123 hosts, ranks 21-999| {alike}"
    folded.add("node1", 8, "ERROR: loss 1.0 of 0x1", 25.0)  # there is room again
    folded.folder.flush(26.0)
    assert folded.text.endswith(b"\nnode1:8| ERROR: loss 1.0 of 0x1\n")


def test_a_flood_of_other_lines_is_counted() -> None:
    folded = Folded()
    words = [f"ERROR {chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(100)]
    for rank, text in enumerate(words):
        folded.add("n", rank, text, 10.0)
    for rank in range(100, 105):
        folded.add("n", rank, f"ERROR with loss {rank}.5", 10.0)
    folded.folder.flush()
    lines = folded.text.decode().splitlines()
    assert lines[:-1] == [f"n:{rank}| {text}" for rank, text in enumerate(words[:40])]
    assert lines[-1] == "65 other lines of ranks 40-104: see their logs"


def test_a_line_that_keeps_coming_is_shown_ever_more_seldom() -> None:
    folded = Folded()
    for tenth in range(2000):
        folded.folder.flush(tenth / 10)
        folded.add("n", 1, "ERROR again", tenth / 10)
    folded.folder.flush()
    shown = folded.text.decode().splitlines()
    assert shown[0] == "n:1 (3 times)| ERROR again"
    times = [int(line.split("(")[1].split(" ")[0]) for line in shown]
    assert times == [3, 6, 12, 24, 48, 96, 192, 384, 600, 600, 35]
    folded.add("n", 1, "ERROR again", 1000.0)  # after a long silence it is new
    assert folded.folder.deadline == pytest.approx(1000.3)
    folded.folder.flush()
    folded.add("n", 1, "ERROR again", 1030.0)  # half a minute is none
    assert folded.folder.deadline == pytest.approx(1030.6)


def test_the_line_that_was_not_seen_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = Folded()

    def wait_s(text: str, now: float) -> float:
        folded.add("n", 1, text, now)
        wait_s = folded.folder.deadline - now
        folded.folder.flush()
        return round(wait_s, 3)

    assert [wait_s(text, 1.0) for text in ("a", "b")] == [0.3, 0.3]
    monkeypatch.setattr("dslaunch.launch.folding._KNOWN", 2)
    assert [wait_s(text, 2.0) for text in ("a", "b", "a", "c")] == [0.6, 0.6, 1.2, 0.3]
    assert [wait_s(text, 3.0) for text in ("a", "b")] == [2.4, 0.3]


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([b"plain\n", b"no end"], b"plain\nno end"),
        ([b"dos\r\n", b"two\r\n"], b"dos\r\ntwo\r\n"),
        ([b"\r  0%|", b"\r 50%|#", b"\r100%|##\n", b"next\n"], b"100%|##\nnext\n"),
        ([b"\r  0%|\r 50%|#\r100%|##\nnext"], b"100%|##\nnext"),
        ([b"10%\r", b"20%\r", b"30%\r\n"], b"30%\n"),
        ([b"loading ", b"\r 50%", b"\r 99%\n"], b"loading \n 99%\n"),
        ([b"loading ", b"\r 50%\n\r 70%\n"], b"loading \n 50%\n 70%\n"),
        ([b"loading ", b"\r     \r\n", b"next\n"], b"loading \nnext\n"),
        ([b"wait", b" done\n"], b"wait done\n"),
        ([b"wait", b" done\n\r 50%", b"\r 99%\n"], b"wait done\n 99%\n"),
        ([b"\r 5%", b"\r       \r", b"done\n"], b"done\n"),
        ([b"\xff\xfe\n\n"], b"\xff\xfe\n\n"),
        ([b"\r 7%"], b" 7%\n"),
    ],
)
def test_bars_leave_their_last_state(chunks: list[bytes], shown: bytes) -> None:
    bars = BarFilter()
    text = b"".join(bars.feed(chunk, 1.0) for chunk in chunks)
    assert text + bars.tick(NEVER) == shown
    assert bars.tick(NEVER) == b""


def test_a_long_bar_is_heard_of_now_and_then() -> None:
    bars = BarFilter()
    text = b""
    for second in range(100):
        text += bars.tick(float(second))
        text += bars.feed(b"\r%3d%%" % second, float(second))
    assert text == b" 29%\n 59%\n 89%\n"
    assert bars.deadline == 120.0
    assert bars.feed(b"\r100%\n", 100.0) == b"100%\n"
    assert bars.deadline == NEVER
    assert bars.feed(b"\r  1%", 110.0) == b""
    assert bars.deadline == 140.0
