"""The key table says what the installed DeepSpeed does, key by key; and it is whole in itself."""

from __future__ import annotations

import inspect

import pytest
import yaml

from benchmarks import schema_diff
from dslaunch.config.schema import (
    VERSION,
    VERSIONS,
    find_key,
    key_table,
    nearest_keys,
    section_keys,
)
from dslaunch.config.schema.arguments import argument_table
from dslaunch.config.schema.optimizers import (
    GONE_OPTIMIZERS,
    NEEDED,
    OPTIMIZERS,
    SCHEDULES,
    TORCH_SCHEDULES,
    VARIANTS,
)
from dslaunch.config.zero import ACTING_STAGES


def test_the_table_is_of_the_installed_version() -> None:
    import deepspeed

    assert deepspeed.__version__.split("+")[0] == VERSION


def test_the_table_equals_the_installed_deepspeed() -> None:
    assert schema_diff.differences() == []


def test_a_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    import dslaunch.config.schema as schema

    rows = dict(key_table())
    rows["fp16.hysteresis"] = dataclasses.replace(rows["fp16.hysteresis"], default="3")
    rows["zero_optimization.stage4"] = dataclasses.replace(
        rows["zero_optimization.stage"], path="zero_optimization.stage4"
    )
    del rows["steps_per_print"]
    monkeypatch.setattr(schema, "key_table", lambda: rows)
    assert schema_diff.differences() == [
        "steps_per_print: not in the table",
        "zero_optimization.stage4: in the table alone",
        "fp16.hysteresis: default 2 in DeepSpeed, 3 in the table",
    ]


def test_every_row_is_whole() -> None:
    sections = {path for path, key in key_table().items() if key.is_section} | {""}
    for path, key in key_table().items():
        assert key.effect.endswith((".", ")")), path
        assert key.section in sections, path
        assert key.type != "choice" or key.range, path
        assert not key.replaced_by or find_key(key.replaced_by) is not None, path
        assert {key.since, key.removed} <= {"", *VERSIONS}, path
        assert set(key.stages) <= {0, 1, 2, 3}, path


def test_the_run_files_zero_keys_act_where_the_table_says() -> None:
    for name, stages in ACTING_STAGES.items():
        key = find_key(f"zero_optimization.{name}")
        assert key is not None
        assert stages == key.stages, name


def test_other_names_and_old_sections_are_found() -> None:
    key = find_key("zero_optimization.prefetch_bucket_size")
    assert key is not None and key.name == "stage3_prefetch_bucket_size"
    assert "enabled" in section_keys("bfloat16")
    assert find_key("zero_optimization.nothing") is None


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("gradient_clipp1ng", "gradient_clipping"),
        ("zero_optimisation", "zero_optimization"),
        ("stage3_param_persitence_threshold", "zero_optimization.stage3_param_persistence_threshold"),
        ("initial_scale_power", "fp16.initial_scale_power"),
    ],
)
def test_the_nearest_key(text: str, meant: str) -> None:
    assert nearest_keys(text)[0] == meant


def arguments(*constructors: type) -> set[str]:
    """The parameters of constructors, without what DeepSpeed passes itself."""
    found: set[str] = set()
    for constructor in constructors:
        found |= set(inspect.signature(constructor.__init__).parameters)
    return found - {"self", "params", "model_params", "optimizer", "adamw_mode", "max_grad_norm"}


