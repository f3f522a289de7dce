"""The threads that write a launch's output."""

from __future__ import annotations

import os
import pty

import pytest

from dslaunch.launch.terminal import StreamWriter


@pytest.mark.parametrize("which", ["stdout", "stderr"])
def test_a_terminal_that_is_gone_leaves_no_bytes_that_fail_at_the_end(
    which: str,
) -> None:
    """Python's end flushes both streams, and would end with 120 for the bytes that one still holds."""
    ours, theirs = pty.openpty()
    streams = {"stdout": os.fdopen(os.dup(theirs), "wb"), "stderr": os.fdopen(theirs, "wb")}
    writer = StreamWriter(streams["stderr"], streams["stdout"])
    os.close(ours)
    writer.write(b"a line of a rank\n", stream=streams[which])
    writer.tell(b"a line of ours\n")
    writer.close(lambda: False)
    assert writer.problem == "Input/output error"
    for stream in streams.values():
        stream.write(b"what is said at the end\n")
        stream.close()
