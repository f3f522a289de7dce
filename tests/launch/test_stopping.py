"""When agents are told to stop, and when they are given up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.core.plan import LaunchPlan
from dslaunch.core.topology import local_topology
from dslaunch.launch.links import Links
from dslaunch.launch.signals import SignalInbox
from dslaunch.launch.stopping import SLACK_S, Stopping

NEVER = float("inf")


@pytest.fixture
def stopping(tmp_path: Path) -> Iterator[Stopping]:
    plan = LaunchPlan(
        argv=("x",), topology=local_topology(1), run_dir=str(tmp_path), cwd="/",
        failure_grace_s=5.0, checkpoint_grace_s=120.0,
    )  # fmt: skip
    with SignalInbox() as inbox:
        yield Stopping(plan, Links(inbox.fd, inbox.drain), lambda text: None)


def test_the_first_stop_at_a_checkpoint_says_when_all_must_have_stopped(stopping: Stopping) -> None:
    assert stopping.deadline == NEVER
    before = time.monotonic()
    stopping.wait_for_checkpoint()
    first = stopping.checkpoint_deadline
    assert before + 120 <= first <= time.monotonic() + 120
    stopping.wait_for_checkpoint()  # the next rank gives the others no more time
    assert stopping.checkpoint_deadline == stopping.deadline == first


def test_a_later_stop_with_more_time_gives_no_more(stopping: Stopping) -> None:
    stopping.wait_for_checkpoint()
    before = time.monotonic()
    stopping.stop(0.0)
    limit = stopping.deadline
    assert before + 5 + SLACK_S <= limit <= time.monotonic() + 5 + SLACK_S
    assert stopping.checkpoint_deadline == NEVER
    stopping.stop(1000.0)
    assert stopping.deadline == limit
    stopping.tick(limit - 1)
    assert stopping.deadline == limit
    stopping.tick(limit)
    assert stopping.deadline == NEVER


def test_ranks_that_were_asked_where_they_are_are_stopped_after_it(stopping: Stopping) -> None:
    stopping.ask_and_stop()
    due = stopping.deadline
    assert due < time.monotonic() + 1
    stopping.ask_and_stop()
    assert stopping.deadline == due
    stopping.tick(due)
    assert stopping.deadline >= due + 5 + SLACK_S - 1
