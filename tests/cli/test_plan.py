"""dslaunch plan: each value with reason and source, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.cli.main import main
from dslaunch.cli.options import load_and_resolve
from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import RunPlan, from_json

RUN = """\
name: first
model: org/model
data: {train: org/data}
train_batch_size: 8
cluster: {num_gpus_per_node: 2}
precision: fp32
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def test_one_line_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--set", "seed=7"]) == 0
    out = capsys.readouterr().out.partition("\n\n")[2]
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert lines["seed"].split() == ["7", "--set"]
    assert lines["precision"].split() == ["fp32", "run.yaml:6"]
    assert lines["zero_optimization.stage"].split() == ["2", "default"]
    assert "train_batch_size 8 / (micro batch 4 x world_size 2)" in lines["gradient_accumulation_steps"]
    assert lines["launch.topology"].startswith("localhost slots 0,1")


def test_the_block_of_zero_optimization_is_shown_with_reason_and_source(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = "zero_optimization: {stage: 3, offload_param: cpu, overlap_comm: true}\n"
    raw = "deepspeed: {zero_optimization: {memory_efficient_linear: false}}\n"
    (here / "run.yaml").write_text(RUN + block + raw)
    flags = ["--gpu", "a100", "--set", "zero_optimization.reduce_bucket_size=1000"]
    assert main(["plan", "run.yaml", *flags]) == 0
    found = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert {key: (value, why) for key, value, why in (line for line in found if len(line) == 3)
            if key.startswith("zero_optimization.")} == {
        "zero_optimization.stage": ("3", "run.yaml:7"),
        "zero_optimization.offload_optimizer": ("-", "not set"),
        "zero_optimization.offload_param.device": ("cpu", "run.yaml:7"),
        "zero_optimization.offload_param.pin_memory": ("false", "default"),
        "zero_optimization.overlap_comm": ("true", "run.yaml:7"),
        "zero_optimization.reduce_bucket_size": ("1000", "--set"),
        "zero_optimization.memory_efficient_linear": ("false", "run.yaml:8"),
        "zero_optimization.stage3_gather_16bit_weights_on_model_save":
            ("true", "without it save_16bit_model writes nothing at stage 3"),
    }  # fmt: skip


def test_the_verdict_comes_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--set", "max_steps=100"]) == 0
    assert capsys.readouterr().out.partition("\n\n")[0].splitlines() == [
        "fp32, ZeRO stage 2, 2 ranks",
        "train_batch_size 8 = micro-batch 4 x accumulation 1 x 2 ranks",
        "100 steps, 3 of warm-up",
        "memory: not planned, the model is not on this machine",
    ]


def test_changed_leaves_defaults_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--changed", "--set", "seed=7", "--run-dir", "out"]) == 0
    table = capsys.readouterr().out.partition("\n\n")[2]
    keys = [line.split()[0] for line in table.splitlines()]
    assert {"name", "seed", "precision", "train_batch_size", "output.run_dir"} <= set(keys)
    assert not {"task", "zero_optimization.stage", "optimizer.lr", "adapter", "model.kind"} & set(keys)
    assert main(["plan", "run.yaml", "--changed", "--json"]) == 2
    assert "--changed is for the table" in capsys.readouterr().err


def test_json_holds_the_plan_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--json", "--run-dir", "out"]) == 0
    report = json.loads(capsys.readouterr().out)
    plan = from_json(RunPlan, report["plan"])
    assert report["schema_version"] == 1
    assert report["world_size"] == 2
    assert report["precision"] == {"value": "fp32", "reason": "as written"}
    assert report["batch"] == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
    }
    assert report["dtypes"] == {
        **dict.fromkeys(("model", "norms", "head", "rotary_tables", "loss"), "fp32"),
        "master_weights": "fp32",
        "gradient_accumulation": "fp32",
        "communication": "fp32",
    }
    assert report["zero_stage"] == plan.zero_stage == plan.ds_config["zero_optimization"]["stage"]
    assert plan.launch.run_dir == str(Path("out").resolve())


def test_it_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml"]) == 0
    assert [path.name for path in here.iterdir()] == ["run.yaml"]


