"""Where a rank is, as it says when it is asked."""

from __future__ import annotations

import signal
import subprocess
import sys

from dslaunch.train.failures import explain

# The main thread sleeps in native code, in one case under a function of a file that is named as torch's.
ASKED = """
import os, signal, sys, time
from dslaunch.train import whereabouts
whereabouts.answer(3)
def all_reduce(seconds):
    print("ready", flush=True)
    time.sleep(seconds)
exec(compile("def all_gather(f):\\n    f(20)", "/x/torch/distributed/distributed_c10d.py", "exec"))
if sys.argv[1] == "collective":
    whereabouts.note_steps(11)
all_gather(all_reduce) if sys.argv[1] == "collective" else all_reduce(20)
"""


def answer_of(kind: str) -> str:
    argv = [sys.executable, "-c", ASKED, kind]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):  # as often as it is asked
            process.send_signal(signal.SIGURG)
            said = process.stderr.readline()
        process.kill()
    return said


def test_in_a_collective() -> None:
    assert answer_of("collective") == "dslaunch: rank 3 is at step 12, waiting in all_gather\n"


def test_somewhere_else() -> None:
    assert answer_of("elsewhere") == "dslaunch: rank 3 is before the first step, in all_reduce\n"


def test_a_process_that_does_not_answer_is_not_hurt() -> None:
    with subprocess.Popen(["sleep", "20"]) as process:
        process.send_signal(signal.SIGURG)
        process.terminate()
    assert process.returncode == -signal.SIGTERM


def test_a_time_out_names_the_collective() -> None:
    text = (
        "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"
    )
    scope = {"error": RuntimeError(text)}
    code = compile("def all_reduce():\n    raise error", "/x/torch/distributed/distributed_c10d.py", "exec")
    exec(code, scope)
    try:
        scope["all_reduce"]()  # type: ignore[operator]
    except RuntimeError as error:
        told = explain(error)
    assert told.message == "a time-out: rank 0 waited 4 s in all_reduce for a rank that did not come"
    assert told.exit_code == 77
