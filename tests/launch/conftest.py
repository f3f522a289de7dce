"""`launch` starts launches in a temporary directory, all gone afterwards; `bed`: three real ssh hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import Launched
from tests.testbed.hosts import Testbed

Launch = Callable[..., Launched]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Of each module its own; where another number is needed, the module has a fixture of this name."""
    with Testbed(3, tmp_path_factory.mktemp("testbed")) as hosts:
        yield hosts


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """``launch(command, *options, num_ranks=2, ...)`` runs it in ``tmp_path``, run directory ``run``."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def start(
            command: Sequence[str | bytes],
            *options: str,
            num_ranks: int = 2,
            run_dir: str = "run",
            **more: Any,
        ) -> Launched:
            numbers = ("--num-gpus-per-node", str(num_ranks))
            launched = Launched((*numbers, *options), command, run_dir=tmp_path / run_dir, **more)
            return stack.enter_context(launched)

        yield start