def test_optimizers_have_the_arguments_of_the_table() -> None:
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.engine import DeepSpeedEngine

    popped = {"adam_w_mode", "torch_adam", "fp32_optimizer_states"}
    adam = arguments(torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam) | popped
    halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
    expected = {
        "adam": adam,
        "adamw": adam,
        "adagrad": arguments(torch.optim.Adagrad, DeepSpeedCPUAdagrad),
        "lamb": arguments(FusedLamb),
        "lion": arguments(FusedLion, DeepSpeedCPULion),
        "muon": halves | popped | {"muon_lr", "adam_lr", "foreach"},
    }
    for name, params in expected.items():
        assert OPTIMIZERS[name].params == params, name
    classes = {
        "Adam": {"torch": torch.optim.AdamW, "cpu": DeepSpeedCPUAdam, "fused": FusedAdam},
        "Adagrad": {"torch": torch.optim.Adagrad, "cpu": DeepSpeedCPUAdagrad},
        "Lion": {"cpu": DeepSpeedCPULion, "fused": FusedLion},
    }
    for name, variants in classes.items():
        more = popped if name == "Adam" else set()
        assert VARIANTS[name] == {key: arguments(cls) | more for key, cls in variants.items()}, name
    assert VARIANTS["AdamW"] == VARIANTS["Adam"]


def test_every_argument_is_explained_with_its_default() -> None:
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import lr_schedules

    named = {f"optimizer.params.{name}" for found in OPTIMIZERS.values() for name in found.params}
    schedules = {**SCHEDULES, **TORCH_SCHEDULES}
    named |= {f"scheduler.params.{name}" for params in schedules.values() for name in params}
    assert set(argument_table()) == named
    theirs = (FusedAdam, DeepSpeedCPUAdam, FusedLamb, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad)
    own = [getattr(torch.optim, found.name) for found in OPTIMIZERS.values() if found.from_torch]
    constructors = {
        "optimizer": [*theirs, torch.optim.AdamW, torch.optim.Adagrad, *own],
        "scheduler": [
            getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name) for name in schedules
        ],
    }
    for path, argument in argument_table().items():
        section, _, name = path.partition(".params.")
        parameters = [inspect.signature(c.__init__).parameters.get(name) for c in constructors[section]]
        defaults = [found.default for found in parameters if found is not None]
        if not argument.default.startswith("("):
            assert all(default == yaml.safe_load(argument.default) for default in defaults), (path, defaults)
        if name not in (
            "torch_adam",
            "adam_w_mode",
            "ns_method",
            "muon_lr",
            "adam_lr",
        ):  # DeepSpeed pops them
            assert defaults, path


def test_the_optimizers_of_torch_are_all_there() -> None:
    import torch

    theirs = {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    ours = {optimizer.name for optimizer in OPTIMIZERS.values()}
    # torch's own Muon is shadowed by DeepSpeed's.
    no_config_can_build = {"LBFGS", "SparseAdam", "Optimizer"}
    assert theirs - no_config_can_build <= ours | {"Muon"}
    for optimizer in OPTIMIZERS.values():
        if optimizer.from_torch:
            assert optimizer.params == arguments(getattr(torch.optim, optimizer.name)), optimizer.name


def test_deepspeeds_optimizers_are_all_there() -> None:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    assert set(DEEPSPEED_OPTIMIZERS) == {key for key, o in OPTIMIZERS.items() if not o.from_torch}
    assert not GONE_OPTIMIZERS & set(DEEPSPEED_OPTIMIZERS)


def test_tested_optimizers_are_deepspeeds_list() -> None:
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    names = {
        cls.__name__.lower().removeprefix("deepspeedcpu").removeprefix("fused")
        for cls in ZERO_SUPPORTED_OPTIMIZERS
    }
    tested = {key for key, optimizer in OPTIMIZERS.items() if optimizer.tested}
    assert tested - {"muon"} == names & set(OPTIMIZERS)


def test_schedules_have_the_arguments_of_the_table() -> None:
    import torch
    from deepspeed.runtime import lr_schedules

    assert set(SCHEDULES) == set(lr_schedules.VALID_LR_SCHEDULES)
    assert set(TORCH_SCHEDULES) == set(torch.optim.lr_scheduler.__all__) - {"LRScheduler"}
    for name, params in {**SCHEDULES, **TORCH_SCHEDULES}.items():
        constructor = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
        assert params == arguments(constructor), name
        required = [
            parameter.name
            for parameter in inspect.signature(constructor.__init__).parameters.values()
            if parameter.default is parameter.empty and parameter.name not in ("self", "optimizer")
        ]
        assert list(NEEDED.get(name, ())) == required, name
