"""What was typed reaches the rank byte for byte, and what rank 0 writes comes out byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import Launch
from tests.launch.launching import python, wait_until

HOSTILE: list[bytes] = [
    b"plain",
    b"a b", b"", b"-", b"--", b"--resume", b"-x=1", b'{"k": "v w"}', b"it's", b'72" tall',
    b"$HOME", b"`id`", b"$(id)", b"*", b"100%n %h %u", b"two\nlines", b"tab\there", b"back\\slash",
    b"a;b&c|d", b"k=v w",
    b"#", b"!", b"x,y",
    "\u00e9\u4e16\U0001f600".encode(), b"\xff\xfe not utf-8", b"\xed\xb2\x80", b"\x01\x7f",
]  # fmt: skip


def test_argv(launch: Launch) -> None:
    show = "import json; print(json.dumps([os.fsencode(a).hex() for a in sys.argv[1:]]))"
    launched = launch([*python(show), *HOSTILE], num_ranks=1)
    code, out, err = launched.wait()
    assert code == 0, err
    assert [bytes.fromhex(item) for item in json.loads(out)] == HOSTILE


def test_argv_again_from_launch_sh(launch: Launch, tmp_path: Path) -> None:
    show = "import json; print(json.dumps([os.fsencode(a).hex() for a in sys.argv[1:]]))"
    launched = launch([*python(show), *HOSTILE], num_ranks=1)
    assert launched.wait()[0] == 0
    script = launched.run_dir / "launch.sh"
    assert subprocess.run(["bash", "-n", script], timeout=30).returncode == 0
    again = subprocess.run([script, "--run-dir", "again"], capture_output=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert [bytes.fromhex(item) for item in json.loads(again.stdout)] == HOSTILE
    assert (tmp_path / "again" / "logs" / "rank-0.log").exists()


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_env(launch: Launch, locale: str) -> None:
    values = {f"V{i}": os.fsdecode(value) for i, value in enumerate(HOSTILE)}
    show = (
        "import json\n"
        "print(json.dumps({k.decode(): v.hex() for k, v in os.environb.items() if k[:1] == b'V'}))\n"
    )
    options = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
    launched = launch(python(show), *options, num_ranks=1, env={"LC_ALL": locale, "VINHERITED": "64(x2)"})
    code, out, err = launched.wait()
    assert code == 0, err
    got = {name: bytes.fromhex(value) for name, value in json.loads(out).items()}
    assert got.pop("VINHERITED") == b"64(x2)"
    got = {name: value for name, value in got.items() if name in values}
    assert got == {f"V{i}": value for i, value in enumerate(HOSTILE)}


def test_output_of_rank_0_is_what_it_wrote(launch: Launch) -> None:
    code = (
        "data = bytes(range(256)) * 40 + b'no newline \\xe4\\xb8'\n"
        "os.write(1, data); time.sleep(0.05); os.write(1, b'\\x96')\n"
        "if rank == 0: os.write(2, b'\\xff err')\n"
    )
    launched = launch(python(code))
    out, err = launched.process.communicate(timeout=60)
    assert launched.process.returncode == 0
    data = bytes(range(256)) * 40 + b"no newline \xe4\xb8\x96"
    assert out == data
    assert b"\xff err" in err
    assert (launched.run_dir / "logs" / "rank-1.log").read_bytes() == data


def test_a_rank_that_prints_a_lot(launch: Launch) -> None:
    # More than every pipe and queue on the way holds together; all ranks at once.
    code = "for i in range(20_000): sys.stdout.write(f'{i:06d} ' + 'x' * 500 + '\\n')\n"
    launched = launch([sys.executable, *python(code)[2:]])
    out, _ = launched.process.communicate(timeout=120)
    assert launched.process.returncode == 0
    expected = b"".join(b"%06d " % i + b"x" * 500 + b"\n" for i in range(20_000))
    assert hashlib.sha256(out).digest() == hashlib.sha256(expected).digest()
    for rank in range(2):
        assert (launched.run_dir / "logs" / f"rank-{rank}.log").read_bytes() == expected


def test_megabytes_without_a_line_end(launch: Launch) -> None:
    code = "for _ in range(160): os.write(2 if rank else 1, b'\\xff\\0\\x1bx' * 16384)"
    launched = launch(python(code))
    exit_code, out, _ = launched.wait()
    assert exit_code == 0
    assert len(out.encode("utf-8", "surrogateescape")) >= 160 * 65536
    assert [(launched.run_dir / f"logs/rank-{n}.log").stat().st_size for n in range(2)] == [160 * 65536] * 2


def test_a_rank_that_closes_its_output_is_still_watched(launch: Launch) -> None:
    code = "os.close(1); os.close(2); time.sleep(0.5); os._exit(4 if rank else 0)"
    exit_code, _, err = launch(python(code)).wait()
    assert exit_code == 4
    assert "rank 1 on localhost failed first: it exited with code 4" in err
    assert "it wrote nothing to stderr" in err


def test_a_failure_is_seen_while_nobody_reads_our_output(launch: Launch, tmp_path: Path) -> None:
    code = (
        "if rank == 1:\n"
        "    while not os.path.exists('die'): time.sleep(0.02)\n"
        "    sys.exit(6)\n"
        "while True: os.write(1, b'x' * 65536)\n"
    )
    launched = launch(python(code))
    wait_until(lambda: len(launched.events("rank_start")) == 2, "both ranks started")
    log = launched.run_dir / "logs" / "rank-0.log"
    sizes: list[int] = []

    def stalled() -> bool:
        sizes.append(log.stat().st_size if log.exists() else 0)
        return len(sizes) > 15 and sizes[-1] > 0 and len(set(sizes[-15:])) == 1

    wait_until(stalled, "rank 0 held up by the reader that does not read")
    assert sizes[-1] < 2**23  # what waits for the reader is bounded
    (tmp_path / "die").touch()
    launched.nothing_left()
    assert launched.wait()[0] == 6


def test_a_reader_that_goes_away_does_not_end_the_run(launch: Launch, tmp_path: Path) -> None:
    code = "for i in range(3000): print(i, 'x' * 100, flush=True)\ntouch(f'done-{rank}')\n"
    launched = launch(python(code))
    assert launched.process.stdout is not None
    launched.process.stdout.read(10)
    launched.process.stdout.close()
    launched.process.stdout = None
    code_, _, err = launched.wait()
    assert code_ == 0, err
    assert (tmp_path / "done-0").exists()
    assert (launched.run_dir / "logs" / "rank-0.log").read_text().endswith("2999 " + "x" * 100 + "\n")
    assert "Exception" not in err


def test_logs_hold_whole_lines_of_both_streams(launch: Launch) -> None:
    code = (
        "for i in range(200):\n"
        "    os.write(1, b'out-'); os.write(2, b'err-')\n"
        "    os.write(1, b'%d\\n' % i); os.write(2, b'%d\\n' % i)\n"
    )
    launched = launch(python(code), num_ranks=1)
    assert launched.wait()[0] == 0
    lines = (launched.run_dir / "logs" / "rank-0.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("out")] == [f"out-{i}" for i in range(200)]
    assert [line for line in lines if line.startswith("err")] == [f"err-{i}" for i in range(200)]
    assert len(lines) == 400


def test_an_unfinished_line_is_logged_while_the_rank_waits(launch: Launch, tmp_path: Path) -> None:
    code = "os.write(1, b'loading...')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    launched = launch(python(code), num_ranks=1)
    log = launched.run_dir / "logs" / "rank-0.log"
    wait_until(lambda: log.exists() and log.read_text() == "loading...", "the prompt in the log")
    (tmp_path / "go").touch()
    assert launched.wait()[0] == 0
