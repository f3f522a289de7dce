"""launch.sh: the shell script in a run directory that runs the same plan again."""

from __future__ import annotations

import re
import sys

from dslaunch.core.command import quote, shell_text
from dslaunch.launch.record import RecordedPlan

_TEMPLATE = """\
#!/usr/bin/env bash
# Runs again exactly what is recorded in plan.json beside this script.
#
#   launch.sh                   from the start, in a new run directory beside this one
#   launch.sh --run-dir DIR     from the start, in DIR
#   launch.sh --resume          goes on in this run directory, from its last checkpoint
#   launch.sh --dry-run         shows what would be started
#
# {num_ranks} on {hosts}; in {cwd} each runs:
#   {command}
set -eu
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd -P)
{secrets}exec {python} -m dslaunch launch --plan "$here/plan.json" "$@"
"""


def render_launch_script(plan: RecordedPlan, *, python: str = sys.executable) -> str:
    """The text of launch.sh, for bash. Every word of the user's is quoted; no secret is in it.

    ``python`` is the interpreter that has dslaunch. Variables named in
    ``secret_env`` must be set when it is run, and it says so where one is not.
    """
    launch = plan.launch
    world_size = launch.topology.world_size
    return _TEMPLATE.format(
        num_ranks=f"{world_size} rank{'s' if world_size != 1 else ''}",
        hosts=", ".join(quote(host.name) for host in launch.topology.hosts[:4])
        + (f" and {launch.topology.num_nodes - 4} more" if launch.topology.num_nodes > 4 else ""),
        cwd=quote(launch.cwd),
        command=shell_text(launch.argv),
        secrets="".join(_require(name) for name in launch.secret_env),
        python=quote(python),
    )


def _require(name: str) -> str:
    # Bash can only test what it can name; dslaunch itself checks the others.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return ""
    return f': "${{{name}?export {name} first; its value is not recorded}}"\n'
