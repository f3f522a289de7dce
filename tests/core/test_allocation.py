"""What each scheduler's environment says of a job's hosts and devices, and what it does not say."""

from __future__ import annotations

import pytest

from dslaunch.core.allocation import Allocation, check_started_once, read_allocation
from dslaunch.core.errors import HostfileError

UUIDS = "GPU-8f1b2c3d-0000-1111-2222-333344445555,MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"


def read(
    environ: dict[str, str], files: dict[str, str] | None = None, this_host: str = "login"
) -> Allocation | None:
    def read_file(path: str) -> str:
        try:
            return (files or {})[path]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory", path) from None

    return read_allocation(environ, this_host=this_host, read_file=read_file)


def found(
    environ: dict[str, str], files: dict[str, str] | None = None, this_host: str = "login"
) -> Allocation:
    allocation = read(environ, files, this_host)
    assert allocation is not None
    return allocation


def slots(allocation: Allocation, **options: object) -> dict[str, str]:
    return {h.name: ",".join(h.slots) for h in allocation.hosts(**options)}  # type: ignore[arg-type]


def slurm(**more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "72(x2)", **more}


def test_no_job() -> None:
    assert read({"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "SLURM_CONF": "/etc/slurm.conf"}) is None
    assert read({"SLURM_JOB_NODELIST": "", "PBS_NODEFILE": " ", "LSB_JOBID": "3", "JOB_ID": "4"}) is None


@pytest.mark.parametrize(
    ("variables", "expected", "source"),
    [
        ({"SLURM_GPUS_PER_NODE": "4"}, {"n1": "0,1,2,3", "n2": "0,1,2,3"}, "SLURM_GPUS_PER_NODE"),
        ({"SLURM_GPUS_PER_NODE": "a100:2"}, {"n1": "0,1", "n2": "0,1"}, "SLURM_GPUS_PER_NODE"),
        ({"SLURM_GPUS_PER_NODE": "gpu:a100:1,gpu:v100:1"}, {"n1": "0,1", "n2": "0,1"}, "SLURM_GPUS_PER_NODE"),
        ({"SLURM_GPUS_ON_NODE": "2"}, {"n1": "0,1", "n2": "0,1"}, "SLURM_GPUS_ON_NODE"),
        (
            {"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS": "a100:4"},
            {"n1": "0,1", "n2": "0,1"},
            "SLURM_GPUS_ON_NODE",
        ),
        ({"SLURM_JOB_GPUS": "4,6"}, {"n1": "0,1", "n2": "0,1"}, "SLURM_JOB_GPUS"),
        ({"SLURM_JOB_GPUS": "0-1,7"}, {"n1": "0,1,2", "n2": "0,1,2"}, "SLURM_JOB_GPUS"),
        (
            {"SLURM_GPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_GPUS_ON_NODE": "4"},
            {"n1": "0,1,2,3", "n2": "0,1"},
            "SLURM_GPUS_PER_TASK x SLURM_TASKS_PER_NODE",
        ),
    ],
)
def test_slurm_gpus(variables: dict[str, str], expected: dict[str, str], source: str) -> None:
    allocation = found(slurm(**variables))
    assert slots(allocation) == expected
    assert allocation.devices.source == source


def test_the_kind_of_gpu_where_slurm_tells() -> None:
    assert found(slurm(SLURM_GPUS_PER_NODE="a100:4")).devices.kind == "a100"
    assert found(slurm(SLURM_GPUS_PER_NODE="a100:2,v100:2")).devices.kind is None
    assert found(slurm(SLURM_GPUS_PER_NODE="4")).devices.kind is None


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({}, "SLURM_JOB_NODELIST: how many GPUs each of the 2 hosts has is not known: nothing tells"),
        (
            {"SLURM_GPUS_ON_NODE": "3", "SLURM_GPUS": "4"},
            "SLURM_GPUS_ON_NODE is 3 here, but SLURM_GPUS is 4 over 2 nodes, so they differ",
        ),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "8"}, "does not fit the job"),
        (
            {"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "8"},
            "does not fit the job",
        ),
    ],
)
def test_tasks_are_never_taken_for_gpus(variables: dict[str, str], part: str) -> None:
    allocation = found(slurm(**variables))
    with pytest.raises(HostfileError) as caught:
        allocation.hosts()
    assert part in caught.value.message
    assert "--num-gpus-per-node" in (caught.value.hint or "")
    assert slots(allocation, num_gpus_per_node=2) == {"n1": "0,1", "n2": "0,1"}


def test_this_nodes_visible_devices() -> None:
    environ = slurm(CUDA_VISIBLE_DEVICES=UUIDS)
    allocation = found(environ, this_host="N1.cluster.org")
    assert slots(allocation) == {"n1": UUIDS, "n2": "0,1"}  # n2: the first two that it makes visible
    assert allocation.devices.source == "CUDA_VISIBLE_DEVICES of this node has 2, taken for all"
    # On a login node, or on another machine that inherited the variables, they are not the job's.
    with pytest.raises(HostfileError, match="this machine is none of them"):
        found(environ, this_host="login").hosts()
    amd = slurm(ROCR_VISIBLE_DEVICES="0,1,2", HIP_VISIBLE_DEVICES="2")
    assert slots(found(amd, this_host="n2")) == {"n1": "0", "n2": "2"}


