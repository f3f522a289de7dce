"""dslaunch gen-config as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main

RUN = "model: org/model\ndata: {train: org/data}\ntrain_batch_size: 8\noptimizer: {lr: 1e-4}\n"


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests do not depend on the accelerators of the machine that runs them."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["gen-config", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def config(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    value: dict[str, Any] = json.loads(out)
    return value


def test_from_a_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(RUN)
    code, out, err = run(capsys, "run.yaml", "--precision", "fp32")
    assert code == 0
    assert json.loads(out)["optimizer"]["params"]["lr"] == 1e-4
    assert "note: run.yaml:4: optimizer.lr: read 1e-4 as the number 0.0001" in err
    assert "note: train_micro_batch_size_per_gpu 8 (largest power of two up to 8" in err


def test_from_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = config(
        capsys, "--num-nodes", "2", "--num-gpus-per-node", "8", "--gpu", "a100-80g", "--zero-stage", "3",
        "--train-batch-size", "256", "--lr", "3e-4", "--optimizer", "AdamW", "--gradient-clipping", "0",
        "--model", "org/model", "--set", "optimizer.params.weight_decay=0.1",
    )  # fmt: skip
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (8, 2)
    assert found["bf16"] == {"enabled": True}
    assert found["zero_optimization"]["stage"] == 3
    assert found["gradient_clipping"] == 0
    assert found["optimizer"]["params"] == {
        "lr": 3e-4,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


@pytest.mark.parametrize(("more", "said"), [((), True), (("--lr", "2e-5"), False)])
def test_a_rate_that_nobody_gave_is_told(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: bool
) -> None:
    flags = ("--num-gpus-per-node", "2", "--gpu", "a100", "--train-batch-size", "8", *more)
    code, out, err = run(capsys, *flags)
    assert code == 0 and json.loads(out)["optimizer"]["params"]["lr"] == 2e-5
    note = "note: optimizer AdamW with lr 2e-05 (usual for a whole model); --lr sets it"
    assert (note in err) is said


def test_sizes_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    found = config(
        capsys, "--precision", "fp16", "--gpu", "v100,a100", "--num-gpus-per-node", "4",
        "--train-micro-batch-size-per-gpu", "3", "--gradient-accumulation-steps", "5",
    )  # fmt: skip
    assert found["train_batch_size"] == 60
    assert found["fp16"]["loss_scale"] == 0


def test_a_hostfile_gives_the_world_size(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts").write_text("a slots=4\nb slots=2\n")
    found = config(capsys, "--hostfile", "hosts", "--gpu", "h100", "--train-batch-size", "12")
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (2, 1)
    found = config(
        capsys, "--hostfile", "hosts", "--include", "a:0,1@b", "--gpu", "h100", "--train-batch-size", "12"
    )
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (1, 3)


def test_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", "gen-config", "-"],
        input=("\ufeff" + RUN + "sede: 3\n").encode(),
        capture_output=True,
        timeout=60,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"Error: <stdin>:5: unknown key sede; did you mean seed?" in done.stderr


def test_output_never_overwrites_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--train-batch-size", "8", "--precision", "fp32", "-o", "ds.json")
    assert run(capsys, *flags)[:2] == (0, "")
    before = Path("ds.json").read_text()
    code, _, err = run(capsys, *flags, "--zero-stage", "1")
    assert (code, Path("ds.json").read_text()) == (2, before)
    assert "ds.json exists already; nothing was written" in err
    assert run(capsys, *flags, "--zero-stage", "1", "--force")[0] == 0
    assert json.loads(Path("ds.json").read_text())["zero_optimization"]["stage"] == 1
    code, _, err = run(capsys, *flags[:-1], "none/ds.json")
    assert code == 3
    assert "cannot write none/ds.json" in err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "no batch size is given"),
        (
            ["--train-batch-size", "8", "--num-nodes", "2", "--num-gpus-per-node", "2"],
            "hint: name them with --gpu",
        ),
        (["--train-batch-size", "9", "--num-gpus-per-node", "2"], "hint: use train_batch_size 8 or 10"),
        (
            ["--train-batch-size", "8", "--zero-stage", "4"],
            "--zero-stage: zero_optimization.stage: 4 is not one of",
        ),
        (["--train-batch-size", "8", "--precision", "fp8"], "--precision: precision: fp8 is not one of"),
        (["--train-batch-size", "8", "--optimizer", "Adamw"], "did you mean AdamW?"),
        (["--train-batch-size", "8", "--gpu", "a101"], "unknown device 'a101'"),
        (["--train-batch-size", "8", "--hostfile", "none"], "--hostfile: hostfile not found"),
        (["--train-batch-size", "0"], "--train-batch-size: train_batch_size: 0 is not > 0"),
        (["--train-batch-size", "eight"], "'eight' is not a valid integer"),
        (["--train-batch-size", "8", "--lr", "nan"], "--lr: optimizer.lr: nan is not"),
        (["--train-batch-size", "8", "--precision", "fp16"], "neither AVX512-FP16 nor AMX-FP16"),
        (["--train-batch-size", "8", "--set", "seed=3"], "--set: unknown key seed"),
        (["--train-batch-size", "8", "--set", "optimizer.lr"], "not of the form key=value"),
        (["nowhere.yaml"], "run file not found: nowhere.yaml"),
    ],
)
def test_errors_are_sentences_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dslaunch.core import devices

    monkeypatch.setattr(devices, "_probe_cpu", lambda root: devices.lookup_device("cpu"))
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert part in err
    assert "Traceback" not in err


def test_paths_are_checked_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("data.jsonl").write_text("")
    Path("run.yaml").write_text("model: modell\ndata: {train: ./dta.jsonl}\ntrain_batch_size: 8\n")
    code, out, err = run(capsys, "run.yaml", "--precision", "fp32")
    assert (code, out) == (2, "")
    assert f"run.yaml:1: model.path: there is no modell here, but there is {Path('model').resolve()}" in err
    assert "run.yaml:2: data.train[0].path: there is no ./dta.jsonl" in err
    flags = ("--train-batch-size", "8", "--precision", "fp32", "--model")
    code, _, err = run(capsys, *flags, "./none")
    assert code == 2
    assert "--model: there is no ./none" in err
    assert config(capsys, *flags, "org/model")["train_batch_size"] == 8


def test_data_of_a_kind_that_is_not_read_is_refused_here_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("d.csv").write_text("a,b\n")
    Path("run.yaml").write_text("model: org/m\ndata: {train: d.csv}\ntrain_batch_size: 8\nprecision: fp32\n")
    assert main(["gen-config", "run.yaml"]) == 2
    assert "run.yaml:2: data.train[0].path: d.csv has none of the endings" in capsys.readouterr().err


def test_a_wrong_hostfile_comes_with_the_other_problems(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts").write_text("a slots=x y\nb\n")
    Path("run.yaml").write_text(RUN + "zero_optimization: {sub_group_size: 5}\ncluster: {hostfile: hosts}\n")
    code, _, err = run(capsys, "run.yaml", "--precision", "fp32")
    assert code == 2
    assert err.count("Error: ") == 3
    assert "hosts:1:" in err
    assert "hosts:2:" in err
    assert "run.yaml:5: zero_optimization.sub_group_size" in err


def test_the_problems_of_flags_and_file_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(RUN + "zero_optimization: {stage: 1, sub_group_size: 5}\n")
    code, _, err = run(
        capsys, "run.yaml", "--num-gpus-per-node", "3", "--precision", "fp32", "--set", "optimizer.params.d=1"
    )
    assert code == 2
    assert "run.yaml:3: train_batch_size 8 is not a multiple of world_size 3" in err
    assert "run.yaml:5: zero_optimization.sub_group_size acts at stage 3 only" in err
    assert "--set: optimizer.params.d: AdamW does not take it" in err


def test_fp16_at_stage_0_is_refused_for_scripts_and_run_by_our_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--precision", "fp16", "--gpu", "v100", "--num-gpus-per-node", "2", "--zero-stage")
    code, out, err = run(capsys, *flags, "0", "--train-batch-size", "8")
    assert (code, out) == (2, "")
    assert "--zero-stage: fp16 at zero_optimization.stage 0: DeepSpeed 0.19.8 divides the gradients" in err
    assert "hint: use stage: 1 (--zero-stage 1)" in err
    assert config(capsys, *flags, "1", "--train-batch-size", "8")["fp16"]["enabled"] is True
    Path("run.yaml").write_text(
        RUN + "precision: fp16\ncluster: {gpu: v100, num_gpus_per_node: 2}\nzero_optimization: {stage: 0}\n"
    )
    code, out, err = run(capsys, "run.yaml")
    assert (code, out) == (2, "")
    assert "run.yaml:7: fp16 at zero_optimization.stage 0" in err
    assert "`dslaunch launch` may keep stage 0" in err
    assert main(["plan", "run.yaml"]) == 0
    assert "dslaunch's worker runs it as stage 1" in capsys.readouterr().err
    assert main(["check", "run.yaml"]) == 0
    assert "run.yaml:7: warning: fp16 at ZeRO stage 0" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["gen-config", "plan"])
def test_a_model_that_others_have_quantised_is_refused_without_a_run_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    block = {"quant_method": "awq", "bits": 4}
    config = {"model_type": "llama", "num_attention_heads": 1, **sizes, "quantization_config": block}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = [verb, "--gpu", "a100", "--num-gpus-per-node", "8", "--zero-stage", "2"]
    argv += ["--train-micro-batch-size-per-gpu", "1", "--gradient-accumulation-steps", "1"]
    assert main([*argv, "--model", str(tmp_path)]) == 2
    assert "the model's weights are quantised by awq" in capsys.readouterr().err
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([*argv, "--model", str(tmp_path), *["--method", "qlora"] * (verb == "plan")]) == 0
    if verb == "plan":
        assert "dtypes.bnb_4bit_quant_storage            uint8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--zero-stage", "0", "--offload-optimizer", "cpu"], "acts at stages 1, 2, 3 only"),
        (
            ["--zero-stage", "3", "--set", "zero_optimization.offload_optimizer.device=nvme"],
            "nvme_path is missing: device nvme needs a directory",
        ),
    ],
)
def test_what_the_plan_refuses_is_not_said_again_by_check(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    flags = ["--gpu", "a100", "--num-gpus-per-node", "8", "--precision", "bf16", "--train-batch-size", "8"]
    assert main(["gen-config", *flags, *argv]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("Error: ") == 1, said


QUANTISED = "model: {path: org/model, quantization_config: {%s}}\n"
LORA = "adapter: {type: lora}\n"


@pytest.mark.parametrize(
    ("model", "rest", "key"),
    [
        (QUANTISED % "load_in_8bit: true", LORA + "zero_optimization: {stage: 3}\n", "stage 3 with 8-bit"),
        (QUANTISED % "load_in_4bit: true, load_in_8bit: true", LORA, "both are true"),
        (QUANTISED % "load_in_8bit: false", LORA, "neither is true"),
        (
            QUANTISED % "load_in_4bit: true, bnb_4bit_quant_storage: bfloat16",
            LORA + "precision: fp16\n",
            "bnb_4bit_quant_storage bfloat16 with precision fp16",
        ),
        (QUANTISED % "load_in_8bit: true", "", "there is no adapter section"),
        ("model: {path: org/model, attn_implementation: flash_attention_2}\n", "precision: fp16\n", "v100"),
        ("model: org/model\n", "max_steps: 10\nscheduler: {warmup_steps: 50}\n", "more than the 10 steps"),
        (
            "model: org/model\n",
            "max_steps: 10\nscheduler: {type: wsd, warmup_steps: 5, decay_steps: 6}\n",
            "6 of decay are more than the 10 steps",
        ),
        ("model: org/model\n", "output: {eval_steps: 5}\n", "there is no data.eval"),
    ],
)
def test_what_plan_and_check_refuse_of_a_run_file_is_not_rendered(
    capsys: pytest.CaptureFixture[str], model: str, rest: str, key: str
) -> None:
    """With the same sentence at the same line; neither the model nor the data is here."""
    precision = "" if "precision" in rest else "precision: fp32\n"
    Path("run.yaml").write_text(
        f"{model}data: {{train: org/data}}\ntrain_batch_size: 8\n{precision}"
        f"cluster: {{gpu: v100, num_gpus_per_node: 2}}\n{rest}"
    )
    code, out, err = run(capsys, "run.yaml")
    assert (code, out) == (2, "")
    (error,) = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert key in error
    assert main(["plan", "run.yaml"]) == 2
    assert error in capsys.readouterr().err.splitlines()
    assert main(["check", "run.yaml"]) == 1
    place, message = error.removeprefix("Error: ").split(": ", 1)
    assert f"{place}: error: {message} [run-file]" in capsys.readouterr().out


def test_gpus_that_are_not_here_are_never_planned_for_as_this_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login node: its CPU says nothing of the GPUs that are asked for."""
    monkeypatch.setattr("dslaunch.config.facts.is_this_machine", lambda name: name == "login")
    Path("hosts").write_text("login slots=4\n")
    for where in (("--num-gpus-per-node", "4"), ("--hostfile", "hosts")):
        code, out, err = run(capsys, *where, "--train-batch-size", "8")
        assert (code, out) == (2, "")
        assert "precision auto: which devices the run is for is not known here" in err
        assert "hint: name them with --gpu" in err
        found = config(capsys, *where, "--train-batch-size", "8", "--precision", "bf16")
        assert "torch_adam" not in found["optimizer"]["params"]
        found = config(capsys, *where, "--train-batch-size", "8", "--gpu", "cpu")
        assert (found["fp16"], found["bf16"]) == ({"enabled": False}, {"enabled": False})
        assert found["optimizer"]["params"]["torch_adam"] is True


