"""What can be known, before a run directory is made, to keep a launch from starting."""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.core.plan import LaunchPlan
from dslaunch.launch import local, ssh
from dslaunch.launch.orders import check_launch, is_elsewhere
from dslaunch.launch.ports import lease_port
from dslaunch.launch.text import utf8_environ


def check_ready(plan: LaunchPlan) -> Mapping[str, str]:
    """Whether ``plan`` can start from this machine now; returns the environment it looked at. Starts nothing.

    No other host is contacted: each one's agent looks at its own when the launch starts.
    Raises ConfigError where the plan makes no sense here, EnvironmentNotReady
    where a secret, device, program, directory or the asked port is missing.
    """
    environ = utf8_environ()
    check_launch(plan, environ)
    if plan.via == "local":
        local.check_hosts(plan.topology)
        local.check_devices(plan, environ)
        local.check_program(plan, environ)
    else:
        ssh.check_client(environ)
    if plan.master_port is not None and not is_elsewhere(plan, plan.topology.hosts[0]):
        lease_port(plan.master_port).close()
    return environ
