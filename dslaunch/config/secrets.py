"""launch.env and secret_env: names that can be set, and no secret in a file."""

from __future__ import annotations

import re

from dslaunch.config.report import Report
from dslaunch.config.spec import LaunchSpec

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY|SECRET_KEY)(_|$)",
    re.IGNORECASE,
)
# What the launcher itself sets for each rank.
_RESERVED = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def check_env(spec: LaunchSpec, report: Report) -> None:
    """Names and values of the ranks' environment; problems go to ``report``.

    A variable whose name says that it is a secret is refused in ``env``: its
    value would be written to plan.json.
    """
    for name, value in spec.env.items():
        key = f"launch.env.{name}"
        _check_name(name, key, report)
        if _SECRET.search(name):
            report.fail(
                key,
                f"{key}: the name says that it is a secret, and a run file is no place for one",
                f"export it in your shell and write launch.secret_env: [{name}]",
            )
        if "\0" in value:
            report.fail(key, f"{key}: a value cannot hold a null byte")
    for i, name in enumerate(spec.secret_env):
        _check_name(name, f"launch.secret_env[{i}]", report)


def _check_name(name: str, key: str, report: Report) -> None:
    if not _NAME.fullmatch(name):
        report.fail(key, f"{key}: {name!r} is no name of an environment variable", "letters, digits and _")
    elif name in _RESERVED:
        report.fail(key, f"{key}: {name} is set by the launcher for each rank", "remove it")
