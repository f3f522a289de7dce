"""A run without a hostfile inside of a batch job: on which hosts it runs, and when it stays here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.facts import Facts, probe_facts
from dslaunch.config.hosts import ResolvedHosts, choose_via, resolve_hosts
from dslaunch.config.load import load_flags
from dslaunch.config.spec_engine import ClusterSpec
from dslaunch.core.allocation import read_allocation
from dslaunch.core.devices import Inventory
from dslaunch.core.errors import ConfigError
from tests.config.build import CPU, SMALL, gpus, load

JOB = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_GPUS_PER_NODE": "8"}


def hosts(
    environ: dict[str, str], inventory: Inventory = CPU, this_host: str = "n1", **cluster: Any
) -> ResolvedHosts:
    facts = Facts(inventory, allocation=read_allocation(environ, this_host=this_host))
    return resolve_hosts(ClusterSpec.model_validate(cluster), facts)


def slots(found: ResolvedHosts) -> dict[str, str]:
    return {host.name: ",".join(host.slots) for host in found.topology.hosts}


def test_all_of_the_job() -> None:
    found = hosts(JOB)
    assert (found.topology.num_nodes, found.topology.world_size) == (4, 32)
    assert found.topology_reason == "SLURM_JOB_NODELIST: 4 nodes x 8 GPUs (SLURM_GPUS_PER_NODE)"
    assert (found.devices, found.device_type) == (None, "cuda")  # of which kind is not known


def test_a_part_of_it() -> None:
    found = hosts(JOB, num_nodes=2, num_gpus_per_node=2)
    assert slots(found) == {"n1": "0,1", "n2": "0,1"}
    assert found.topology_reason == "SLURM_JOB_NODELIST: 2 of 4 nodes x 2 of 8 GPUs (SLURM_GPUS_PER_NODE)"
    assert [host.name for host in found.spares] == ["n3", "n4"]
    assert slots(hosts(JOB, include="n4:7")) == {"n4": "7"}
    assert list(slots(hosts(JOB, exclude="n2"))) == ["n1", "n3", "n4"]
    with pytest.raises(ConfigError, match="num_nodes 5, but there are 4 hosts"):
        hosts(JOB, num_nodes=5)
    with pytest.raises(ConfigError, match="num_gpus_per_node 9, but host n1 has 8 slots"):
        hosts(JOB, num_gpus_per_node=9)


def test_the_kind_of_device() -> None:
    told = hosts({**JOB, "SLURM_GPUS_PER_NODE": "a100:8"}, gpus("v100"))
    assert [device.name for device in told.devices or ()] == ["a100"]
    assert told.device_reason == "devices: a100 (sm_80), as SLURM_GPUS_PER_NODE says"
    here = hosts({**JOB, "SLURM_GPUS_PER_NODE": "gpu_type_7:8"}, gpus("v100"))
    assert here.device_reason == "devices: v100 (sm_70), as on this node"
    assert hosts(JOB, gpus("v100"), this_host="login").devices is None
    assert [device.name for device in hosts(JOB, gpus("v100"), gpu="h100").devices or ()] == ["h100"]


def test_ranks_on_the_cpu() -> None:
    found = hosts(JOB, gpus("a100"), gpu="cpu")
    assert (found.topology.world_size, found.device_type) == (4, "cpu")
    assert found.topology_reason == "SLURM_JOB_NODELIST: 4 nodes x 1 CPU rank"
    forced = hosts({**JOB, "DS_ACCELERATOR": "cpu"}, num_gpus_per_node=2)
    assert (forced.topology.world_size, forced.device_type) == (8, "cpu")


def test_devices_by_host() -> None:
    by_host = {"n[1-2]": "a100", "*": "v100"}
    found = hosts(JOB, gpu=by_host, num_nodes=3)
    assert [(g.device.name, g.hosts) for g in found.groups or ()] == [("a100", "n[1-2]"), ("v100", "n3")]
    cpus = hosts(JOB, gpu={"*": "cpu"})
    assert (cpus.topology.world_size, cpus.device_type) == (4, "cpu")
    with pytest.raises(ConfigError, match="both cpu and GPUs"):
        hosts(JOB, gpu={"n1": "cpu", "*": "a100"})


def test_slots_that_are_not_known() -> None:
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "8(x2)"}
    with pytest.raises(ConfigError, match="how many GPUs each of the 2 hosts has is not known"):
        hosts(job)
    assert slots(hosts(job, num_gpus_per_node=2)) == {"n1": "0,1", "n2": "0,1"}


def test_flux_does_not_name_its_hosts() -> None:
    job = {"FLUX_URI": "local:///run/flux"}
    with pytest.raises(ConfigError, match="its environment does not name its hosts") as caught:
        hosts(job)
    assert "flux hostlist" in (caught.value.hint or "")
    assert slots(hosts(job, num_nodes=1)) == {"localhost": "0"}
    assert list(slots(hosts(job, num_nodes=2, num_gpus_per_node=1))) == ["node-0", "node-1"]


def test_how_a_job_is_reached() -> None:
    def via(environ: dict[str, str], **cluster: Any) -> tuple[str, str]:
        found = Facts(CPU, allocation=read_allocation(environ, this_host="n1"), local_names=("n1",))
        return choose_via(resolve_hosts(ClusterSpec.model_validate(cluster), found), found)

    assert via(JOB) == ("slurm", "n2 is a node of this Slurm job: srun reaches it")
    assert via(JOB, num_nodes=1) == ("local", "this machine is the only host")
    lsf = {"LSB_MCPU_HOSTS": "n1 4 n2 4"}
    assert via(lsf, num_gpus_per_node=1) == ("ssh", "n2 is not this machine")
    assert via({"FLUX_URI": "x"}, num_nodes=2, num_gpus_per_node=1)[0] == "local"  # names that are made up


def facts(environ: dict[str, str], text: str = SMALL, *overrides: str) -> Facts:
    return probe_facts(load(text, *overrides), cwd=Path.cwd(), environ=environ)


def test_when_a_job_is_looked_at(tmp_path: Path) -> None:
    found = facts(JOB).allocation
    assert found is not None
    assert found.names == ("n1", "n2", "n3", "n4")
    assert facts({}).allocation is None
    assert facts(JOB, SMALL, "launch.via=local").allocation is None
    assert facts(JOB, SMALL, f"cluster.hostfile={tmp_path / 'hosts'}").allocation is None
    flags = probe_facts(load_flags(), cwd=tmp_path, environ=JOB)  # gen-config, for a script of one's own
    assert flags.allocation == found


def test_a_job_of_this_machine_alone_is_this_machine() -> None:
    own = os.uname().nodename
    assert facts({**JOB, "SLURM_JOB_NODELIST": own}).allocation is None
    assert facts({**JOB, "SLURM_JOB_NODELIST": f"{own}.cluster.org"}).allocation is None
    elsewhere = facts({**JOB, "SLURM_JOB_NODELIST": "another-node"}).allocation  # salloc on a login node
    assert elsewhere is not None


def test_a_job_that_cannot_be_read() -> None:
    broken = {"SLURM_JOB_NODELIST": "n["}
    assert "SLURM_JOB_NODELIST:2: '[' is not closed" in str(facts(broken).allocation_problem)
    assert facts(broken, SMALL, "launch.via=local").allocation_problem is None
