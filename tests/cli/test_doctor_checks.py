"""What doctor makes of what it found on hosts: each fault alone, on hosts that are fine otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dslaunch.cli.doctor_checks import (
    HostFinding,
    Wanted,
    find_differences,
    find_problems,
    hosts_to_exclude,
)
from dslaunch.cli.doctor_report import Report, report_lines, summary
from dslaunch.core.devices import Accelerator, Inventory, lookup_device
from dslaunch.core.packages import COMPARED
from dslaunch.core.topology import Host
from dslaunch.launch.preflight import GIB, Space, TorchLock
from dslaunch.launch.probing import HostFacts, Interpreter, Probed

VERSIONS: dict[str, str | None] = dict.fromkeys(COMPARED, "1.0") | {"torch": "2.9.0"}
PYTHON = Interpreter(version="3.11.4", packages=VERSIONS, torch_cuda="12.8", has_headers=True)
FACTS = HostFacts(
    node="n", machine="x86_64", glibc="2.36", cpu="Xeon", cores=32, interpreter=PYTHON,
    tools={"c++": "12.2", "ninja": "1.13", "nvcc": "12.4"}, files={}, device_files=(), smi=None, visible={},
    shm=Space(total_bytes=64 * GIB, free_bytes=64 * GIB, free_inodes=None),
    cache_path="/c", cache=Space(total_bytes=90 * GIB, free_bytes=50 * GIB, free_inodes=10**6),
    cache_problem=None, nofile=65536, memlock=-1, infiniband=True, ops="/c/ops", locks=(), has_cwd=True,
    witness=None, addresses={"a": ["10.0.0.1"]}, own_addresses=["10.0.0.1"],
)  # fmt: skip
A100S = Inventory(
    tuple(Accelerator(str(i), lookup_device("a100-80g")) for i in range(2)), lookup_device("cpu")
)
V100S = replace(A100S, accelerators=tuple(Accelerator(str(i), lookup_device("v100")) for i in range(2)))
WANTED = Wanted(device_type="cuda", devices=frozenset({lookup_device("a100")}), cwd="/w", is_trainer=True)
NODES = ("a", "b", "c")


def fine(name: str) -> Probed:
    meets_at = ("10.0.0.1", 29500) if name == "a" else None
    return Probed(host=Host(name=name, slots=("0", "1")), facts=FACTS, meets_at=meets_at)


def with_fault(facts: dict[str, Any], wanted: Wanted = WANTED, **probed: Any) -> list[HostFinding]:
    """What is found where host b alone has this fault."""
    hosts = [fine(name) for name in NODES]
    hosts[1] = replace(hosts[1], facts=replace(FACTS, **facts), **probed)
    return find_problems(hosts, dict.fromkeys(NODES, A100S), wanted)


def without(*names: str) -> Interpreter:
    return replace(PYTHON, packages={**VERSIONS, **dict.fromkeys(names)})


def test_hosts_that_are_fine() -> None:
    assert with_fault({}) == []
    assert find_differences([fine(name) for name in NODES], dict.fromkeys(NODES, A100S)) == ()


@pytest.mark.parametrize(
    ("facts", "code", "severity", "message"),
    [
        ({"interpreter": Interpreter(problem="no program /x/python", packages={})}, "python", "error",
         "no program /x/python"),
        ({"interpreter": without("torch", "deepspeed")}, "packages", "error",
         "torch, deepspeed are not installed"),
        ({"interpreter": without("peft")}, "packages", "error",
         "peft is not installed, which dslaunch's own trainer needs"),
        ({"interpreter": replace(PYTHON, packages={**VERSIONS, "torch": "2.8.0"})}, "versions", "error",
         "torch 2.8.0, but 2.9.0 on other hosts"),
        ({"interpreter": replace(PYTHON, packages={**VERSIONS, "peft": "0.9"})}, "versions", "warning",
         "peft 0.9, but 1.0 on other hosts"),
        ({"interpreter": replace(PYTHON, version="3.11.9")}, "versions", "warning",
         "python 3.11.9, but 3.11.4 on other hosts"),
        ({"interpreter": replace(PYTHON, version="3.12.4")}, "versions", "error",
         "python 3.12.4, but 3.11.4 on other hosts"),
        ({"machine": "aarch64"}, "versions", "error", "machine aarch64, but x86_64 on other hosts"),
        ({"tools": {**FACTS.tools, "ninja": None, "c++": None}}, "compiler", "warning",
         "no c++, ninja: DeepSpeed's ops cannot be compiled"),
        ({"tools": {**FACTS.tools, "nvcc": "11.8"}}, "nvcc", "warning",
         "nvcc is of CUDA 11.8 and torch of 12.8: DeepSpeed refuses to compile its ops"),
        ({"tools": {**FACTS.tools, "nvcc": None}}, "nvcc", "warning",
         "no nvcc: DeepSpeed's CUDA ops cannot be compiled"),
        ({"has_cwd": False}, "cwd", "error", "no working directory /w"),
        ({"witness": "the run directory /r is not seen here"}, "run-dir", "error",
         "the run directory /r is not seen here"),
        ({"cache_problem": "Disk quota exceeded"}, "cache", "error",
         "cannot write the cache /c: Disk quota exceeded"),
        ({"cache": replace(FACTS.cache, free_bytes=GIB // 2)}, "cache", "warning",
         "0.5 GiB are free for the cache /c"),
        ({"cache": replace(FACTS.cache, free_inodes=7)}, "cache", "warning",
         "only 7 files more fit on the file system of /c"),
        ({"shm": replace(FACTS.shm, total_bytes=64 * 2**20)}, "shm", "warning",
         "/dev/shm is 64 MiB for 2 ranks: NCCL and data loaders die of a bus error where it is full"),
        ({"nofile": 256}, "nofile", "warning", "a process may open 256 files"),
        ({"memlock": 8 * 2**20}, "memlock", "warning",
         "it has InfiniBand, and a process may lock 8 MiB of memory"),
        ({"locks": (TorchLock(path="/c/ops/x/lock", held=False),)}, "stale-lock", "warning",
         "no process has /c/ops/x/lock open: a killed build left it, and DeepSpeed waits for it for ever"),
        ({"addresses": {"a": ["127.0.1.1"]}}, "name", "warning",
         "a leads to 127.0.1.1 there, which is itself"),
        ({"addresses": {"a": ["10.0.0.1", "192.168.0.1"]}}, "name", "info",
         "a leads to 10.0.0.1, 192.168.0.1; 10.0.0.1 is used"),
        ({"own_addresses": ["127.0.1.1"]}, "own-name", "info",
         "its own name leads to 127.0.1.1: dslaunch goes by the route to the others"),
    ],
)  # fmt: skip
def test_one_fault_of_one_host(facts: dict[str, Any], code: str, severity: str, message: str) -> None:
    (found,) = with_fault(facts)
    assert (found.code, found.severity, found.host, found.message) == (code, severity, "b", message)
    assert found.hint or severity == "info"


@pytest.mark.parametrize("facts", [
    {"tools": {**FACTS.tools, "nvcc": "12.0"}},  # another minor of CUDA 12 will do
    {"infiniband": False, "memlock": 65536},
    {"cache": Space(total_bytes=None, free_bytes=None, free_inodes=None)},
    {"locks": (TorchLock(path="/c/ops/x/lock", held=True),)},
    {"locks": (TorchLock(path="/c/ops/x/lock", held=None),)},
])  # fmt: skip
def test_what_is_no_fault(facts: dict[str, Any]) -> None:
    assert with_fault(facts) == []


def test_a_script_needs_less_than_our_trainer() -> None:
    script = replace(WANTED, is_trainer=False)
    assert [f.severity for f in with_fault({"interpreter": without("peft")}, script)] == ["warning"]
    assert [f.severity for f in with_fault({"witness": "not seen"}, script)] == ["warning"]
    # Our trainer removes such a lock; a script would hang.
    locks = (TorchLock(path="/c/ops/x/lock", held=False),)
    assert [f.severity for f in with_fault({"locks": locks}, script)] == ["error"]


def test_cuda_13_minors_do_not_mix() -> None:
    python = replace(PYTHON, torch_cuda="13.0")
    assert with_fault({"interpreter": python, "tools": {**FACTS.tools, "nvcc": "13.0"}}) == []
    (found,) = with_fault({"interpreter": python, "tools": {**FACTS.tools, "nvcc": "13.1"}})
    assert found.code == "nvcc"


def test_a_lock_that_another_host_holds_is_not_stale() -> None:
    """They share a file system, and /proc shows the processes of one host alone."""
    path = "/c/ops/x/lock"
    hosts = [fine("a"), fine("b")]
    hosts = [
        replace(h, facts=replace(FACTS, locks=(TorchLock(path=path, held=h.host.name == "a"),)))
        for h in hosts
    ]
    assert find_problems(hosts, dict.fromkeys("ab", A100S), WANTED) == []


def test_devices_against_the_plan() -> None:
    hosts = [fine("a"), replace(fine("b"), host=Host(name="b", slots=("0", "5")))]
    by_host = {"a": V100S, "b": A100S}
    kind, slots = find_problems(hosts, by_host, WANTED)
    assert kind.message == "the plan is for a100 (sm_80), but it has v100 (sm_70)"
    assert slots.message == "the plan is for GPU 5, but it shows 2 (0, 1)"
    assert {f.severity for f in (kind, slots)} == {"error"}
    assert [d.what for d in find_differences(hosts, by_host)] == ["devices"]
    assert find_problems(hosts, by_host, replace(WANTED, device_type="cpu")) == []


def test_a_clock_that_goes_ahead_of_the_others() -> None:
    (found,) = with_fault({}, skew_s=61.2)
    assert (found.host, found.message) == ("b", "its clock is 61 s ahead of the others'")
    assert with_fault({}, skew_s=-4.0) == []


def test_our_own_clock_that_is_wrong_is_not_theirs() -> None:
    hosts = [replace(fine(name), skew_s=-300.0) for name in NODES]
    assert find_problems(hosts, dict.fromkeys(NODES, A100S), WANTED) == []


def test_the_way_to_the_first_host() -> None:
    (found,) = with_fault({}, unreached="No route to host")
    assert found.message == "cannot reach a at 10.0.0.1 port 29500: No route to host"
    assert "--master-addr" in (found.hint or "")
    hosts = [fine("a"), *(replace(fine(name), unreached="No route to host") for name in "bc")]
    (found,) = find_problems(hosts, dict.fromkeys(NODES, A100S), WANTED)  # then it is that of the first
    assert (found.host, found.message) == (
        "a",
        "no other host reaches it at 10.0.0.1 port 29500: No route to host",
    )
    assert hosts_to_exclude(hosts, [found]) == ("a",)


def report(probed: list[Probed]) -> Report:
    inventories = {one.host.name: A100S for one in probed if one.facts is not None}
    findings = find_problems(probed, inventories, WANTED)
    return Report(
        probed=tuple(probed), inventories=inventories, memory={}, precision=("bf16", "why"), python="/p",
        differences=find_differences(probed, inventories), findings=tuple(findings),
        exclude=hosts_to_exclude(probed, findings), seconds=0.5,
    )  # fmt: skip


@pytest.mark.parametrize(("device_type", "severity"), [("cuda", "error"), ("cpu", "warning")])
def test_a_machine_under_two_names(device_type: str, severity: str) -> None:
    one = replace(FACTS, identity="n boot pid")
    hosts = [replace(fine("a"), facts=one), fine("b"), replace(fine("c"), facts=one)]
    wanted = replace(WANTED, device_type=device_type)
    (found,) = find_problems(hosts, dict.fromkeys(NODES, A100S), wanted)
    assert (found.code, found.severity, found.host) == ("one-machine", severity, "c")
    assert found.message == "it is the same machine as a, and both have slot 0"


def test_devices_of_another_vendor() -> None:
    """Of those there is no list; but where NVIDIA's are, they are seen to be others."""
    wanted = replace(WANTED, devices=frozenset({lookup_device("max1550")}))
    hosts = [fine(name) for name in NODES]
    none = replace(A100S, accelerators=())
    assert find_problems(hosts, dict.fromkeys(NODES, none), wanted) == []
    (found,) = find_problems(hosts, {**dict.fromkeys(NODES, none), "b": A100S}, wanted)
    assert (found.host, found.message) == ("b", "the plan is for max1550 (pvc), but it has a100 (sm_80)")


