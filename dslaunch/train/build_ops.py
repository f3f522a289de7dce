"""Builds DeepSpeed's compiled ops on this machine: ``python -m dslaunch.train.build_ops OP ...``.

`dslaunch doctor --build-ops` starts it once on every host, in the environment that ranks get there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dslaunch.core.errors import EXIT_OK, DslaunchError
from dslaunch.train.jit_ops import extensions_root, prepare_communication, prepare_optimizer_op


def main(ops: Sequence[str] | None = None) -> int:
    """Build the ops of these builder classes, and what joins ranks on a CPU; returns the exit code."""
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    try:
        prepare_communication()
        for op in sys.argv[1:] if ops is None else ops:
            prepare_optimizer_op(op)
    except DslaunchError as error:
        print(error.format(), file=sys.stderr)
        return error.exit_code
    print(f"the ops are in {extensions_root()}", file=sys.stderr)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
