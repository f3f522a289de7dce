"""Whatever stands in a file, check says something and never raises; so do repair and comparison."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main
from dslaunch.config.check import Target, check_config
from dslaunch.config.check.compare import compare_configs
from dslaunch.config.check.files import check_file
from dslaunch.config.check.repair import repair_config
from dslaunch.config.schema import key_table
from dslaunch.core.devices import lookup_device
from tests.config.check.test_against_deepspeed import VALUES
from tests.config.check.test_mistakes import GOOD

TARGETS = [
    Target(),
    Target(world_size=7),
    Target("hf-trainer", 8, (lookup_device("v100"),), "0.15.0"),
    Target("accelerate", None, (lookup_device("cpu"),), "not.a.version"),
]


def scribbled(rng: random.Random) -> dict[str, Any]:
    """A config with several random values in random keys, sections included."""
    config = copy.deepcopy(GOOD)
    paths = [
        *key_table(),
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
        "a.b.c",
        "optimizer.params.x",
    ]
    for _ in range(rng.randint(1, 8)):
        block: Any = config
        *sections, name = rng.choice(paths).split(".")
        for section in sections:
            if not isinstance(block.get(section), dict):
                block[section] = {}
            block = block[section]
        block[name] = rng.choice([*VALUES, "SGD", "Muon", "WarmupDecayLR", -2, 1e300, [[]], {"": None}])
    return config


def test_scribbled_configs() -> None:
    rng = random.Random(11)
    previous: dict[str, Any] = {}
    for _ in range(1500):
        config, target = scribbled(rng), rng.choice(TARGETS)
        text = json.dumps(config)
        for finding in check_config(text, target).findings:
            assert finding.message and finding.severity in ("error", "warning", "info")
            json.dumps(finding.to_json())
        assert repair_config(text, target) is not None
        compare_configs(config, previous)
        assert compare_configs(config, config) == []
        previous = config


def test_scribbled_texts() -> None:
    rng = random.Random(12)
    text = json.dumps(GOOD, indent=1)
    unreadable = 0
    for _ in range(1500):
        characters = list(text)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(characters))
            characters[at] = rng.choice(
                ["", "{", "}", "[", "]", ",", ":", '"', "'", "#", "\n", "é", "9", "\\", "$A"]
            )
        checked = check_config("".join(characters), rng.choice(TARGETS))
        assert checked.readable or {finding.code for finding in checked.findings} == {"syntax"}
        unreadable += not checked.readable
    assert 100 < unreadable < 1400


NUMBERS = ["1e400", "NaN", "-Infinity", "9" * 5000, "1e308", "-0", "007", "0x10", "1_000", ".5", "--1"]
PIECES = [
    "{",
    "}",
    "[",
    '"',
    "'",
    "'''",
    "\\",
    "\\u12",
    "$(",
    "<<EOF\n",
    "\x00",
    "\ufeff",
    "\r\n",
    "/*",
    "#",
    "&a ",
]
SCRIPT = "#!/bin/bash\n#SBATCH -N 2 --ntasks=16\n#SBATCH --signal=B:USR1@60\nexport A=$SLURM_PROCID\n"
SCRIPT += "cat > a.json <<EOF\n{}\nEOF\nsrun -N 2 bash -c 'torchrun t.py' | tee log\n"
TEXTS = [
    json.dumps(GOOD, indent=1),
    "a slots=8\nb@c:22 slots=0,1 # x\n[::1]:22 slots=2\n",
    SCRIPT,
    "model: a/b\ndata: {train: x/y}\noptimizer: {lr: 1e-5}\ndeepspeed: {fp16: {enabled: true}}\n",
]


def mangled(rng: random.Random) -> bytes:
    """A file of any kind with bytes changed, removed and put in."""
    data = bytearray(rng.choice(TEXTS).encode())
    for _ in range(rng.randint(1, 8)):
        at, choice = rng.randrange(len(data) + 1), rng.random()
        if choice < 0.3:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif choice < 0.5:
            del data[at : at + rng.randint(1, 30)]
        else:
            data[at:at] = rng.choice(PIECES if choice < 0.8 else NUMBERS).encode()
    return bytes(data)


def test_mangled_files() -> None:
    rng = random.Random(13)
    kinds = set()
    for _ in range(800):
        data = mangled(rng) if rng.random() < 0.9 else rng.randbytes(rng.randrange(300))
        name = rng.choice(["a.json", "a", "run.yaml", "hosts", "job.sh"])
        checked = check_file(name, data, rng.choice(TARGETS))
        kinds.add(checked.kind)
        json.dumps(checked.to_json())
        assert checked.readable or checked.count("error")
    assert kinds == {"deepspeed-config", "run-file", "hostfile", "batch-script", "unknown"}


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity", "9" * 5000, "0x10", "1_000", "--1", "1e"])
@pytest.mark.parametrize("key", ["gradient_clipping", "zero_optimization.stage", "optimizer.params.lr"])
def test_numbers_that_are_none(key: str, number: str) -> None:
    """1e400 and 5,000 digits cannot be read, NaN is a text: never a value that passes in silence."""
    name = key.rpartition(".")[2]
    text = re.sub(rf'("{name}": )[^\n,}}]+', rf"\g<1>{number}", json.dumps(GOOD, indent=1))
    checked = check_config(text)
    wrong = [f for f in checked.findings if f.severity == "error" and (f.code == "syntax" or f.key == key)]
    assert f'"{name}": {number}' in text and wrong


@pytest.mark.parametrize("opening", ["[", "{", '{"a":', "[[]", "'''", "{{", "{%"])
def test_deep_and_long_texts(opening: str) -> None:
    """Read or refused, and at once: nothing here may grow with the square of the length."""
    for name in ("a.json", "hosts", "run.yaml"):
        checked = check_file(name, (opening * 100_000).encode(), Target())
        assert not checked.readable or checked.count("error")


def test_duplicates_at_depth() -> None:
    text = '{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "device": "none"}}}'
    found = [f for f in check_config(text).findings if f.code == "duplicate-key"]
    assert [f.key for f in found] == ["zero_optimization.offload_optimizer.device"]


def test_half_a_surrogate_pair(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Text that JSON can hold and no terminal can show."""
    path = tmp_path / "a.json"
    path.write_text('{"train_batch_size": 8, "\\ud800": 1, "fp16": {"enabled": "true"}}')
    for flags in ([], ["--json"], ["--diff"], ["--fix", "-o", "-"]):
        assert main(["check", str(path), *flags]) == 1
    assert main(["check", str(path), "--against", str(path)]) == 0
    assert b"\\ud800" in capfdbinary.readouterr().out
