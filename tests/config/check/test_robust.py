"""Whatever stands in a file, check says something and never raises; so do repair and comparison."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from dslaunch.config.check import Target, check_config
from dslaunch.config.check.compare import compare_configs
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
        assert checked.readable or [finding.code for finding in checked.findings] == ["syntax"]
        unreadable += not checked.readable
    assert 100 < unreadable < 1400