def test_the_run_directory_follows_flag_file_environment_default(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_and_resolve("run.yaml").launch.run_dir.startswith(str(here / "runs" / "first-"))
    monkeypatch.setenv("DSLAUNCH_RUNS", str(here / "elsewhere"))
    assert load_and_resolve("run.yaml").launch.run_dir.startswith(str(here / "elsewhere" / "first-"))
    (here / "sub").mkdir()
    (here / "sub/run.yaml").write_text(RUN + "output: {run_dir: mine}\n")
    assert load_and_resolve("sub/run.yaml").launch.run_dir == str(here / "sub/mine")
    assert load_and_resolve("sub/run.yaml", run_dir="flag").launch.run_dir == str(here / "flag")


def test_the_name_is_the_files_unless_given(here: Path) -> None:
    (here / "my run, v2.yaml").write_text(RUN.replace("name: first\n", ""))
    assert load_and_resolve("my run, v2.yaml").name == "my-run-v2"


def test_flags_beat_the_file(here: Path) -> None:
    plan = load_and_resolve("run.yaml", num_gpus_per_node=4, set_=("precision=bf16",))
    assert (plan.batch.world_size, plan.precision) == (4, "bf16")
    assert plan.origins["precision"].source == "--set"


def test_a_missing_hostfile_from_a_flag(here: Path) -> None:
    with pytest.raises(ConfigError, match="--hostfile: hostfile not found"):
        load_and_resolve("run.yaml", hostfile="none")


def test_errors_have_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--set", "optimizer.lrr=1"]) == 2
    err = capsys.readouterr().err
    assert err == (
        "Error: --set: unknown key optimizer.lrr; did you mean lr?\n\nhint: write lr in place of lrr\n"
    )


def test_bf16_at_stage_0_is_summed_as_our_worker_does(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--precision", "bf16", "--zero-stage", "0", "--set", "adapter={}"]
    assert main(["plan", "run.yaml", *flags, "--train-micro-batch-size-per-gpu", "1"]) == 0
    lines = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if line}
    assert lines["dtypes.adapter"] == lines["dtypes.communication"] == "bf16"
    assert lines["dtypes.gradient_accumulation"] == "fp32"
    assert lines["dtypes.norms"] == lines["dtypes.head"] == "bf16"
    assert main(["plan", "run.yaml", *flags, "--set", "fp32_modules=[lm_head]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["dtypes"]
    assert found["norms"] == found["head"] == "as fp32_modules says"


@pytest.mark.parametrize(
    ("engine", "saved", "norms", "head"),
    [("torch", "lm_head", "bf16", "fp32"), ("torch", "model.norm", "as modules_to_save says", "bf16"),
     ("deepspeed", "lm_head", "bf16", "bf16")],
)  # fmt: skip
def test_what_is_trained_whole_has_the_adapters_type(
    capsys: pytest.CaptureFixture[str], engine: str, saved: str, norms: str, head: str
) -> None:
    """With engine torch fp32, which autocast computes with; the ranks' checkpoint holds it so."""
    flags = ["--precision", "bf16", "--set", f"engine={engine}", "--set", "zero_optimization=null"]
    flags += ["--set", "adapter={modules_to_save: [" + saved + "]}", "--json"]
    assert main(["plan", "run.yaml", *flags]) == 0
    found = json.loads(capsys.readouterr().out)["dtypes"]
    assert (found["norms"], found["head"], found["model"]) == (norms, head, "bf16")
    assert found["modules_to_save"] == found["adapter"] == ("fp32" if engine == "torch" else "bf16")


@pytest.mark.parametrize("written", ["a100", None])
def test_a_wrong_flag_is_blamed_and_not_the_run_file(
    here: Path, capsys: pytest.CaptureFixture[str], written: str | None
) -> None:
    if written is not None:
        text = RUN.replace("num_gpus_per_node: 2", f"num_gpus_per_node: 2, gpu: {written}")
        (here / "run.yaml").write_text(text)
    assert main(["plan", "run.yaml", "--gpu", "a1000"]) == 2
    assert capsys.readouterr().err.startswith("Error: --gpu: unknown device 'a1000'\n")
