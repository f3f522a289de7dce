"""The master port."""

from __future__ import annotations

import os
import socket

import pytest

from dslaunch.core.errors import EnvironmentNotReady
from dslaunch.launch.agent import find_holder
from dslaunch.launch.ports import lease_port, port_seed
from tests.launch.conftest import Launch
from tests.launch.launching import python


def listen(address: str = "127.0.0.1") -> socket.socket:
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    server.bind((address, 0))
    server.listen()
    return server


def test_a_free_port_can_be_bound() -> None:
    lease = lease_port(None)
    with socket.socket() as server:
        server.bind(("0.0.0.0", lease.port))
    lease.close()


def test_a_leased_port_is_not_given_twice() -> None:
    lease = lease_port(None)
    with pytest.raises(EnvironmentNotReady, match=f"master_port {lease.port} is taken"):
        lease_port(lease.port)
    lease.close()
    lease_port(lease.port).close()


def test_a_batch_job_keeps_its_port_and_another_start_of_it_has_another() -> None:
    """It can be foretold, and ranks of two starts do not meet."""
    job = {"SLURM_JOB_ID": "4711"}

    def chosen(environ: dict[str, str], restart: str = "0") -> int:
        lease = lease_port(None, port_seed(environ, restart))
        lease.close()
        return lease.port

    first = chosen(job)
    starts = (
        job, {**job, "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "4712"}, {"PBS_JOBID": "4711.srv"},
        {"LSB_JOBID": "4711", "LSB_JOBINDEX": "1"}, {"LSB_JOBID": "4711", "LSB_JOBINDEX": "2"},
    )  # fmt: skip
    assert [chosen(environ) for environ in starts].count(first) == 1
    assert len({chosen(environ) for environ in starts} | {chosen(job, "1")}) == len(starts) + 1
    with socket.socket() as server:  # taken: the next of the job's own
        server.bind(("0.0.0.0", first))
        server.listen()
        second = chosen(job)
    lease = lease_port(None, port_seed(job))
    assert (lease.port, chosen(job)) == (first, second)  # a second launch within the job
    lease.close()
    assert port_seed({"HOME": "/root"}) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_taken_port_names_who_holds_it(address: str) -> None:
    try:
        server = listen(address)
    except OSError:
        pytest.skip(f"no {address} on this machine")
    with server:
        port = server.getsockname()[1]
        assert find_holder(port) is not None
        with pytest.raises(EnvironmentNotReady, match=rf"{port} is taken by process {os.getpid()} \("):
            lease_port(port)


def test_a_port_that_was_taken_can_be_leased_later() -> None:
    with listen() as server, pytest.raises(EnvironmentNotReady) as refused:
        lease_port(server.getsockname()[1])
    port = int(refused.value.message.split()[1])
    lease_port(port).close()  # while the error, and with it all that it refers to, is still there


def test_a_taken_port_starts_nothing(launch: Launch) -> None:
    with listen() as server:
        port = str(server.getsockname()[1])
        launched = launch(python("touch('started')"), "--master-port", port)
        code, _, err = launched.wait()
    assert code == 3
    assert f"master_port {port} is taken by process {os.getpid()}" in err
    assert "nothing was started" in err
    assert launched.events("rank_start") == []


def test_a_given_port_and_address_are_used(launch: Launch) -> None:
    lease = lease_port(None)
    lease.close()
    show = python("print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    launched = launch(show, "--master-port", str(lease.port), "--master-addr", "fe80::1%lo")
    code, out, err = launched.wait()
    assert (code, out) == (0, f"fe80::1%lo {lease.port}\n"), err
