"""A raw record of a data source, and where it stands, for messages."""

from __future__ import annotations

from typing import Any, NamedTuple

from dslaunch.core.errors import ConfigError


class Record(NamedTuple):
    """One record as read.

    ``where`` is ``file:line``, ``file:line record N`` (of an array), ``file row N`` or ``id[split] row N``,
    all from 1.

    ``error`` is set, and ``value`` is not, where the record could not be read at
    all but reading can go on with the next one (a broken line of a JSONL file).
    """

    where: str
    value: Any = None
    error: ConfigError | None = None