def test_what_all_hosts_have_is_the_matter_of_none() -> None:
    """A lock on a file system that they share; one of them besides cannot write its cache."""
    left = replace(FACTS, locks=(TorchLock(path="/c/ops/x/lock", held=False),))
    hosts = [replace(fine(name), facts=left) for name in NODES]
    script = replace(WANTED, is_trainer=False)

    def exclude() -> tuple[str, ...]:
        return hosts_to_exclude(hosts, find_problems(hosts, dict.fromkeys(NODES, A100S), script))

    assert exclude() == ()
    hosts[1] = replace(hosts[1], facts=replace(left, cache_problem="No space left on device"))
    assert exclude() == ("b",)
    hosts[:] = [replace(hosts[0], facts=replace(left, cache_problem="No space left on device"))]
    assert exclude() == ()  # none would be left


def test_the_report_of_several_hosts() -> None:
    other = replace(FACTS, interpreter=replace(PYTHON, packages={**VERSIONS, "torch": "2.8.0"}))
    hosts = [fine("a"), replace(fine("b"), facts=other), fine("c"),
             Probed(host=Host(name="d", slots=("0",)), problem="Connection refused"),
             replace(fine("e"), facts=replace(FACTS, nofile=100)),
             replace(fine("f"), facts=replace(FACTS, nofile=100))]  # fmt: skip
    found = report(hosts)
    assert report_lines(found) == [
        "5 of 6 hosts answered, in 0.5 s",
        "ranks would meet at 10.0.0.1 (a); 4 of 5 others reach it",
        "precision bf16: why",
        "",
        "differs  value  hosts",
        "torch    2.9.0  a, c, e, f",
        "         2.8.0  b",
        "",
        "error    d: Connection refused",
        "error    b: torch 2.8.0, but 2.9.0 on other hosts",
        "         -> install the same on all hosts",
        "warning  e, f: a process may open 100 files",
        "         -> ulimit -n 65536",
        "",
        "without what cannot be used: --exclude b@d",
    ]
    assert summary(found) == "2 errors and 1 warning"
    assert not found.is_ready


def test_where_no_host_is_left_none_is_to_be_excluded() -> None:
    hosts = [Probed(host=Host(name=name, slots=("0",)), problem="gone") for name in NODES]
    found = report(hosts)
    assert found.exclude == ()
    assert report_lines(found)[-1] == "error    a, b, c: gone"


def test_the_json_is_an_inventory() -> None:
    import json

    from dslaunch.core.inventory import parse_inventory

    text = json.dumps(report([fine("a"), fine("b")]).to_json())
    assert parse_inventory(text, "x") == {"a": replace(A100S, ram_gib=None), "b": A100S}
