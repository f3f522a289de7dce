"""launch.env and secret_env: names that can be set, and no secret in a file."""

from __future__ import annotations

import re

from dslaunch.config.report import Report
from dslaunch.config.spec import LaunchSpec
from dslaunch.core.command import RESERVED_VARIABLES, holds_password, holds_secret

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_env(spec: LaunchSpec, report: Report) -> None:
    """Names and values of the ranks' environment; problems go to ``report``.

    A secret is refused in ``env``: its value would be written to plan.json.
    """
    for name, value in spec.env.items():
        key = f"launch.env.{name}"
        _check_name(name, key, report)
        if holds_secret(name, value):
            by_name = "the name says that it is a secret"
            why = "the URL holds a password" if holds_password(name, value) else by_name
            report.fail(
                key,
                f"{key}: {why}, and a run file is no place for one",
                f"export it in your shell and write launch.secret_env: [{name}]",
            )
        if "\0" in value:
            report.fail(key, f"{key}: a value cannot hold a null byte")
    for i, name in enumerate(spec.secret_env):
        _check_name(name, f"launch.secret_env[{i}]", report)


def _check_name(name: str, key: str, report: Report) -> None:
    if not _NAME.fullmatch(name):
        report.fail(key, f"{key}: {name!r} is no name of an environment variable", "letters, digits and _")
    elif name in RESERVED_VARIABLES:
        report.fail(key, f"{key}: {name} is set by the launcher for each rank", "remove it")
