"""Commands as data, and their text."""

from __future__ import annotations

import os
import subprocess

import pytest

from dslaunch.core.command import Command, check_argv, check_env, holds_secret, quote, shell_text
from dslaunch.core.errors import ConfigError

WORDS = [
    "plain", "", "a b", "it's", '72"', "$HOME", "`id`", "*", "two\nlines", "tab\t", "\\", "\\n", "'\n'", "é",
    "\udcff", "\x01a", "\x7f9", "\x9f", "!", "#", "-x", "a=b", "~", "{a,b}",
]  # fmt: skip


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bash_reads_back_the_very_bytes(locale: str) -> None:
    script = f"printf '%s\\0' {shell_text(WORDS)}"
    assert script.isprintable()
    env = {**os.environ, "LC_ALL": locale}
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=30, env=env, check=True)
    expected = [word.encode("utf-8", "surrogateescape") for word in WORDS]
    assert done.stdout.split(b"\0")[:-1] == expected


def test_plain_words_stay_readable() -> None:
    assert quote("/opt/x-1.py") == "/opt/x-1.py"
    assert quote("a b") == "'a b'"
    assert quote("a\nb") == "$'a\\012b'"


def test_text_of_a_command() -> None:
    command = Command(argv=("echo", "a b"), env={"A": "x y"}, cwd="/my dir", stdin=b"secret")
    assert command.shell_text() == "cd '/my dir' && A='x y' echo 'a b'"


@pytest.mark.parametrize("argv", [(), ("",), ("echo", "a\0b")])
def test_argv_that_cannot_be(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="launch: "):
        check_argv(argv, "launch")


@pytest.mark.parametrize("env", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "\0"}])
def test_env_that_cannot_be(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"launch\.env: "):
        check_env(env, "launch.env")


def test_any_other_text_can_be() -> None:
    check_argv(["a", *WORDS], "launch")
    check_env({f"V.{i}": word for i, word in enumerate(WORDS)}, "launch.env")


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "token", "MY_SECRET_2", "AWS_SECRET_ACCESS_KEY"]
)
def test_names_of_secrets(name: str) -> None:
    assert holds_secret(name, "")


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "PATH", "NCCL_DEBUG", "MONKEY", "KEYS"])
def test_names_of_no_secrets(name: str) -> None:
    assert not holds_secret(name, "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTPS_PROXY", "http://bob:s3cret@proxy:3128"),
        ("https_proxy", "bob:s3cret@proxy:3128"),
        ("MLFLOW_TRACKING_URI", "https://bob:s3@cret@mlflow/x"),
        ("X", "one https://a/b, then redis://:s3cret@host/0"),
        ("HTTP_PROXY", "http://bob:s?c#ret@proxy"),
    ],
)
def test_passwords_in_urls(name: str, value: str) -> None:
    assert holds_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTPS_PROXY", "http://proxy:3128"),
        ("HTTPS_PROXY", "http://bob@proxy:3128/"),
        ("X", "ssh://git@host:22/a:b@c"),
        ("X", "http://host:80/path@2"),
        ("IMAGE", "name:tag@sha256"),
        ("NO_PROXY", "localhost,10.0.0.0/8"),
    ],
)
def test_urls_without_a_password(name: str, value: str) -> None:
    assert not holds_secret(name, value)