def test_bf16_gradients_on_amd(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--gpu", "mi300x", "--num-gpus-per-node", "8", "--train-batch-size", "64")
    assert config(capsys, *flags)["communication_data_type"] == "fp32"
    assert config(capsys, *flags, "--set", "deepspeed.communication_data_type=bf16")[
        "communication_data_type"
    ] == "bf16"  # fmt: skip


def test_a_bf16_model_in_fp16_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text('{"text_config": {"torch_dtype": "bfloat16"}}')
    flags = ("--gpu", "v100", "--num-gpus-per-node", "2", "--train-batch-size", "8", "--model", "model")
    assert "the model's weights are bfloat16: in fp16" in run(capsys, *flags)[2]
    assert "bf16 on v100 (sm_70) is emulated" in run(capsys, *flags, "--precision", "bf16")[2]


TEMPLATE = """{
  "train_batch_size": {{ batch.train_batch_size | json }},
  "train_micro_batch_size_per_gpu": {{ batch.train_micro_batch_size_per_gpu | json }},
  "gradient_accumulation_steps": {{ batch.gradient_accumulation_steps | json }},
  "gradient_clipping": {{ gradient_clipping | json }},
  "steps_per_print": 50,
  {% include "deepspeed/precision.json.j2" %},
  {% include "deepspeed/zero.json.j2" %},
  {% include "deepspeed/optimizer.json.j2" %}
}
"""
OWN_SCRIPT = ("--num-gpus-per-node", "2", "--gpu", "a100", "--train-batch-size", "8", "--template")


def test_a_template_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.j2").write_text("\ufeff" + TEMPLATE, encoding="utf-8")
    found = config(capsys, *OWN_SCRIPT, "my.j2")
    assert found["steps_per_print"] == 50
    del found["steps_per_print"]
    assert found == config(capsys, *OWN_SCRIPT[:-1])


def test_a_template_in_a_run_file_is_found_from_there(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    Path("runs/my.j2").write_text(TEMPLATE)
    Path("runs/run.yaml").write_text(RUN + "deepspeed_template: my.j2\n")
    cpu = ("--gpu", "cpu", "--num-gpus-per-node", "1")
    assert config(capsys, "runs/run.yaml", *cpu)["steps_per_print"] == 50
    Path("runs/my.j2").write_text(TEMPLATE.replace("50", '"ten"'))
    code, out, err = run(capsys, "runs/run.yaml", *cpu)
    assert (code, out) == (2, "")
    assert 'Error: runs/my.j2:6: steps_per_print: "ten" is a text, but a whole number is expected' in err


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("{{ batch.train_batch_size | json }}", "16", "my.j2:2: train_batch_size is 16; the plan says 8",
         "write {{ batch.train_batch_size | json }} here"),
        ("{{ gradient_clipping | json }}", '"{{ gradient_clipping }}"',
         'my.j2:5: gradient_clipping is "1.0"; the plan says 1.0', "write {{ gradient_clipping | json }}"),
        ("gradient_clipping | json", "gradient_cliping | json", "my.j2:5: 'gradient_cliping' is undefined",
         "did you mean gradient_clipping?"),
        ("50,", "50", "my.j2:6: the rendered text is not JSON: Expecting ',' delimiter near", "write each"),
        ("{{ gradient_clipping | json }}", "{{ gradient_clipping | json }", "my.j2:5: ", ""),
        ("steps_per_print", "step_per_print", "my.j2:6: step_per_print: is no key of DeepSpeed",
         "did you mean steps_per_print?"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_template_has_its_line(
    capsys: pytest.CaptureFixture[str], old: str, new: str, message: str, hint: str
) -> None:
    assert old in TEMPLATE
    Path("my.j2").write_text(TEMPLATE.replace(old, new))
    code, out, err = run(capsys, *OWN_SCRIPT, "my.j2")
    assert (code, out) == (2, "")
    assert f"Error: {message}" in err
    assert f"hint: {hint}" in err or not hint


@pytest.mark.parametrize(
    ("name", "message"),
    [("mi.j2", "mi.j2 not found"), (".", "deepspeed_template: . is a directory"), ("bin", "bin: not UTF-8")],
)
def test_a_template_that_cannot_be_read(capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    Path("my.j2").write_text(TEMPLATE)
    Path("bin").write_bytes(b"\xff\xfe")
    code, out, err = run(capsys, *OWN_SCRIPT, name)
    assert (code, out) == (2, "")
    assert "Error: --template: deepspeed_template: " in err
    assert message in err


HOSTS = "node-1 slots=4\nnode-2 slots=4\nold slots=1\n"


def test_devices_by_host(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts").write_text(HOSTS)
    flags = ("--hostfile", "hosts", "--train-batch-size", "72", "--gpu")
    code, out, err = run(capsys, *flags, "node-[1,2]=a100, *=v100")
    assert (code, json.loads(out)["fp16"]["enabled"]) == (0, True)
    assert "precision fp16: v100 (sm_70) of old does not compute in bf16" in err
    assert config(capsys, *flags, "node-[1,2]=a100,*=v100", "--exclude", "old")["bf16"]["enabled"] is True
    for gpu, part in (
        ("node-1=a100", "--gpu: no pattern fits node-2, old"),
        ("node-*=a100,v100", "'v100' is not PATTERN=DEVICE"),
        ("node-1=a100,node-1=v100,*=l4", "node-1 is given twice"),
        ("*=a1000", "--gpu: cluster.gpu.*: unknown device 'a1000'"),
        ("node-[1=a100", "cluster.gpu.node-[1: host pattern 'node-[1': [ without its other half"),
    ):
        code, _, err = run(capsys, *flags, gpu)
        assert (code, "Traceback" in err) == (2, False)
        assert part in err


def test_devices_by_host_in_a_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts").write_text(HOSTS)
    Path("run.yaml").write_text(
        RUN.replace("8", "72") + "cluster:\n  hostfile: hosts\n  gpu:\n    node-[1-2]: a100\n    new: v100\n"
    )
    code, _, err = run(capsys, "run.yaml")
    assert code == 2
    assert "run.yaml:7: cluster.gpu: no pattern fits old" in err
    assert "run.yaml:9: cluster.gpu.new: it decides for no host of the hostfile" in err
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("new: v100", "old: 5"))
    code, _, err = run(capsys, "run.yaml")
    assert code == 2
    assert "run.yaml:9: cluster.gpu.old: 5 is a number, where text is meant" in err


def test_an_inventory_of_the_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts").write_text(HOSTS)
    a100, v100 = (json.dumps({"name": name}) for name in ("NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB"))
    lines = [
        f'{{"{name}": {{"accelerators": [{a100}, {a100}, {a100}, {a100}]}}}}' for name in ("node-1", "node-2")
    ]
    Path("inv.json").write_text("\n".join([*lines, f'{{"old": {{"accelerators": [{v100}]}}}}\n']))
    flags = ("--hostfile", "hosts", "--train-batch-size", "72", "--inventory")
    code, out, err = run(capsys, *flags, "inv.json")
    assert (code, json.loads(out)["fp16"]["enabled"]) == (0, True)
    assert "every device does in fp16: a100 (sm_80) of node-1, node-2, v100 (sm_70) of old" in err
    Path("inv.json").write_text("\n".join(lines))
    assert "--inventory: old is not in it" in run(capsys, *flags, "inv.json")[2]
    Path("inv.json").write_text("{")
    assert f"{Path('inv.json').resolve()}:1:2: not JSON" in run(capsys, *flags, "inv.json")[2]
    code, _, err = run(capsys, *flags, "inw.json")
    assert code == 2
    assert "--inventory: inventory not found" in err
    assert "inv.json?" in err


def test_a_script_of_ones_own_may_leave_the_schedule_to_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-gpus-per-node", "2", "--gpu", "a100", "--train-batch-size", "8", "--set")
    schedule = "{type: WarmupLR, params: {warmup_num_steps: 10, warmup_max_lr: 2.0e-5}}"
    assert config(capsys, *flags, f"deepspeed.scheduler={schedule}")["scheduler"]["type"] == "WarmupLR"
    code, _, err = run(capsys, *flags, "deepspeed.scheduler={type: WarmupLr, params: {}}")
    assert code == 2
    assert "--set: deepspeed.scheduler.type: WarmupLr is no schedule of DeepSpeed" in err
    code, _, err = run(capsys, *flags, "deepspeed.optimizer.params.lr=1")
    assert "--set: deepspeed.optimizer.params.lr: 1 contradicts 2e-05 of the flags" in err
    assert "hint: use its flag, or --set optimizer.lr=..." in err


def test_a_broken_template_does_not_hide_other_problems(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.j2").write_text("{{")
    code, _, err = run(capsys, *OWN_SCRIPT, "my.j2", "--set", "deepspeed.steps_per_print=ten")
    assert code == 2
    assert "Error: my.j2:1: " in err
    assert "Error: --set: deepspeed.steps_per_print: " in err


def test_a_scheduler_for_a_script_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--gpu", "a100", "--num-gpus-per-node", "2", "--train-batch-size", "8", "--scheduler", "linear")
    found = config(capsys, *flags, "--num-samples", "100", "--lr", "3e-4")
    params = found["scheduler"]["params"]
    assert (params["total_num_steps"], params["warmup_max_lr"]) == (13, 3e-4)
    code, out, err = run(capsys, *flags, "--num-samples", "7")
    assert (code, out) == (2, "")
    assert "7 samples x 1 epoch are fewer than train_batch_size 8" in err
    both = ("--max-steps", "9", "--set", "deepspeed.scheduler={type: WarmupLR, params: {}}")
    assert "--scheduler and deepspeed.scheduler are both given" in run(capsys, *flags, *both)[2]
    Path("run.yaml").write_text(RUN)
    code, _, err = run(capsys, "run.yaml", *flags, "--max-steps", "9")
    assert code == 2
    assert "--scheduler is for scripts of your own" in err
