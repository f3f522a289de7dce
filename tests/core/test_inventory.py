"""Inventories of hosts: written by one machine, read by another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.core.devices import Accelerator, Inventory, lookup_device
from dslaunch.core.errors import ConfigError
from dslaunch.core.inventory import find_host, inventory_json, parse_inventory

A100 = '{"name": "NVIDIA A100-SXM4-80GB", "memory_gib": 79.1, "compute_capability": "8.0"}'


def parse(text: str) -> dict[str, Inventory]:
    return parse_inventory(text, "inv.json")


def test_the_lines_of_several_nodes_are_one_inventory() -> None:
    found = parse(f'{{"a": {{"accelerators": [{A100}, {A100}]}}}}\n\n{{"b": {{"accelerators": []}}}}\n')
    assert list(found) == ["a", "b"]
    assert [a.id for a in found["a"].accelerators] == ["0", "1"]
    device = found["a"].accelerators[0].device
    assert (device, device.memory_gib) == (lookup_device("a100"), 79.1)
    assert found["b"].accelerators == ()


def test_what_is_written_is_read_back() -> None:
    accelerators = (
        Accelerator("0", lookup_device("v100-32gb")),
        Accelerator("1", lookup_device("mi300x")),
    )
    one = Inventory(accelerators, lookup_device("cpu"), ram_gib=503.5)
    read = parse(json.dumps({"n": inventory_json(one)}))["n"]
    assert read == one
    assert [a.device.memory_gib for a in read.accelerators] == [31.52, 189.12]


def test_a_device_that_is_not_in_the_table_counts_by_its_capability() -> None:
    text = '{"n": {"accelerators": [{"name": "NVIDIA Z9", "compute_capability": "9.0"}, {"name": "Z8"}]}}'
    known, unknown = (a.device for a in parse(text)["n"].accelerators)
    assert (known.name, known.arch, known.bf16) == ("NVIDIA Z9", "sm_90", "yes")
    assert unknown.bf16 == "unknown"


def test_the_name_does_not_tell_the_memory_where_it_is_given() -> None:
    """The 480 GB in this name are the CPU's."""
    text = '{"n": {"accelerators": [{"name": "NVIDIA GH200 480GB", "memory_gib": 94.5}]}}'
    assert parse(text)["n"].accelerators[0].device.memory_gib == 94.5


def test_the_cpu_of_a_node() -> None:
    found = parse('{"n": {"accelerators": [], "cpu": {"bf16": "yes", "fp16": "no"}, "ram_gib": 64}}')["n"]
    assert (found.cpu.bf16, found.cpu.fp16, found.ram_gib) == ("yes", "no", 64.0)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "inv.json: no host in it"),
        ("{}", "no host in it"),
        ('{"a": {"accelerators": []}}\n{oops', "inv.json:2:2: not JSON"),
        ("[" * 100_000, "inv.json:1: too long or too deep"),
        ('{"a": ' + "9" * 5000 + "}", "inv.json:1: too long or too deep"),
        ("[1]", "inv.json:1: [1] is no mapping of host names"),
        ('{"a": 3}', "inv.json:1: a: 3 is no mapping"),
        ('{"a": {}}', "a: accelerators is no list"),
        ('{"a": {"accelerators": []},\n"a": {"accelerators": []}}', "'a' is given twice"),
        ('{"a": {"accelerators": []}}\n{"a": {"accelerators": []}}', "inv.json:2: host a is given twice"),
        ('{"a": {"accelerators": [], "gpus": 3}}', "a: unknown key gpus"),
        ('{"a": {"accelerators": [{}]}}', "a: accelerators[0]: name is missing"),
        ('{"a": {"accelerators": [{"name": "a100", "memory": 3}]}}', "unknown key memory"),
        ('{"a": {"accelerators": [{"name": "a100", "memory_gib": -1}]}}', "memory_gib is -1"),
        ('{"a": {"accelerators": [{"name": "a100", "memory_gib": "80"}]}}', 'memory_gib is "80"'),
        ('{"a": {"accelerators": [{"name": "x", "compute_capability": 8}]}}', "compute_capability is 8"),
        ('{"a": {"accelerators": [], "cpu": {"bf16": true}}}', "cpu.bf16 is True"),
        ('{"a": {"accelerators": [], "ram_gib": NaN}}', "ram_gib is NaN"),
    ],
)  # fmt: skip
def test_what_is_no_inventory(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert part in caught.value.message
    assert caught.value.hint


def test_long_and_short_names_of_a_host() -> None:
    found = parse(
        '{"n1.cluster": {"accelerators": []}, "n2": {"accelerators": []}, "10.0.0.1": {"accelerators": []}}'
    )
    assert find_host(found, "n1") is found["n1.cluster"]
    assert find_host(found, "n2.cluster") is found["n2"]
    assert find_host(found, "n3") is None
    assert find_host(found, "10.0.0.2") is None


def smi(tmp_path: Path, script: str) -> dict[str, str]:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")}
    return {**kept, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def printed(environ: dict[str, str]) -> Inventory:
    argv = [sys.executable, "-m", "dslaunch", "doctor", "--json"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("\n") == 1, done.stderr
    return parse(done.stdout)[os.uname().nodename]


def test_nvidia_smi_tells_the_memory(tmp_path: Path) -> None:
    rows = "0, NVIDIA GH200 480GB, 97871, 9.0\\n1, NVIDIA Z9, [N/A], 12.0\\n"
    found = printed(smi(tmp_path, f"printf '{rows}'"))
    gh200, z9 = (a.device for a in found.accelerators)
    assert (gh200, gh200.memory_gib) == (lookup_device("gh200"), 94.14)
    assert (z9.arch, z9.memory_gib) == ("sm_120", None)
    assert found.ram_gib is not None
    assert found.ram_gib > 0


@pytest.mark.parametrize("script", ["exit 9", "echo NVIDIA-SMI has failed", "exit 0"])
def test_an_nvidia_smi_that_knows_nothing_is_not_believed(tmp_path: Path, script: str) -> None:
    environ = smi(tmp_path, script)
    assert printed(environ).accelerators == printed({**environ, "PATH": "/nowhere"}).accelerators


def test_hidden_accelerators_are_not_asked_for(tmp_path: Path) -> None:
    environ = smi(tmp_path, "printf '0, NVIDIA L4, 23034, 8.9\\n'")
    assert len(printed(environ).accelerators) == 1
    assert printed({**environ, "DS_ACCELERATOR": "cpu"}).accelerators == ()
