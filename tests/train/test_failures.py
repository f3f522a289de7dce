"""What a rank says when it fails: which errors of libraries are known, and with which exit code."""

from __future__ import annotations

import pytest

from dslaunch.core.errors import EXIT_HOST_LOST, EXIT_NOT_READY, EXIT_OUR_BUG
from dslaunch.train.failures import explain

# As torch words them, shortened.
LOST = [
    "NCCL error in: NCCLUtils.hpp, remote process exited or there was a network error, NCCL version 2.21\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "NCCL error in: ProcessGroupNCCL.cpp:825, unhandled system error, NCCL version 2.7.8\n"
    "ncclSystemError: System call (socket, malloc, munmap, etc) failed.",
    "NCCL error: internal error\nLast error: Net : Connection closed by remote peer node-2<47861>",
    "NCCL communicator was aborted on rank 1.",
]


@pytest.mark.parametrize("text", LOST)
def test_a_lost_peer_under_nccl(text: str) -> None:
    told = explain(RuntimeError(text))
    assert told.exit_code == EXIT_HOST_LOST
    assert told.message == "this rank lost the connection to another one"


def test_other_nccl_errors_are_not_a_lost_peer() -> None:
    assert explain(RuntimeError("ncclInvalidUsage: This usually reflects invalid usage")).exit_code == (
        EXIT_OUR_BUG
    )


def test_the_same_words_in_another_error_are_no_lost_peer() -> None:
    assert explain(KeyError("ncclRemoteError")).exit_code == EXIT_OUR_BUG


@pytest.mark.parametrize("name", ["MissingCUDAException", "CUDAMismatchException"])
def test_no_cuda_toolkit(name: str) -> None:
    from deepspeed.ops.op_builder import builder

    told = explain(getattr(builder, name)("CUDA_HOME does not exist,\nunable to compile CUDA op(s)"))
    assert told.exit_code == EXIT_NOT_READY
    assert "CUDA_HOME does not exist, unable to compile" in told.message
    assert told.hint is not None and "install the CUDA toolkit" in told.hint
