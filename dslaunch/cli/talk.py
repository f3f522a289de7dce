"""What is said beside the result: on stderr, and not with ``-q``. Errors go another way: they always show."""

from __future__ import annotations

from dslaunch.core.tell import tell
from dslaunch.core.verbosity import QUIET, verbosity


def talk(text: str) -> None:
    """One line about what goes on."""
    if verbosity() > QUIET:
        say(text)


def say(text: str) -> None:
    """The same, also with ``-q``: what belongs to how something ended."""
    tell(text)


def note(text: str) -> None:
    """Something that the user should know but need not act on."""
    talk(f"note: {text}")
