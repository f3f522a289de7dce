"""Where this rank is, said on stderr when the launcher asks.

It asks after a time-out, when some ranks waited for one that did not come: only that one knows why.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType

# Ignored by a process that does not know it, and used by nothing else here.
ASK = signal.SIGURG
COLLECTIVES = "torch/distributed/distributed_c10d.py"  # the file in which a rank waits
_OURS = Path(__file__).resolve().parents[1]

_done_steps: int | None = None


def note_steps(done: int) -> None:
    """So many steps are done; the next one begins."""
    global _done_steps
    _done_steps = done


def answer(rank: int) -> None:
    """Answer from now on. Call it before there are other threads: they must not take the signal.

    A thread of its own does it, for the main thread may be waiting in native code.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
    threading.Thread(target=_serve, args=(rank,), name="dslaunch-whereabouts", daemon=True).start()


def describe_place(frame: FrameType | None) -> str:
    """``at step 12, waiting in all_reduce (train/dist.py:214, all_reduce_sum)``, by a thread's last frame."""
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    step = "before the first step" if _done_steps is None else f"at step {_done_steps + 1}"
    names = [f.f_code.co_name for f in stack if f.f_code.co_filename.endswith(COLLECTIVES)]
    what = f"waiting in {names[-1]}" if names else f"in {stack[0].f_code.co_name}" if stack else "at its end"
    ours = next((f for f in stack if _OURS in Path(f.f_code.co_filename).parents), None)
    if ours is None:
        return f"{step}, {what}"
    place = f"{Path(ours.f_code.co_filename).relative_to(_OURS)}:{ours.f_lineno}"
    return f"{step}, {what} ({place}, {ours.f_code.co_name})"


def _serve(rank: int) -> None:
    main = threading.main_thread().ident
    while True:
        signal.sigwait({ASK})
        place = describe_place(sys._current_frames().get(main or 0))
        print(f"dslaunch: rank {rank} is {place}", file=sys.stderr, flush=True)