def test_the_name_that_slurm_has_for_this_node() -> None:
    job = slurm(SLURM_JOB_NODELIST="n1", SLURMD_NODENAME="n1", CUDA_VISIBLE_DEVICES="3")
    allocation = found(job, this_host="rack4-17")
    assert (allocation.here, allocation.is_this_machine, slots(allocation)) == ("n1", True, {"n1": "3"})


@pytest.mark.parametrize("none", ["", "-1", "NoDevFiles"])
def test_a_job_without_gpus(none: str) -> None:
    allocation = found(slurm(CUDA_VISIBLE_DEVICES=none), this_host="n1")
    with pytest.raises(HostfileError, match="n1 has no GPU in this job: CUDA_VISIBLE_DEVICES"):
        allocation.hosts(num_gpus_per_node=2)
    assert slots(allocation, cpu=True) == {"n1": "0", "n2": "0"}
    assert slots(allocation, cpu=True, num_gpus_per_node=2) == {"n1": "0,1", "n2": "0,1"}


def test_ranks_on_the_cpu_leave_the_gpus_alone() -> None:
    allocation = found(slurm(CUDA_VISIBLE_DEVICES="3", SLURM_GPUS_PER_NODE="1"), this_host="n1")
    hosts = allocation.hosts(cpu=True)
    assert {host.slots for host in hosts} == {("0",)}
    assert allocation.reason(hosts, cpu=True) == "SLURM_JOB_NODELIST: 2 nodes x 1 CPU rank"


def test_reasons() -> None:
    allocation = found(slurm(SLURM_JOB_NODELIST="n[1-4]", SLURM_GPUS_PER_NODE="8"))
    hosts = allocation.hosts()
    assert allocation.reason(hosts) == "SLURM_JOB_NODELIST: 4 nodes x 8 GPUs (SLURM_GPUS_PER_NODE)"
    assert allocation.reason(hosts[:3]) == "SLURM_JOB_NODELIST: 3 of 4 nodes x 8 GPUs (SLURM_GPUS_PER_NODE)"
    unequal = found(slurm(SLURM_GPUS_PER_TASK="2", SLURM_TASKS_PER_NODE="2,1"))
    assert "2 nodes x 2 to 4 GPUs" in unequal.reason(unequal.hosts())


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST:2: '[' is not closed"),
        ({"SLURM_JOB_NODELIST": "(null)"}, "SLURM_JOB_NODELIST:1: '(null)' is not a host name"),
        ({"SLURM_GPUS_PER_NODE": "many"}, "SLURM_GPUS_PER_NODE: 'many' is not a number of GPUs"),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "2(x2"}, "SLURM_TASKS_PER_NODE:1: '2(x2'"),
        ({"SLURM_HET_SIZE": "2"}, "heterogeneous Slurm job"),
    ],
)
def test_slurm_jobs_that_are_refused(variables: dict[str, str], part: str) -> None:
    with pytest.raises(HostfileError) as caught:
        read(slurm(**variables))
    assert part in caught.value.message
    assert caught.value.exit_code == 2


def test_slurm_shells_that_are_not_refused() -> None:
    batch = slurm(SLURM_PROCID="0", SLURM_NTASKS="16")
    terminal = slurm(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="16", SLURM_PTY_PORT="40001")
    one_task = slurm(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")
    for environ in (batch, terminal, one_task):
        check_started_once(environ)
        assert found(environ).names == ("n1", "n2")
    assert found({"SLURM_NODELIST": "a,b,a"}).names == ("a", "b")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, "srun started dslaunch 4 times"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started dslaunch 2 times"),
        ({"PMI_RANK": "0", "PMI_SIZE": "8"}, "mpiexec started dslaunch 8 times"),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "mpirun_rsh started dslaunch 2 times"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "16"}, "flux run started dslaunch 16 times"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "6"}, "jsrun started dslaunch 6 times"),
        ({"PALS_RANKID": "1"}, "mpiexec started dslaunch several times"),
    ],
)
def test_several_copies_of_one_launch(environ: dict[str, str], says: str) -> None:
    with pytest.raises(HostfileError, match=says) as caught:
        check_started_once(environ)
    assert "set launch.via to local" in (caught.value.hint or "")
    alone = {name: "1" if name.endswith(("SIZE", "TASKS")) else "0" for name in environ}
    check_started_once(alone)
    check_started_once({**environ, **dict.fromkeys(environ, "")})


