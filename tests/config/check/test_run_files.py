"""check of run files: what gen-config and plan refuse, for the machine that the file is meant for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslaunch.config.check import Target
from dslaunch.config.check.files import check_file
from dslaunch.config.facts import probe_facts
from dslaunch.config.load import load_run_file
from dslaunch.config.resolve import resolve
from dslaunch.core.devices import lookup_device
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.finding import Finding

MODEL = "model: org/model\n"
DATA = "data: {train: org/data}\n"
BATCH = "train_batch_size: 8\n"
NODES = "cluster: {num_nodes: 2, num_gpus_per_node: 4, gpu: a100}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run's files, seen from another one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.csv").write_text("a,b\n")
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "hosts").write_text("a slots=4\nb slots=4\n")
    (folder / "broken").write_text("a slots=4\na slots=4\n")
    (folder / "mine.j2").write_text('{\n  "train_batch_size": {{ nope }}\n}\n')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"dtype": "bfloat16"}')
    return folder


def check(folder: Path, text: str, target: Target | None = None) -> list[Finding]:
    path = folder / "run.yaml"
    path.write_text(text)
    return list(check_file("project/run.yaml", path.read_bytes(), target or Target()).findings)


def said(findings: list[Finding]) -> list[tuple[str, str, int | None]]:
    return [(finding.severity, finding.key, finding.line) for finding in findings]


def refused(folder: Path, text: str) -> list[tuple[str, str | None]]:
    """What plan and launch refuse, with the place, and the hints."""
    (folder / "run.yaml").write_text(text)
    loaded = load_run_file(Path("project/run.yaml"))
    facts = probe_facts(loaded, cwd=Path.cwd(), environ=os.environ)
    with pytest.raises(ConfigError) as caught:
        resolve(loaded, facts=facts, run_dir=Path("/r"), cwd=Path.cwd(), python="python", default_name="run")
    found = caught.value.problems if isinstance(caught.value, ConfigErrors) else [caught.value]
    return [(problem.message, problem.hint) for problem in found]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (f"{MODEL}{DATA}{BATCH}{NODES}max_steps: 3\nnum_train_epochs: 1\n", ["max_steps"]),
        (
            f"{MODEL}{DATA}{NODES}train_batch_size: 12\ntrain_micro_batch_size_per_gpu: 2\n",
            ["train_batch_size"],
        ),
        (f"{MODEL}{DATA}{NODES}train_micro_batch_size_per_gpu: 2\n", ["train_micro_batch_size_per_gpu"]),
        (
            f"{MODEL}{DATA}{BATCH}{NODES}zero_optimization: {{stage: 2, sub_group_size: 100000000}}\n",
            ["zero_optimization.sub_group_size"],
        ),
        (
            f"{MODEL}{DATA}{BATCH}{NODES}precision: fp16\nfp16: {{loss_scale: 128, hysteresis: 2}}\n",
            ["fp16.hysteresis"],
        ),
        (
            f"{MODEL}{DATA}train_batch_size: 7\n{NODES}precision: fp16\nfp16: {{min_loss_scale: 131072}}\n",
            ["train_batch_size", "fp16.min_loss_scale"],
        ),
        (
            f"{MODEL}{DATA}{BATCH}{NODES}deepspeed: {{scheduler: {{type: WarmupLR}}}}\n",
            ["deepspeed.scheduler"],
        ),
        (
            f"{MODEL}{DATA}{BATCH}{NODES}zero_optimization: {{stage: 2}}\n"
            "deepspeed: {zero_optimization: {stage: 3}}\n",
            ["deepspeed.zero_optimization.stage"],
        ),
        (f"{MODEL}{DATA}{BATCH}{NODES}deepspeed_template: mine.j2\n", ["deepspeed_template"]),
        (f"{MODEL}{DATA}{BATCH}{NODES}launch: {{env: {{HF_TOKEN: abc}}}}\n", ["launch.env.HF_TOKEN"]),
        (f"{MODEL}{DATA}{BATCH}{NODES}output: {{eval_steps: 5}}\n", ["output.eval_steps"]),
        (
            f"{MODEL}data:\n  train: train.csv\n  eval: empty.jsonl\n{BATCH}{NODES}",
            ["data.train[0].path", "data.eval[0].path"],
        ),
        (f"{MODEL}data:\n  train: elsewhere.xlsx\n{BATCH}{NODES}", ["data.train[0].path"]),
        (f"model: {{path: model, revision: main}}\n{DATA}{BATCH}{NODES}", ["model.revision"]),
        (
            f"model: {{path: org/model, attn_implementation: flash_attention_2}}\n{DATA}{BATCH}"
            "cluster: {num_nodes: 2, num_gpus_per_node: 4, gpu: cpu}\nprecision: bf16\n",
            ["model.attn_implementation"],
        ),
        (
            f"{MODEL}{DATA}{BATCH}cluster: {{hostfile: hosts, include: c, gpu: a100}}\n",
            ["cluster"],
        ),
        (
            f'{MODEL}{DATA}{BATCH}cluster:\n  hostfile: hosts\n  gpu:\n    "*": a100\n    c: v100\n',
            ["cluster.gpu.c"],
        ),
        (
            f"{MODEL}{DATA}{BATCH}cluster: {{num_nodes: 2, num_gpus_per_node: 4, gpu: a1OO}}\n",
            ["cluster.gpu"],
        ),
        (f"{MODEL}{DATA}{BATCH}cluster: {{hostfile: broken, gpu: a100}}\n", ["cluster.hostfile"]),
    ],
)
def test_check_says_what_plan_refuses(folder: Path, text: str, keys: list[str]) -> None:
    found = check(folder, text)
    assert [(finding.severity, finding.key) for finding in found] == [("error", key) for key in keys]
    with_place = [(f"project/run.yaml:{finding.line}: {finding.message}", finding.hint) for finding in found]
    expected = refused(folder, text)
    assert [hint for _, hint in with_place] == [hint for _, hint in expected]
    for (message, _), (other, _) in zip(with_place, expected, strict=True):
        assert message.endswith(other) or message == other  # an error in another file names that file


def test_the_raw_keys_own_rules_say_it_with_their_code(folder: Path) -> None:
    found = check(
        folder, f"{MODEL}{DATA}{BATCH}{NODES}deepspeed:\n  steps_per_printt: 1\n  cpu_offload: true\n"
    )
    assert ("unknown-key", "error", "deepspeed.steps_per_printt", 6) in [
        (finding.code, finding.severity, finding.key, finding.line) for finding in found
    ]
    assert len({finding.key for finding in found}) == len(found)


class TestAnotherMachine:
    def test_a_path_that_is_not_here_is_a_warning(self, folder: Path) -> None:
        text = (
            "model: /scratch/model\ndata:\n  train: /scratch/train.jsonl\n"
            f"{BATCH}cluster:\n  hostfile: /scratch/hosts\n  gpu: a100\ndeepspeed_template: /scratch/t.j2\n"
        )
        found = check(folder, text)
        assert said(found) == [
            ("warning", "model.path", 1),
            ("warning", "data.train[0].path", 3),
            ("warning", "cluster.hostfile", 6),
            ("warning", "deepspeed_template", 8),
        ]
        assert {finding.code for finding in found} == {"path"}

    def test_paths_start_from_the_file(self, folder: Path) -> None:
        assert check(folder, f"model: ./model\ndata: {{train: train.jsonl}}\n{BATCH}") == []

    def test_gpus_that_this_machine_has_not_got(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        found = check(folder, f"{MODEL}{DATA}{BATCH}cluster: {{num_nodes: 2, num_gpus_per_node: 4}}\n")
        assert said(found) == [("info", "precision", None)]
        assert found[0].code == "this-machine"
        assert found[0].message.startswith("on this machine: precision auto")

    def test_a_batch_that_fits_no_world_size(self, folder: Path) -> None:
        sizes = "train_batch_size: 7\ntrain_micro_batch_size_per_gpu: 2\n"
        (finding,) = check(folder, f"{MODEL}{DATA}{sizes}")
        assert (finding.severity, finding.key, finding.line) == ("error", "train_batch_size", 3)
        assert finding.message.endswith("so it fits no world size")

    @pytest.mark.parametrize(("steps", "fits"), [(1, True), (2, True), (3, False)])
    def test_three_sizes_without_a_world_size(self, folder: Path, steps: int, fits: bool) -> None:
        sizes = (
            f"train_batch_size: 8\ntrain_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {steps}\n"
        )
        found = check(folder, f"{MODEL}{DATA}{sizes}cluster: {{gpu: a100}}\n")
        assert [finding.severity for finding in found if finding.severity == "error"] == (
            [] if fits else ["error"]
        )

    def test_what_is_wrong_in_one_precision_alone_is_no_error(self, folder: Path) -> None:
        text = f"{MODEL}{DATA}{BATCH}fp16: {{loss_scale: 128, hysteresis: 2}}\n"
        assert [f for f in check(folder, text) if f.severity == "error"] == []
        assert said(check(folder, f"{text}precision: fp16\n"))[0] == ("error", "fp16.hysteresis", 4)

    def test_a_stage_that_the_memory_plan_chooses(self, folder: Path) -> None:
        zero = "zero_optimization:\n  stage: auto\n  sub_group_size: 1000000\n"
        found = check(folder, f"{MODEL}{DATA}{BATCH}{NODES}{zero}max_steps: 1\nnum_train_epochs: 1\n")
        assert said(found) == [("info", "zero_optimization.stage", 6), ("error", "max_steps", 8)]


class TestTarget:
    def test_the_world_size_wins_over_the_file(self, folder: Path) -> None:
        text = f"{MODEL}{DATA}{BATCH}{NODES}"
        assert check(folder, text) == []
        assert check(folder, text, Target(world_size=2)) == []
        (finding,) = check(folder, text, Target(world_size=3))
        assert (finding.severity, finding.key, finding.line) == ("error", "train_batch_size", 3)
        assert "world_size 3" in finding.message

    def test_the_device_wins_over_the_file(self, folder: Path) -> None:
        text = f"{MODEL}{DATA}{BATCH}{NODES}precision: bf16\n"
        assert check(folder, text) == []
        (finding,) = check(folder, text, Target(devices=(lookup_device("v100"),)))
        assert (finding.code, finding.severity, finding.key, finding.line) == (
            "risk",
            "warning",
            "precision",
            5,
        )
        assert "emulated" in finding.message

    def test_weights_that_may_not_fit_into_fp16(self, folder: Path) -> None:
        text = f"model: ./model\n{DATA}{BATCH}{NODES}precision: fp16\n"
        (finding,) = check(folder, text)
        assert (finding.code, finding.line) == ("risk", 5)
        assert "65504" in finding.message

    def test_cpus_and_gpus_together(self, folder: Path) -> None:
        devices = (lookup_device("cpu"), lookup_device("a100"))
        found = check(folder, f"{MODEL}{DATA}{BATCH}", Target(devices=devices))
        assert said(found) == [("error", "cluster.gpu", None)]
