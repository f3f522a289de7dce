"""A command as data: argv, environment and stdin. Text is for display only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dslaunch.core.errors import ConfigError

# Control characters, and bytes that were not UTF-8 (Python holds them as lone surrogates).
_NEEDS_ESCAPES = re.compile("[\x00-\x1f\x7f\x80-\x9f\udc80-\udcff]")
# At a word's end: TOKENIZERS_PARALLELISM is no secret.
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|SECRET_?KEY)(_|$)",
    re.IGNORECASE,
)
# user:password@ of a URL; proxies may also be given without a scheme.
_URL_PASSWORD = re.compile(r"://[^\s/:@]*:[^\s/]+@")
_PROXY_PASSWORD = re.compile(r"^[^\s/:@]*:[^\s/]+@")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to start. ``env`` is added to what it inherits; ``stdin`` is written to it.

    ``stdin_room``: so many bytes of it may be on their way at first, and more as the process makes
    room by an event of that name; None: the pipe alone says how many.

    Strings hold non-UTF-8 bytes as Python does (surrogateescape), so that what
    was typed is what arrives.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    stdin: bytes | None = None
    stdin_room: int | None = None

    def shell_text(self) -> str:
        """What one would type in bash for argv and env. Never run by us."""
        words = [f"{name}={quote(value)}" for name, value in self.env.items()]
        text = " ".join([*words, shell_text(self.argv)])
        return f"cd {quote(self.cwd)} && {text}" if self.cwd else text


def quote(word: str) -> str:
    """One word quoted for bash, always on one line and printable.

    Plain text as :func:`shlex.quote` does; control characters and non-UTF-8
    bytes in ``$'...'``, which bash turns back into the very bytes.
    """
    if not _NEEDS_ESCAPES.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _NEEDS_ESCAPES.sub(_escape, escaped) + "'"


def shell_text(argv: Sequence[str]) -> str:
    """All words of ``argv`` quoted for bash, joined by spaces."""
    return " ".join(quote(word) for word in argv)


# What dslaunch itself tells a rank; a user's value would only contradict it.
# DeepSpeed's CPU backend reads LOCAL_SIZE, its checkpoint code CROSS_RANK and CROSS_SIZE.
RESERVED_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "DSLAUNCH_RUN_DIR",
)  # fmt: skip


def holds_secret(name: str, value: str) -> bool:
    """Whether a variable holds what no file and no screen may show.

    Its name says so (HF_TOKEN, WANDB_API_KEY), or a URL in its value has a password in it.
    """
    return _SECRET_NAME.search(name) is not None or holds_password(name, value)


def holds_password(name: str, value: str) -> bool:
    """Whether ``value`` has a URL with a password (HTTPS_PROXY=http://user:password@proxy)."""
    is_proxy = name.lower().endswith("_proxy")
    found = _URL_PASSWORD.search(value) or (is_proxy and _PROXY_PASSWORD.search(value))
    return bool(found)


def check_argv(argv: Sequence[str], where: str) -> None:
    """Raises ConfigError where no process can be given these words: none at all, or a NUL in one."""
    if not argv or not argv[0]:
        raise ConfigError(f"{where}: there is no command to run", hint="write it after `--`")
    for word in argv:
        if "\0" in word:
            raise ConfigError(f"{where}: {word!r} holds a NUL byte, which no argument can")


def check_env(env: Mapping[str, str], where: str) -> None:
    """Raises ConfigError for a name or value that no environment can hold."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise ConfigError(f"{where}: {name!r} is no name for an environment variable")
        if "\0" in value:
            raise ConfigError(f"{where}: the value of {name} holds a NUL byte, which no variable can")


def _escape(match: re.Match[str]) -> str:
    # surrogateescape gives back the one byte; C1 controls are two bytes of UTF-8. Three octal
    # digits, since "\x1" followed by a letter a-f would swallow the letter.
    raw = match.group().encode("utf-8", "surrogateescape")
    return "".join(f"\\{byte:03o}" for byte in raw)
