"""Which worker of pytest-xdist runs which tests, for `make test` with its two.

The first worker begins at the front with tests/train, whose ranks fill two cores and whose session
fixtures are costly; the other at the back with tests/launch, which waits more than it computes. They
meet in the middle, at tests that mind nothing. A file is never cut, nor a folder that shares ranks.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Folders whose tests share a session fixture, and the one that they stay together with.
SHARED = {
    "tests/train": "tests/train",
    "tests/train/replay": "tests/train",  # finished_runs
    "tests/train/engine": "tests/train/engine",
    "tests/train/optimizers": "tests/train/optimizers",
    "tests/train/checkpoint": "tests/train/checkpoint",
}
_FIRST, _LAST = frozenset(SHARED.values()), "tests/launch/"


class FromBothEnds(LoadScopeScheduling):  # type: ignore[misc]
    """Work units sorted by :func:`place`; the first worker takes from the front, others from the back."""

    def __init__(self, config: Any, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is not self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """A test that ended its worker, as one that timed out does, is not run again. Upstream's would be."""
        left = {name: tests for name, tests in self.assigned_work[node].items() if not all(tests.values())}
        crashed: str | None = None
        for tests in left.values():
            crashed = next(nodeid for nodeid, done in tests.items() if not done)
            tests[crashed] = True
            break
        self.assigned_work[node] = {name: tests for name, tests in left.items() if not all(tests.values())}
        super().remove_node(node)
        return crashed


def unit(nodeid: str) -> str:
    """The tests that one worker runs one after another: a file's, or those of a whole folder."""
    path = nodeid.split("::")[0]
    return SHARED.get(str(PurePosixPath(path).parent), path)


def place(nodeid: str) -> int:
    """Sorts tests for the two workers: ranks that share fixtures, all that minds nothing, launches."""
    return 0 if unit(nodeid) in _FIRST else 2 if nodeid.startswith(_LAST) else 1
