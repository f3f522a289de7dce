"""From a run file to an answer, by the commands that a user types, with nothing replaced.

Two run files: LoRA with packed rows at ZeRO stage 2, and the whole model at stage 3. Each is
trained by real ranks, exported, loaded by plain transformers and peft, and asked something.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from dslaunch.cli.disk_space import disk_of_run
from dslaunch.core.plan import RunPlan, from_json
from tests.support.plans import read_rows, write_questions
from tests.support.tiny import make_tiny_model_dir

QUESTION = "Who keeps house 3?"
COMMON: dict[str, Any] = {
    "task": "sft",
    "seed": 7,
    "model": {"path": "./model"},
    "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 128},
    "gradient_clipping": 1.0,
    "scheduler": {"type": "cosine", "warmup_steps": 1},
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "cluster": {"num_gpus_per_node": 2},
}
RUN_FILES: dict[str, dict[str, Any]] = {
    "lora": {
        **COMMON,
        "data": {**COMMON["data"], "packing": True},
        "adapter": {"type": "lora", "r": 8, "lora_alpha": 16},
        "precision": "fp32",
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "lr": 2e-2},
        "max_steps": 6,
        "output": {"save_steps": 4},
    },
    "full": {
        **COMMON,
        "precision": "bf16",
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "lr": 5e-3},
        "max_steps": 6,
    },
}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    stdout: str
    stderr: str


@dataclass(frozen=True)
class Story:
    """What was done to one run file, and what each command said."""

    root: Path
    name: str
    said: dict[str, Done]
    run_name: str

    @property
    def run_dir(self) -> Path:
        return self.root / self.run_name

    def rows(self, file: str, kind: str | None = None) -> list[dict[str, Any]]:
        return list(read_rows(self.run_dir / file, kind))

    def answers(self, command: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = json.loads(self.said[command].stdout)["answers"]
        return answers


def _dslaunch(root: Path, commands: dict[str, list[str | Path]]) -> dict[str, Done]:
    """Run the commands side by side, as most of the time of each goes into imports; all must end with 0."""
    argv = [sys.executable, "-m", "dslaunch"]
    started = {
        name: subprocess.Popen(
            [*argv, *map(str, command)], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name, command in commands.items()
    }
    done = {}
    try:
        for name, process in started.items():
            done[name] = Done(*process.communicate(timeout=120))
            assert process.returncode == 0, f"{commands[name]}: {process.returncode}\n{done[name]}"
    finally:
        for process in started.values():
            process.terminate()  # the launcher takes its ranks with it
            process.wait(30)
    return done


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("end-to-end")
    make_tiny_model_dir(root / "model")
    write_questions(root / "train.jsonl", 48)
    write_questions(root / "eval.jsonl", 8)
    for name, content in RUN_FILES.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def lora(ops_dir: Path, root: Path) -> Story:
    run: list[str | Path] = ["lora.yaml", "--run-dir", "lora"]
    said = _dslaunch(root, {"gen-config": ["gen-config", "lora.yaml"], "launch": ["launch", *run]})
    said |= _dslaunch(root, {"resume": ["launch", *run, "--resume"]})
    ask: list[str | Path] = ["--prompt", QUESTION, "--max-new-tokens", "12", "--json"]
    said |= _dslaunch(
        root,
        {
            "export": ["export", "lora", "-o", "adapter"],
            "merge": ["export", "lora", "-o", "merged", "--merge", "--json"],
        },
    )
    said |= _dslaunch(
        root,
        {
            "ask the adapter": ["generate", "adapter", *ask],
            "ask the merged model": ["generate", "merged", *ask],
        },
    )
    return Story(root, "lora", said, "lora")


@pytest.fixture(scope="module")
def full(ops_dir: Path, root: Path) -> Story:
    """Its launch is the first run of a comparison (docs/amp.md): the very same start."""
    said = _dslaunch(root, {"launch": ["compare", "full.yaml", "--run-dir", "full"]})
    said |= _dslaunch(
        root,
        {
            "gen-config": ["gen-config", "full.yaml"],
            "export": ["export", "full/base/checkpoints/step-6", "-o", "whole", "--json"],
        },
    )
    return Story(root, "full", said, "full/base")


@pytest.fixture(params=["lora", "full"])
def story(request: pytest.FixtureRequest) -> Story:
    found: Story = request.getfixturevalue(request.param)
    return found


def test_the_ranks_got_the_config_that_gen_config_prints(story: Story) -> None:
    written = json.loads((story.run_dir / "ds_config.json").read_text())
    assert written == json.loads(story.said["gen-config"].stdout)
    assert written["zero_optimization"]["stage"] == RUN_FILES[story.name]["zero_optimization"]["stage"]
    assert json.loads((story.run_dir / "plan.json").read_text())["ds_config"] == written


def test_the_run_directory_holds_the_run(story: Story) -> None:
    names = {path.name for path in story.run_dir.iterdir()}
    assert names >= {
        "plan.json", "ds_config.json", "hostfile", "launch.sh", "logs", "metrics.jsonl", "events.jsonl",
        "checkpoints",
    }  # fmt: skip
    assert {path.name for path in (story.run_dir / "logs").iterdir()} >= {"rank-0.log", "rank-1.log"}
    steps = {"lora": {"step-4", "step-6"}, "full": {"step-6"}}[story.name]
    assert {path.name for path in (story.run_dir / "checkpoints").iterdir()} == {*steps, "latest"}
    assert (story.run_dir / "checkpoints/latest").read_text().strip() == "step-6"


def test_every_step_is_recorded_once(story: Story) -> None:
    rows = story.rows("metrics.jsonl", "train")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert not any(row["skipped"] for row in rows)
    assert all(row["grad_norm"] > 0 and row["lr"] > 0 and row["num_supervised_tokens"] > 0 for row in rows)
    kinds = [event["kind"] for event in story.rows("events.jsonl")]
    assert kinds.count("train_start") == kinds.count("train_end") == 1
    assert kinds.count("checkpoint_saved") == {"lora": 2, "full": 1}[story.name]
    said = story.said["launch"]
    told = {"lora": said.stdout, "full": said.stderr}[story.name]  # stdout of a comparison is its table
    assert all(line in told for line in ("step 1/6", "step 6/6", "done: 6 steps"))


def test_a_checkpoint_on_the_way_is_said_and_the_last_one_at_the_end(lora: Story) -> None:
    lines = [line for line in lora.said["launch"].stdout.splitlines() if "checkpoint" in line]
    assert [re.sub(r"\([\d.]+ s\)", "(N s)", line) for line in lines] == [
        "checkpoint step-4 (N s)",
        "done: 6 steps, checkpoint step-6",
    ]


def test_it_learned(story: Story) -> None:
    evals = story.rows("metrics.jsonl", "eval")
    assert [row["step"] for row in evals] == [0, 6]
    before, after = (row["loss"] for row in evals)
    assert after < before - 0.3


def test_a_finished_run_says_so_when_it_is_resumed(lora: Story) -> None:
    assert "already at step 6 of 6: nothing to do" in lora.said["resume"].stdout
    assert len(lora.rows("metrics.jsonl", "train")) == 6


def test_one_command_lays_zero_and_plain_amp_side_by_side(full: Story) -> None:
    said, found = full.said["launch"], json.loads((full.root / "full/comparison.json").read_text())
    base, changed = found["base"], found["changed"]
    assert (base["engine"], base["zero_stage"], base["weights_in_fp32"]) == ("deepspeed", 3, False)
    assert (changed["engine"], changed["zero_stage"], changed["weights_in_fp32"]) == ("torch", None, True)
    assert [side["state"] for side in (base, changed)] == ["done", "done"]
    assert found["exit_code"] == 0
    for side in (base, changed):
        assert (side["precision"], side["num_steps"], side["num_skipped"]) == ("bf16", 6, 0)
        assert side["tokens_per_s"] > 0
        assert (side["peak_memory_of"], side["peak_memory_bytes"] > 2**20) == ("process", True)
    assert found["first_other_data"] is None
    assert [row["step"] for row in found["steps"]] == [1, 2, 3, 4, 5, 6]
    for number, row in enumerate(found["steps"]):
        assert row["loss"]["base"] == full.rows("metrics.jsonl", "train")[number]["loss"]
        assert row["loss"]["changed"] == pytest.approx(row["loss"]["base"], rel=0.01)  # two ways of bf16
    assert 0 < found["largest"]["loss"]["relative"] < 0.01
    assert {"key": "engine", "base": "deepspeed", "changed": "torch"} in found["differences"]
    assert "left out of the run with engine torch" in said.stderr
    assert "zero_optimization.stage" in said.stderr
    assert re.search(r"^engine +deepspeed, ZeRO stage 3 +torch$", said.stdout, re.MULTILINE)
    assert re.search(rf"^ +6 +{found['steps'][5]['loss']['base']:.6f} ", said.stdout, re.MULTILINE)


def _held_out_loss(root: Path, model: torch.nn.Module) -> float:
    """By plain transformers, one sample at a time: nothing of ours computes it."""
    tokenizer = AutoTokenizer.from_pretrained(root / "merged")
    loss, count = 0.0, 0
    for line in (root / "eval.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        answer = messages[1]["content"] + "<|im_end|>"
        ids = tokenizer(asked + answer, return_tensors="pt")["input_ids"]
        start = len(tokenizer(asked)["input_ids"])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float()
        targets = ids[0, start:]
        loss += float(torch.nn.functional.cross_entropy(logits[start - 1 : -1], targets, reduction="sum"))
        count += len(targets)
    return loss / count


def test_plain_peft_and_transformers_load_what_was_trained(lora: Story) -> None:
    """They find the loss that the run's last evaluation found, from the adapter and from the merged model."""
    reported = lora.rows("metrics.jsonl", "eval")[-1]["loss"]
    base = AutoModelForCausalLM.from_pretrained(lora.root / "model", dtype=torch.float32)
    untrained = lora.rows("metrics.jsonl", "eval")[0]["loss"]
    assert _held_out_loss(lora.root, base.eval()) == pytest.approx(untrained, rel=1e-5)
    adapted = PeftModel.from_pretrained(base, lora.root / "adapter").eval()
    assert _held_out_loss(lora.root, adapted) == pytest.approx(reported, rel=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(lora.root / "merged", dtype=torch.float32).eval()
    assert _held_out_loss(lora.root, merged) == pytest.approx(reported, rel=1e-5)
    assert json.loads(lora.said["merge"].stdout)["kind"] == "model"


def test_a_stage_3_model_loads_with_plain_transformers(full: Story, lora: Story) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(full.root / "whole", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    reported = full.rows("metrics.jsonl", "eval")[-1]["loss"]
    assert _held_out_loss(lora.root, model.eval()) == pytest.approx(reported, rel=0.02)
    assert json.loads(full.said["export"].stdout)["step"] == 6


def _tensor_bytes(directory: Path) -> int:
    (file,) = directory.glob("*.safetensors")
    header = int.from_bytes(file.read_bytes()[:8], "little")
    return file.stat().st_size - 8 - header


def test_exports_are_as_large_as_was_said(lora: Story, full: Story) -> None:
    adapter, whole = (
        disk_of_run(from_json(RunPlan, json.loads((story.run_dir / "plan.json").read_text())))
        for story in (lora, full)
    )
    assert adapter is not None
    assert whole is not None
    assert _tensor_bytes(lora.root / "adapter") == adapter.export_bytes
    assert _tensor_bytes(lora.root / "merged") == adapter.merged_export_bytes
    assert _tensor_bytes(full.root / "whole") == whole.export_bytes


def test_each_command_names_the_next_one_as_the_readme_says(lora: Story) -> None:
    said = {name: lora.said[name].stderr.splitlines()[-1] for name in ("launch", "export")}
    assert said == {
        "launch": f"next: dslaunch export {lora.run_dir} -o DIR",
        "export": "next: dslaunch generate adapter --prompt TEXT",
    }
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"`{said['launch'].replace(str(lora.run_dir), 'RUN_DIR')}`" in readme
    assert f"`{said['export'].replace('adapter', 'DIR')}`" in readme


def test_generate_answers_as_plain_transformers_does(lora: Story) -> None:
    (adapted,) = lora.answers("ask the adapter")
    (merged,) = lora.answers("ask the merged model")
    tokenizer = AutoTokenizer.from_pretrained(lora.root / "merged")
    model = AutoModelForCausalLM.from_pretrained(lora.root / "merged", dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    new_ids = whole[0, ids.shape[1] :]
    assert merged["text"] == tokenizer.decode(new_ids, skip_special_tokens=True).strip()
    assert (merged["prompt"], merged["num_new_tokens"]) == (QUESTION, len(new_ids))
    assert adapted["text"] == merged["text"]