def test_pbs() -> None:
    environ = {"PBS_JOBID": "12.srv", "PBS_NODEFILE": "/aux/12", "CUDA_VISIBLE_DEVICES": UUIDS}
    files = {"/aux/12": "a.x.org\na.x.org\n\nb.x.org\r\nb.x.org\n"}
    allocation = found(environ, files, this_host="a")
    assert (allocation.scheduler, allocation.names) == ("PBS", ("a.x.org", "b.x.org"))
    assert slots(allocation) == {"a.x.org": UUIDS, "b.x.org": "0,1"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "PBS_NODEFILE: cannot read /aux/12: No such file or directory"),
        ("\n \n", "PBS_NODEFILE: no host in /aux/12"),
        ("a\n-oProxyCommand=x\n", "/aux/12:2: '-oProxyCommand=x' is not a host name"),
    ],
)
def test_a_wrong_node_file(text: str | None, part: str) -> None:
    with pytest.raises(HostfileError) as caught:
        read({"PBS_NODEFILE": "/aux/12"}, {} if text is None else {"/aux/12": text})
    assert part in caught.value.message


LSF = {
    "LSB_JOBID": "5",
    "LSB_DJOB_HOSTFILE": "/lsf/5",
    "LSB_MCPU_HOSTS": "h1 1 h2 4 h3 4",
    "LSB_HOSTS": "h4 h4 h5 h5",
}


def test_lsf_takes_the_best_of_its_lists() -> None:
    assert found(LSF, {"/lsf/5": "a\na\nb\nb\n"}).names == ("a", "b")
    mcpu = {key: LSF[key] for key in ("LSB_MCPU_HOSTS", "LSB_HOSTS")}
    assert (found(mcpu).source, found(mcpu).names) == ("LSB_MCPU_HOSTS", ("h2", "h3"))
    assert found({"LSB_HOSTS": LSF["LSB_HOSTS"]}).names == ("h4", "h5")
    with pytest.raises(HostfileError, match="LSB_DJOB_HOSTFILE: cannot read /lsf/5"):
        read(LSF)


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("h1 1 h2 4 h3 4", "h2 h3"),
        ("batch1 1 h2 42", "h2"),
        ("h1 1 h2 1 h3 1", "h1 h2 h3"),  # one slot each (ptile=1): no launch node
        ("h1 1 h2 4 h3 1", "h1 h2 h3"),
        ("h1 4 h2 4 h3 1", "h1 h2 h3"),
        ("h1 1", "h1"),
        ("h1 2 h1 2 h2 4", "h1 h2"),
    ],
)
def test_the_launch_node_of_lsf_runs_no_rank(listed: str, names: str) -> None:
    allocation = found({"LSB_MCPU_HOSTS": listed})
    assert allocation.names == tuple(names.split())
    assert (allocation.left_out is not None) == (names.split()[0] != listed.split()[0])
    if allocation.left_out:
        assert allocation.reason(allocation.hosts(num_gpus_per_node=1)).endswith(
            f"{listed.split()[0]} left out: with its single slot it is the launch node"
        )


@pytest.mark.parametrize("listed", ["a 4 b", "a b", "4 a", "a -1", "a " + "9" * 5000])
def test_a_wrong_lsf_list(listed: str) -> None:
    with pytest.raises(HostfileError, match='is not of the form "a 4 b 4"'):
        read({"LSB_MCPU_HOSTS": listed})


def test_sge() -> None:
    environ = {"JOB_ID": "9", "PE_HOSTFILE": "/spool/9/pe_hostfile"}
    files = {"/spool/9/pe_hostfile": "a 4 all.q@a UNDEFINED\nb 2 all.q@b <NULL>\na 2 gpu.q@a UNDEFINED\n"}
    allocation = found(environ, files)
    assert (allocation.scheduler, allocation.names) == ("SGE", ("a", "b"))
    with pytest.raises(HostfileError, match="how many GPUs each of the 2 hosts has is not known"):
        allocation.hosts()
    assert slots(found({**environ, "SGE_HGR_gpu": "0 1"}, files)) == {"a": "0,1", "b": "0,1"}
    with pytest.raises(HostfileError, match="pe_hostfile:1: 'a' is not `host slots"):
        read(environ, {"/spool/9/pe_hostfile": "a\n"})


@pytest.mark.parametrize("name", ["FLUX_ENCLOSING_ID", "FLUX_JOB_ID", "FLUX_URI"])
def test_flux_names_no_host(name: str) -> None:
    allocation = found({name: "\u01924UkyS6b7", **slurm(SLURM_GPUS_PER_NODE="8")})  # Flux inside of Slurm
    assert (allocation.scheduler, allocation.source, allocation.names) == ("Flux", name, ())


def test_ten_thousand_hosts() -> None:
    allocation = found({"SLURM_JOB_NODELIST": "n[00001-10000]", "SLURM_GPUS_PER_NODE": "8"})
    hosts = allocation.hosts()
    assert (len(hosts), hosts[-1].name, len(hosts[-1].slots)) == (10_000, "n10000", 8)
