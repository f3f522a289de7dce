"""check of run files: what gen-config and plan refuse, for the machine that the file is meant for."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslaunch.cli.main import main
from dslaunch.cli.options import load_and_resolve
from dslaunch.config.check import Target
from dslaunch.config.check.files import check_file
from dslaunch.config.facts import probe_facts
from dslaunch.config.load import load_run_file
from dslaunch.config.resolve import resolve
from dslaunch.core.devices import lookup_device
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.finding import Finding
from tests.config.test_gen_config_property import random_run_file

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


def refused(folder: Path, text: str, *, may_pass: bool = False) -> list[tuple[str, str | None]]:
    """What plan and launch refuse, with the place, and the hints."""
    (folder / "run.yaml").write_text(text)
    loaded = load_run_file(Path("project/run.yaml"))
    facts = probe_facts(loaded, cwd=Path.cwd(), environ=os.environ)
    try:
        resolve(loaded, facts=facts, run_dir=Path("/r"), cwd=Path.cwd(), python="python", default_name="run")
        assert may_pass
        return []
    except ConfigError as error:
        found = error.problems if isinstance(error, ConfigErrors) else [error]
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


@pytest.mark.parametrize(
    "spoilt",
    [
        "train_batch_size: 9\ntrain_micro_batch_size_per_gpu: 4\n" + NODES,
        "train_batch_size: 8\nprecision: bf16\ncluster: {num_gpus_per_node: 4, gpu: m60}\n",
        "train_batch_size: 8\ncluster: {hostfile: project/broken}\n",
    ],
    ids=["batch", "gpu", "hostfile"],
)
def test_raw_keys_are_told_with_what_makes_a_plan_impossible(folder: Path, spoilt: str) -> None:
    raw = (
        "deepspeed:\n  zero_optimization: {stage: 3}\n  gradient_clipping: 2\n"
        "  communication_data_type: fp32\n  train_batch_size: 16\n"
    )
    found = said(check(folder, MODEL + DATA + spoilt + raw))
    errors = {key for severity, key, _ in found if severity == "error"}
    assert {"deepspeed.zero_optimization.stage", "deepspeed.gradient_clipping"} < errors
    # Where the batch sizes are not known, neither is what contradicts them.
    assert ("deepspeed.train_batch_size" in errors) == ("train_batch_size: 8" in spoilt)
    assert "deepspeed.communication_data_type" not in errors
    refusals = refused(folder, MODEL + DATA + spoilt + raw)
    assert sum("contradicts" in message for message, _ in refusals) >= 2


def test_advice_on_the_loss_scale_is_the_same_for_a_run_file(folder: Path) -> None:
    text = "precision: fp16\nfp16: {initial_scale_power: 32, min_loss_scale: 256}\n"
    found = check(folder, MODEL + DATA + BATCH + NODES + text)
    assert [(f.code, f.severity, f.key) for f in found if f.key.startswith("fp16.")] == [
        ("advice", "info", "fp16.initial_scale_power"),
        ("advice", "info", "fp16.min_loss_scale"),
    ]


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

    def test_a_batch_that_fits_no_number_of_nodes(self, folder: Path) -> None:
        text = f"{MODEL}{DATA}train_batch_size: 3\ncluster: {{num_gpus_per_node: 2, gpu: a100-80g}}\n"
        (finding,) = check(folder, text)
        message = "train_batch_size 3 is not a multiple of world_size 2, so it fits no number of nodes"
        assert (finding.severity, finding.message) == ("error", message)

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
        assert said(check(folder, f"{MODEL}{DATA}{BATCH}{NODES}{zero}")) == [
            ("info", "zero_optimization.stage", 6)
        ]
        found = check(folder, f"{MODEL}{DATA}{BATCH}{NODES}{zero}max_steps: 1\nnum_train_epochs: 1\n")
        assert said(found) == [("error", "max_steps", 8)]


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "vocab_size": 32000,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "dtype": "bfloat16",
}  # fmt: skip


class TestMemoryPlan:
    """From the command line, which finds the model."""

    def run(self, folder: Path, capsys: pytest.CaptureFixture[str], model: str, gpus: str) -> tuple[int, str]:
        (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
        text = f"model: {model}\n{DATA}{BATCH}zero_optimization:\n  stage: auto\ncluster: {gpus}\n"
        (folder / "run.yaml").write_text(text)
        return main(["check", "project/run.yaml"]), capsys.readouterr().out

    def test_the_stage_that_fits(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        gpus = "{num_nodes: 1, num_gpus_per_node: 8, gpu: a100-80g}"
        code, out = self.run(folder, capsys, "./model", gpus)
        assert code == 0
        assert out.startswith("project/run.yaml:5: info: zero_optimization: stage ")

    def test_nothing_fits(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        gpus = "{num_nodes: 1, num_gpus_per_node: 1, gpu: t4}"
        code, out = self.run(folder, capsys, "./model", gpus)
        assert code == 1
        assert "project/run.yaml:5: error: zero_optimization.stage auto: nothing fits" in out
        with pytest.raises(ConfigError) as caught:
            load_and_resolve("project/run.yaml")
        assert f"hint: {caught.value.hint}\n" in out

    @pytest.mark.parametrize(
        ("model", "gpus"),
        [
            ("org/model", "{num_nodes: 1, num_gpus_per_node: 8, gpu: a100-80g}"),
            ("./model", "{gpu: a100-80g}"),
        ],
    )
    def test_what_is_not_known(
        self, folder: Path, capsys: pytest.CaptureFixture[str], model: str, gpus: str
    ) -> None:
        code, out = self.run(folder, capsys, model, gpus)
        assert (code, out.count("[not-checked]")) == (0, 1)


def test_names_of_modules_that_the_model_here_has_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """check names each of them at its line, and plan refuses with the same words."""
    lines = ["adapter:", "  target_modules:", "    - q_proj", "    - q_prj", "    - c_attn"]
    text = "\n".join(
        [f"{MODEL.replace('org', '.')}{DATA}{BATCH}{NODES}".rstrip(), *lines, "  modules_to_save: lm_hed"]
    )
    (folder / "run.yaml").write_text(f"{text}\n")
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    assert main(["check", "project/run.yaml"]) == 1
    out = capsys.readouterr().out
    places = [(8, "target_modules: 'q_prj'", "q_proj?"), (9, "target_modules: 'c_attn'", None)]
    for line, name, near in [*places, (10, "modules_to_save: 'lm_hed'", "lm_head?")]:
        assert f"project/run.yaml:{line}: error: adapter.{name} matches no layer of the model; it has " in out
        assert near is None or f"did you mean {near}" in out
    assert main(["plan", "project/run.yaml"]) == 2
    said_by_plan = capsys.readouterr().err
    for line in out.splitlines():
        if "matches no layer" in line:
            assert line.split(": error: ")[1].removesuffix(" [run-file]") in said_by_plan
    tied = text.replace("q_prj", "k_proj").replace("c_attn", "v_proj").replace("lm_hed", "lm_head")
    (folder / "run.yaml").write_text(f"{tied}\n")
    (folder / "model" / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    assert main(["check", "project/run.yaml"]) == 0
    assert main(["plan", "project/run.yaml"]) == 0  # its embedding once more, trained
    assert f"{32000 * 4096 + 32 * 16 * (4096 * 2) * 3:,} of " in capsys.readouterr().out


def spoil(rng: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """A few mistakes in a run file of keys that are valid each."""
    mistakes: list[dict[str, Any]] = [
        {"train_batch_size": 7},
        {"max_steps": 3, "num_train_epochs": 1},
        {"fp16": {"min_loss_scale": 10**9}},
        {"output": {"eval_steps": 3}},
        {"model": {"path": "org/model", "attn_implementation": "flash_attention_2"}},
        {"data": {"train": "x.csv"}},
        {"scheduler": {"type": "linear", "warmup_steps": 1, "warmup_ratio": 0.1}},
        {"zero_optimization": {"stage": rng.randrange(4), "sub_group_size": 1000, "reduce_scatter": True}},
        *({"deepspeed": raw} for raw in ({"scheduler": {"type": "WarmupLR"}}, {"bf16": {"enabled": True}})),
    ]
    for mistake in rng.sample(mistakes, rng.randrange(4)):
        spec |= mistake
    return spec


def test_check_and_plan_agree_on_any_run_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file says all, they say the same; where it leaves something open, check says no more."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    compared = Counter[bool]()
    for seed in range(300):
        rng = random.Random(seed)
        spec = spoil(rng, random_run_file(rng))
        told = seed % 2 == 0 and spec["cluster"]["gpu"] != "cpu"
        if told:
            spec["cluster"]["num_nodes"] = 2
        elif seed % 3 == 0:
            spec["cluster"] = {}
        text = yaml.safe_dump(spec)
        found = check(folder, text)
        errors = [finding for finding in found if finding.severity == "error"]
        theirs = [message for message, _ in refused(folder, text, may_pass=True)]
        stopped = any(word in message for message in theirs for word in ("world_size", "this CPU has"))
        if told or not stopped:  # a batch or precision that cannot be hides what would come after it
            ours = {f"project/run.yaml:{finding.line}" for finding in errors}
            places = {message.split(": ")[0] for message in theirs}
            assert ours == places if told else ours <= places, f"seed {seed}\n{text}"
            if told:
                assert {finding.message for finding in errors} == {m.split(": ", 1)[1] for m in theirs}
            compared[bool(theirs)] += 1
    assert min(compared[True], compared[False]) > 40


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
