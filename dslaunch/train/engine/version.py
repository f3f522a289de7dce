"""Which DeepSpeed the cures were made for."""

from __future__ import annotations

from dslaunch.core.errors import EnvironmentNotReady

# All tests, and the table of docs/numerics.md, were run with these.
TESTED_DEEPSPEED = ("0.19.8",)


def check_deepspeed_version(installed: str, allowed: str | None = None) -> str | None:
    """None for a tested version, a note for one that is ``allowed`` by its name.

    A local part ("+cu128") names a build, not a version. Raises EnvironmentNotReady for any other:
    another DeepSpeed may have other faults, and the cures may no longer fit.
    """
    version = installed.split("+")[0]
    if version in TESTED_DEEPSPEED:
        return None
    if allowed is not None and allowed.split("+")[0] == version:
        return f"DeepSpeed {installed} is untested here and allowed by name (allow_untested_deepspeed)"
    wrong = f"; allow_untested_deepspeed names {allowed}" if allowed is not None else ""
    raise EnvironmentNotReady(
        f"DeepSpeed {installed} was never tested here, only {', '.join(TESTED_DEEPSPEED)}{wrong}",
        hint="see what it does right with `dslaunch doctor --numerics`, then set "
        f"allow_untested_deepspeed: {version}, or install deepspeed=={TESTED_DEEPSPEED[-1]}",
    )
