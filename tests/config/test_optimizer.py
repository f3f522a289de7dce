"""The optimizer and scheduler sections: what each type takes, who makes it, and what cannot be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dslaunch.config.optimizer import KINDS
from dslaunch.config.spec_optimizer import OPTIMIZER_TYPES
from dslaunch.core.errors import ConfigError, ConfigErrors
from tests.config.build import SMALL, gpus, plan_of, resolved

ON_GPU = {"inventory": gpus("a100")}


def problems(text: str, **facts: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(SMALL + text, **facts)
    found = caught.value.problems if isinstance(caught.value, ConfigErrors) else [caught.value]
    return [problem.message for problem in found]


def test_every_type_has_its_row() -> None:
    assert set(KINDS) == set(OPTIMIZER_TYPES)


@pytest.mark.parametrize("kind", ["AdEMAMix", "AdamW8bit", "PagedAdamW8bit"])
def test_what_the_json_cannot_name_is_made_by_the_worker(kind: str) -> None:
    plan = plan_of(f"{SMALL}optimizer: {{type: {kind}}}\n", **ON_GPU)
    assert plan.optimizer.made_by == "dslaunch"
    assert "optimizer" not in plan.ds_config
    assert plan.ds_config["zero_allow_untested_optimizer"] is True
    assert plan.ds_config["zero_force_ds_cpu_optimizer"] is False


def test_lion_is_deepspeeds_on_gpus_and_ours_on_cpus() -> None:
    text = SMALL + "optimizer: {type: Lion}\n"
    gpu, cpu = plan_of(text, **ON_GPU), plan_of(text)
    assert gpu.ds_config["optimizer"]["type"] == "Lion" and gpu.optimizer.made_by == "deepspeed"
    assert "optimizer" not in cpu.ds_config and cpu.optimizer.made_by == "dslaunch"
    assert cpu.origins["optimizer.made_by"].reason == "DeepSpeed has Lion for GPUs only"
    assert gpu.optimizer.lr == cpu.optimizer.lr == 2e-6


@pytest.mark.parametrize(
    ("kind", "stage", "is_told"), [("SGD", 2, True), ("SGD", 0, False), ("AdamW", 2, False)]
)
def test_the_flag_for_untested_optimizers_has_a_note(kind: str, stage: int, is_told: bool) -> None:
    settings = f"optimizer: {{type: {kind}, lr: 1e-3}}\nzero_optimization: {{stage: {stage}}}\n"
    _, notes = resolved(f"{SMALL}{settings}precision: fp32\n", **ON_GPU)
    told = [note for note in notes if note.startswith("zero_allow_untested_optimizer is set")]
    assert [kind in note for note in told] == [True] * is_told


def test_rates_that_cannot_be_guessed_are_asked_for() -> None:
    text = "optimizer: {type: Adafactor}\nzero_optimization: {stage: 0}\nprecision: fp32\n"
    assert problems(text) == [
        "run.yaml:4: optimizer.lr is missing: the usual rates of AdamW mean nothing to Adafactor"
    ]


@pytest.mark.parametrize(
    ("stage", "precision", "part"),
    [
        (1, "fp32", "at ZeRO stage 1 it would get flat shards"),
        (3, "bf16", "at ZeRO stage 3 it would get flat shards"),
        (0, "bf16", "in bf16, which runs as ZeRO stage 1, it would get flat shards"),
    ],
)
def test_adafactor_wants_whole_tensors(stage: int, precision: str, part: str) -> None:
    text = f"optimizer: {{type: Adafactor, lr: 0.01}}\nzero_optimization: {{stage: {stage}}}\n"
    (message,) = problems(f"{text}precision: {precision}\n")
    assert message.startswith("run.yaml:4: optimizer.type Adafactor: ") and part in message


def test_adafactor_where_it_is_right() -> None:
    text = "optimizer: {type: Adafactor, lr: 0.01}\nzero_optimization: {stage: 0}\nprecision: fp32\n"
    block = plan_of(SMALL + text).ds_config["optimizer"]
    assert block == {
        "type": "Adafactor",
        "params": {"lr": 0.01, "beta2_decay": -0.8, "d": 1.0, "weight_decay": 0.0},
    }


MUON = "optimizer: {type: Muon, lr: 0.02, params: {adam_lr: 3e-4}}\n"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_muon_runs_everywhere_with_a_clip(stage: int, precision: str) -> None:
    plan = plan_of(f"{SMALL}precision: {precision}\nzero_optimization: {{stage: {stage}}}\n{MUON}")
    assert (plan.gradient_clipping, plan.ds_config["optimizer"]["type"]) == (1.0, "Muon")
    assert plan.ds_config["optimizer"]["params"] == {
        "lr": 0.02, "momentum": 0.95, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0,
        "adam_lr": 3e-4, "torch_adam": True,
    }  # fmt: skip


def test_muon_does_not_run_on_the_cpu_beside_a_gpu() -> None:
    (message,) = problems(f"zero_optimization: {{stage: 2, offload_optimizer: cpu}}\n{MUON}")
    assert "Muon with offload_optimizer: its matrix products would run on the CPU" in message


def test_8_bit_says_what_its_states_are() -> None:
    _, notes = resolved(SMALL + "optimizer: {type: AdamW8bit}\n", **ON_GPU)
    (note,) = [note for note in notes if note.startswith("AdamW8bit")]
    assert "in 8 bits, not in fp32" in note and "blocks that lie across tensors" in note


def test_what_does_not_go_with_offload() -> None:
    cpu = "zero_optimization: {stage: 2, offload_optimizer: cpu}\n"
    paged = "optimizer: {type: PagedAdamW8bit}\n"
    assert "pages its states out of GPU memory" in problems(paged + cpu, **ON_GPU)[0]
    assert "on CPUs it would be AdamW8bit" in problems(paged)[0]
    nvme = "zero_optimization: {stage: 3, offload_optimizer: {device: nvme, nvme_path: .}}\n"
    assert "DeepSpeed keeps on NVMe" in problems("optimizer: {type: AdEMAMix}\n" + nvme)[0]


def test_ademamix_takes_three_betas() -> None:
    plan = plan_of(SMALL + "optimizer: {type: AdEMAMix, params: {betas: [0.9, 0.95, 0.999], t_alpha: 50}}\n")
    assert plan.optimizer.params == {
        "lr": 2e-5, "betas": [0.9, 0.95, 0.999], "eps": 1e-8, "weight_decay": 0.0, "alpha": 5.0, "t_alpha": 50
    }  # fmt: skip
    (message,) = problems("optimizer: {type: AdEMAMix, params: {betas: [0.9, 0.95]}}\n")
    assert message == "run.yaml:4: optimizer.params.betas has 2 numbers; AdEMAMix takes 3"
    (message,) = problems("optimizer: {params: {betas: [0.9, 0.95, 0.99]}}\n")
    assert message.endswith("has 3 numbers; AdamW takes 2")


def test_groups_are_in_the_plan_and_a_group_must_set_something() -> None:
    text = (
        "optimizer:\n  no_decay: ['*norm*']\n  groups: [{match: 'lm_head.*', lr: 1e-3}]\n"
        "  loraplus_lr_ratio: 16\nadapter: {}\n"
    )
    optimizer = plan_of(SMALL + text).optimizer
    assert optimizer.no_decay == ("*norm*",) and optimizer.loraplus_lr_ratio == 16
    assert optimizer.groups[0].match == ("lm_head.*",) and optimizer.groups[0].lr == 1e-3
    (message,) = problems("optimizer: {groups: [{match: a}]}\n")
    assert "optimizer.groups[0] sets nothing for what it matches" in message
    (message,) = problems("optimizer: {loraplus_lr_ratio: 16}\n")
    assert "is for the B matrices of an adapter, and there is none" in message


def test_wsd() -> None:
    plan = plan_of(SMALL + "scheduler: {type: wsd}\n").scheduler
    assert (plan.decay_ratio, plan.decay_steps, plan.decay_type) == (0.1, None, "linear")
    plan = plan_of(SMALL + "scheduler: {type: wsd, decay_steps: 7, decay_type: 1-sqrt}\n").scheduler
    assert (plan.decay_ratio, plan.decay_steps, plan.decay_type) == (None, 7, "1-sqrt")


@pytest.mark.parametrize(
    ("written", "part"),
    [
        ("{type: wsd, decay_steps: 7, decay_ratio: 0.2}", "decay_steps and scheduler.decay_ratio are both"),
        ("{decay_steps: 7}", "scheduler.decay_steps is for type wsd; the type is cosine"),
        ("{type: linear, decay_type: cosine}", "scheduler.decay_type is for type wsd"),
        ("{type: constant, min_lr_ratio: 0.1}", "scheduler.min_lr_ratio has no effect"),
    ],
)
def test_schedule_keys_that_say_nothing_are_refused(written: str, part: str) -> None:
    (message,) = problems(f"scheduler: {written}\n")
    assert part in message


ROW = re.compile(r"^\| `(?P<kind>\w+)` \|(?P<cells>.*)\|$", re.MULTILINE)
PLACES = {  # column of the table in docs/optimizers.md -> where its word must hold
    "stage 0 (fp32)": ("a100", "fp32", 0, ""),
    "stages 1, 2": ("a100", "fp32", 2, ""),
    "stage 3": ("a100", "fp32", 3, ""),
    "offload to CPU": ("a100", "fp32", 2, ", offload_optimizer: cpu"),
    "GPU": ("a100", "fp32", 0, ""),
    "CPU": ("cpu", "fp32", 0, ""),
}


def documented() -> dict[str, dict[str, str]]:
    text = (Path(__file__).parents[2] / "docs/optimizers.md").read_text(encoding="utf-8")
    (head,) = re.findall(r"^\| `type` \|(.*)\|$", text, re.MULTILINE)
    columns = [cell.strip() for cell in head.split("|")]
    return {
        row["kind"]: dict(zip(columns, (cell.strip() for cell in row["cells"].split("|")), strict=True))
        for row in ROW.finditer(text)
        if row["kind"] in OPTIMIZER_TYPES
    }


@pytest.mark.parametrize("kind", OPTIMIZER_TYPES)
@pytest.mark.parametrize("place", PLACES)
def test_the_table_of_the_docs_is_true(kind: str, place: str) -> None:
    said = documented()[kind][place]
    gpu, precision, stage, more = PLACES[place]
    clipping = "gradient_clipping: 0\n" if "without clipping" in said else ""
    text = (
        f"{SMALL}{clipping}precision: {precision}\ncluster: {{gpu: {gpu}, num_gpus_per_node: 2}}\n"
        f"optimizer: {{type: {kind}, lr: 0.01}}\nzero_optimization: {{stage: {stage}{more}}}\n"
    )
    if said == "no":
        with pytest.raises(ConfigError):
            plan_of(text)
        return
    makers = documented()[kind]["made by"]
    ours = makers in ("dslaunch", "bitsandbytes") or (gpu == "cpu" and "dslaunch on CPUs" in makers)
    ours &= kind != "Muon"  # whose name the JSON holds; the engine puts ours in its place
    assert plan_of(text).optimizer.made_by == ("dslaunch" if ours else "deepspeed")
