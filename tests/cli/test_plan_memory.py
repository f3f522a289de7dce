"""dslaunch plan: memory of a run file's model, and of a model and flags alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.cli.main import main
from tests.config.memory.models import LLAMA_3_8B
from tests.support.tiny import make_tiny_model_dir
from tests.test_light_imports import RESOLVING, imported, third_party

RUN = """\
name: first
model: model
data: {train: org/data}
adapter: {type: lora, r: 4}
train_batch_size: 8
train_micro_batch_size_per_gpu: 2
cluster: {num_gpus_per_node: 2, gpu: v100-32gb}
precision: fp16
zero_optimization: {stage: 2}
"""
MUON = ("--set", "optimizer.type=Muon", "--set", "optimizer.lr=0.02")
FLAGS = ["--num-nodes", "1", "--num-gpus-per-node", "8", "--zero-stage", "2", "--precision", "bf16"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    make_tiny_model_dir(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--model", "model", "--gpu", "a100-80g", *FLAGS, "--method", "full",
                   "--max-length", "256", "--train-micro-batch-size-per-gpu", "1")  # fmt: skip
    assert set(found) == {
        "schema_version", "world_size", "precision", "zero_stage", "batch", "memory", "alternatives",
    }  # fmt: skip
    assert (found["schema_version"], found["world_size"], found["zero_stage"]) == (1, 8, 2)
    assert found["precision"] == {"value": "bf16", "reason": "as written"}
    assert found["batch"] == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }
    gpu = found["memory"]["per_gpu"]
    assert gpu["fits"] is True
    assert gpu["rest_bytes"] == sum(i["bytes"] for i in gpu["items"] if i["when"] == "always")
    assert gpu["peak_bytes"] > gpu["rest_bytes"]
    outside = sum(i["bytes"] for i in gpu["items"] if i["when"] == "outside")
    assert gpu["total_bytes"] == gpu["peak_bytes"] + outside
    least, most = gpu["total_range_bytes"]
    assert gpu["peak_bytes"] < least < gpu["total_bytes"] < most < 1.1 * gpu["peak_bytes"] + 1.2e9
    assert {"peak_bytes", "items"} <= set(found["memory"]["per_host"])
    assert found["memory"]["checkpoint_bytes"] > 0
    assert found["alternatives"][0]["changes"]


def test_config_json_is_enough_and_what_does_not_fit_says_what_would(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((here / "model/config.json").read_text())
    big = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    (here / "big.json").write_text(json.dumps({**config, **big, "num_attention_heads": 32, "head_dim": 128}))
    argv = ["plan", "--model", "big.json", "--gpu", "a100-40g", *FLAGS, "--max-length", "4096"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "nearest that fits: --gradient-checkpointing (" in out, out
    assert main([*argv, "--zero-stage", "3", "--gradient-checkpointing", "--offload-optimizer", "cpu"]) == 0
    assert "\nfits: " in capsys.readouterr().out


def test_qlora_is_smaller_than_lora(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--model", "model", "--gpu", "h100", *FLAGS, "--max-length", "128", "--lora-r", "4")
    rests = [
        report(capsys, *argv, "--method", method)["memory"]["per_gpu"]["rest_bytes"]
        for method in ("lora", "qlora")
    ]
    assert rests[1] < rests[0]


def test_a_device_of_several_sizes_is_taken_for_the_smallest_and_said_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--model", "model", "--gpu", "a100", *FLAGS]) == 0
    captured = capsys.readouterr()
    assert "a100 comes with 40 GB and 80 GB: 40 GB assumed; a100-80g says otherwise" in captured.err
    assert "of 39.40 GiB on each device" in captured.out
    assert main(["plan", "--model", "model", "--gpu", "a100-64g", *FLAGS]) == 0  # made for one centre alone
    assert "a100-64g comes with 40 GB and 80 GB, not 64 GB: 64 GB are taken, as written" in (
        capsys.readouterr().err
    )


def test_the_memory_of_a_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "run.yaml")
    gpu = found["memory"]["per_gpu"]
    assert gpu["capacity_bytes"] == int(31.52 * 2**30)
    assert {item["name"] for item in gpu["items"]} >= {"frozen weights", "weights", "reduce bucket"}
    assert found["plan"]["adapter"]["r"] == 4
    more = report(capsys, "run.yaml", "--max-length", "2048", "--gradient-checkpointing")
    assert more["plan"]["data"]["max_length"] == 2048
    assert more["plan"]["model"]["gradient_checkpointing"] is True
    away = report(capsys, "run.yaml", "--zero-stage", "3", "--offload-optimizer", "cpu")
    assert away["plan"]["ds_config"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert away["memory"]["per_host"]["peak_bytes"] > 0


def test_16_bit_stage_0_of_a_run_file_is_planned_as_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    zero, one = (report(capsys, "run.yaml", "--zero-stage", stage)["memory"] for stage in "01")
    assert zero["per_gpu"] == one["per_gpu"]


def test_text_of_a_run_file_ends_with_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert "ZeRO stage 2\neach device:\n" in out
    assert "this fits; cheaper or roomier:" in out


def test_what_is_proposed_for_a_run_file_is_understood_by_every_verb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("run.yaml").write_text(
        RUN.replace("stage: 2", "stage: 3, offload_param: cpu, stage3_prefetch_bucket_size: 1000")
    )
    seen = set()
    for alternative in report(capsys, "run.yaml")["alternatives"]:
        changes = [word for change in alternative["changes"] for word in change.split()]
        assert set(changes[::2]) == {"--set"}
        seen.update(word.partition("=")[0] for word in changes[1::2])
        assert main(["gen-config", "run.yaml", *changes]) == 0
        block = json.loads(capsys.readouterr().out)
        zero = block["zero_optimization"]
        assert zero["stage"] == alternative["zero_stage"]
        for part in ("offload_optimizer", "offload_param"):
            assert zero.get(part, {}).get("device") == alternative[part]
        micro = "train_micro_batch_size_per_gpu"
        assert (block["train_batch_size"], block[micro]) == (8, alternative[micro])
    assert seen >= {
        "model.gradient_checkpointing", "gradient_accumulation_steps", "zero_optimization.stage",
        "zero_optimization.offload_param", "zero_optimization.stage3_prefetch_bucket_size",
    }  # fmt: skip


def test_what_is_proposed_for_a_script_are_flags_of_plan_and_gen_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [
        "--model", "model", "--gpu", "v100-32gb", "--num-gpus-per-node", "2", "--zero-stage", "3",
        "--precision", "fp16", "--offload-param", "cpu", "--train-micro-batch-size-per-gpu", "2",
    ]  # fmt: skip
    first = report(capsys, *argv)
    assert len(first["alternatives"]) > 5
    for alternative in first["alternatives"]:
        changes = [word for change in alternative["changes"] for word in change.split()]
        again = report(capsys, *argv, *changes)
        assert again["zero_stage"] == alternative["zero_stage"]
        assert again["batch"]["train_batch_size"] == 4
        planned, peak = alternative["peak_bytes"], again["memory"]["per_gpu"]["peak_bytes"]
        assert planned == peak
    own = ["--train-batch-size", "4", "--offload-param", "cpu", "--offload-param", "none"]
    assert main(["gen-config", *argv[2:8], "--precision", "bf16", *own]) == 0
    assert "offload_param" not in json.loads(capsys.readouterr().out)["zero_optimization"]


def test_where_it_fits_only_what_is_cheaper_or_roomier_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml"]) == 0
    out = capsys.readouterr().out
    shown = out.partition("this fits; cheaper or roomier:\n")[2].splitlines()
    assert [line.split()[0] for line in shown if line.startswith("  ")]
    assert all(line.split()[0] == "fits" for line in shown if line.startswith("  "))
    assert (
        "\nordered by what slows a step down least, then by size; a rough rule: offloads cost most, " in out
    )


def test_flash_attention_that_cannot_run_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--model", "model", *FLAGS[:-2], "--attention", "flash", "--gpu"]
    assert main([*argv, "v100-32gb"]) == 0
    words = "note: --attention flash: it needs compute capability 8.0, and v100 (sm_70) has less"
    assert words in capsys.readouterr().err
    assert main([*argv, "a100-80g"]) == 0
    assert "--attention flash" not in capsys.readouterr().err


def test_what_fits_by_little_says_how_close_it_is_and_what_leaves_more_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--model", "model", *FLAGS[:-2], "--train-micro-batch-size-per-gpu", "64", "--max-length", "4096"]
    gpu = report(capsys, *argv, "--gpu", "a100-80g")["memory"]["per_gpu"]
    nearly = gpu["total_bytes"] / 0.96 / 0.985 / 2**30
    for size, close in ((int(nearly), True), (2 * int(nearly), False)):
        assert main(["plan", *argv, "--gpu", f"sm_80-{size}g"]) == 0
        out = capsys.readouterr().out
        assert "\nfits: " in out
        assert ("on each device, tight: 9" in out) == close
        assert ("; with more room: --train-micro-batch-size-per-gpu 1 --grad" in out) == close, out


def test_what_does_not_fit_anywhere_is_ordered_by_what_is_lacking(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--model", "model", "--gpu", "cpu", "--num-gpus-per-node", "2", "--host-memory-gib", "1"]
    found = report(capsys, *argv, "--max-length", "1024", "--precision", "fp32")
    lacking = [alternative["host_peak_bytes"] for alternative in found["alternatives"]]
    assert len(set(lacking)) > 1
    assert lacking == sorted(lacking)
    assert main(["plan", *argv, "--max-length", "1024", "--precision", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "alternatives, none of which fits:\n" in out
    assert out.endswith("\nordered by what is lacking, least first\n")


def test_a_model_elsewhere_is_a_note_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--set", "model.path=org/name", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["memory"], found["alternatives"]) == (None, [])
    assert "note: memory is not planned: org/name is not on this machine" in captured.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "neither a run file nor --model is given"),
        (["--model", "nowhere"], "--model: there is no nowhere"),
        (["--model", "model", "--gpu", "a100", *FLAGS, "--lora-r", "4"], "--lora-r has no effect"),
        (["--model", "model", "--gpu", "a100", *FLAGS, "--offload-param", "cpu"], "acts at stage 3"),
        (["run.yaml", "--method", "lora"], "--method is for plans without a run file"),
        (["run.yaml", "--task", "dpo"], "--task is for plans without a run file"),
        (
            ["--model", "model", "--gpu", "a100", *FLAGS, "--precompute-ref-log-probs"],
            "--precompute-ref-log-probs has no effect with --task sft",
        ),
        (["--model", "run.yaml"], "is no model"),
        (
            ["--model", "model", "--gpu", "v100-32gb", *FLAGS, "--zero-stage", "0", "--precision", "fp16"],
            "--zero-stage: fp16 at zero_optimization.stage 0",
        ),
        (
            ["--model", "model", "--gpu", "a100", *FLAGS, "--set", "optimizer.type=AdEMAMix"],
            "optimizer.type AdEMAMix: no DeepSpeed JSON can name it",
        ),
        (
            ["--model", "model", "--gpu", "a100", *FLAGS, *MUON, "--precision", "bf16"],
            "optimizer.type Muon in bf16: DeepSpeed keeps its momentum in bf16",
        ),
        (
            ["--model", "model", "--gpu", "a100", *FLAGS, *MUON, "--precision", "fp32"],
            "gradient_clipping 1 with Muon at ZeRO stage 2: DeepSpeed clips its update after it was",
        ),
        (["--model", "model", "--num-nodes", "2"], "num_gpus_per_node"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *argv]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("size", [None, 65_667_071, 65_667_072])
def test_a_tensor_that_no_buffer_of_an_nvme_can_hold_is_an_error(
    size: int | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """128,256 x 4,096 elements on eight ranks, or on four where the default of 1e8 is too small."""
    (here / "large.json").write_text(json.dumps(LLAMA_3_8B))
    nvme = "zero_optimization.offload_param={device: nvme, nvme_path: /n}"
    flags = ["--num-nodes", "1", "--precision", "bf16", "--zero-stage", "3", "--set", nvme]
    ranks = ["--num-gpus-per-node", "4" if size is None else "8"]
    argv = ["plan", "--model", "large.json", "--gpu", "a100-80g", *flags, *ranks]
    key = "deepspeed.zero_optimization.offload_param.buffer_size"
    argv += [] if size is None else ["--set", f"{key}={size}"]
    needed = 131_334_144 if size is None else 65_667_072
    assert main(argv) == (0 if size == needed else 2)
    err = capsys.readouterr().err
    assert (f"{key} {size or 10**8:,}: a rank's share" in err) == (size != needed)
    assert (f"--set {key}={needed}" in err) == (size != needed)


@pytest.mark.parametrize(("patterns", "code"), [("['*nope*']", 2), ("['*norm*']", 0)])
def test_a_pattern_that_matches_no_module_is_said_by_plan_and_check_alike(
    patterns: str, code: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.yaml").write_text(f"{RUN}fp32_modules: {patterns}\n")
    assert main(["plan", "run.yaml"]) == code
    planned = capsys.readouterr().err
    assert main(["check", "run.yaml"]) == bool(code)
    message = "fp32_modules: '*nope*' matches no module of the model"
    assert (f"Error: run.yaml:10: {message}" in planned) == bool(code)
    assert (f"run.yaml:10: error: {message} [run-file]\n" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(("pattern", "code"), [("*nope*", 2), ("*lora_B*", 0)])
def test_a_group_that_matches_no_parameter_is_said_by_plan_and_check_alike(
    pattern: str, code: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.yaml").write_text(f"{RUN}optimizer: {{groups: [{{match: ['{pattern}'], lr: 1.0e-5}}]}}\n")
    assert main(["plan", "run.yaml"]) == code
    planned = capsys.readouterr()
    assert main(["check", "run.yaml"]) == bool(code)
    checked = capsys.readouterr().out
    if code:
        message = "optimizer.groups[0].match '*nope*' matches no trained parameter"
        assert f"Error: run.yaml:10: {message}" in planned.err
        assert f"run.yaml:10: error: {message} [run-file]\n" in checked
    else:
        (line,) = [
            row for row in planned.out.splitlines() if row.startswith("optimizer.groups[0].match *lora_B*")
        ]
        assert "14 parameters" in line and "q_proj.lora_B.default.weight" in line
        assert "optimizer.groups" not in checked


def test_what_a_quantised_module_cannot_do_is_said_by_plan_and_check_alike(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RUN.replace("model: model", "model: {path: model, quantization_config: {load_in_4bit: true}}")
    text = text.replace("r: 4}", "r: 4, modules_to_save: [q_proj], trainable_token_indices: [9999]}")
    (here / "run.yaml").write_text(f"{text}fp32_modules: [self_attn]\n")
    says = [
        ("run.yaml:4", "adapter.modules_to_save: q_proj is quantised, and quantised weights are not trained"),
        ("run.yaml:4", "adapter.trainable_token_indices: 9999 is no row of the embedding, which has 384"),
        (
            "run.yaml:10",
            "fp32_modules: model.layers.0.self_attn.q_proj.weight is quantised, and cannot be fp32",
        ),
    ]
    assert main(["plan", "run.yaml"]) == 2
    planned = capsys.readouterr().err
    assert main(["check", "run.yaml"]) == 1
    checked = capsys.readouterr().out
    for place, message in says:
        assert f"{place}: {message}\n" in planned
        assert f"{place}: error: {message} [run-file]\n" in checked


@pytest.mark.parametrize(
    ("key", "value", "place", "message"),
    [
        ("fp32_modules", "['*nope*']", "run.yaml:10", "fp32_modules: '*nope*' matches no module"),
        ("optimizer.no_decay", "['*nope*']", "--set", "optimizer.no_decay '*nope*' matches no trained"),
        ("adapter.target_modules", "[q_prj]", "--set", "adapter.target_modules: 'q_prj' matches no layer"),
        ("adapter.trainable_token_indices", "[384]", "--set", "384 is no row of the embedding"),
    ],
)
def test_launch_refuses_names_that_match_nothing_before_a_rank_starts(
    here: Path, capsys: pytest.CaptureFixture[str], key: str, value: str, place: str, message: str
) -> None:
    in_file = f"{key}: {value}\n" if place != "--set" else ""
    (here / "run.yaml").write_text(RUN + in_file)
    argv = ["launch", "run.yaml", "--dry-run", "--set", "cluster.gpu=cpu", "--set", "precision=bf16"]
    assert main([*argv, *([] if in_file else ["--set", f"{key}={value}"])]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("Error: ")]
    assert line.startswith(f"Error: {place}: ") and message in line


def test_check_takes_patterns_on_trust_where_the_model_is_elsewhere(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RUN.replace("model: model", "model: org/elsewhere")
    (here / "run.yaml").write_text(f"{text}fp32_modules: ['*nope*']\n")
    assert main(["check", "run.yaml"]) == 0
    assert "fp32_modules" not in capsys.readouterr().out


def test_no_torch_is_needed(here: Path) -> None:
    modules = imported("plan", "--model", str(here / "model"), "--gpu", "a100", *FLAGS, cwd=here)
    assert third_party(modules) <= RESOLVING


def test_zero_stage_auto(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-gpus-per-node", "8", "--zero-stage", "auto", "--precision", "bf16", "--gpu", "a100-80g"]
    assert report(capsys, "--model", "model", *flags)["zero_stage"] == 1
    assert main(["plan", "--model", "model", *flags]) == 0
    assert "note: zero_optimization: stage 1 fits: " in capsys.readouterr().err
    assert main(["gen-config", "--model", "model", *flags, "--train-batch-size", "8"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["zero_optimization"]["stage"] == 1
    assert "(--method full, --max-length 1024)" in err


def test_auto_in_a_run_file_is_settled_by_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(RUN.replace("stage: 2", "stage: auto, offload_optimizer: auto"))
    assert report(capsys, "run.yaml")["zero_stage"] == 1
    assert main(["gen-config", "run.yaml"]) == 0
    block = json.loads(capsys.readouterr().out)["zero_optimization"]
    assert (block["stage"], "offload_optimizer" in block) == (1, False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["gen-config", "--model", "org/away", "--zero-stage", "auto", "--gpu", "t4"],
            "Error: --model: zero_optimization.stage auto: the size of org/away is not known here",
        ),
        (
            ["gen-config", "--zero-stage", "auto", "--gpu", "t4", "--num-gpus-per-node", "1"],
            "Error: zero_optimization.stage auto: no model is given to plan for",
        ),
        (
            ["gen-config", "--method", "lora", "--zero-stage", "1", "--gpu", "t4"],
            "Error: --method is not in the DeepSpeed JSON: it only helps to choose a stage",
        ),
        (
            ["plan", "--model", "model", "--zero-stage", "4", "--gpu", "t4", "--num-gpus-per-node", "1"],
            "Error: --zero-stage: zero_optimization.stage: 4 is not one of auto, 0, 1, 2, 3",
        ),
    ],
)
def test_what_auto_cannot_do(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(message)


BIG = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}


@pytest.fixture
def seven_billion(here: Path) -> list[str]:
    """The flags of Llama 2 7B, of which only the config.json is here, on one device with both offloads."""
    config = json.loads((here / "model/config.json").read_text())
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    (here / "7b.json").write_text(json.dumps({**config, **BIG, **heads, "tie_word_embeddings": False}))
    return ["--model", "7b.json", "--gpu", "a100-80g", "--num-nodes", "1", "--num-gpus-per-node", "1",
            "--zero-stage", "3", "--precision", "bf16", "--max-length", "2048",
            "--offload-optimizer", "cpu", "--offload-param", "cpu"]  # fmt: skip


def test_a_host_that_is_too_small_is_told_with_reason_and_remedy(
    seven_billion: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *seven_billion, "--host-memory-gib", "64"]) == 0
    out = capsys.readouterr().out
    assert (
        "does not fit: 202.68 GiB of 64.00 GiB RAM on each host; when resuming, checkpoint being read" in out
    )
    assert "these would:\n  --method lora (trains adapters of rank 16 only)\n" in out
    found = report(capsys, *seven_billion, "--host-memory-gib", "64")
    host = found["memory"]["per_host"]
    assert (host["fits"], host["capacity_bytes"], host["peak_when"]) == (False, 64 * 2**30, "resuming")
    assert found["memory"]["per_gpu"]["fits"] is True
    assert found["memory"]["larger_changes"][0]["changes"] == ["--method lora"]
    assert not any(alternative["fits"] for alternative in found["alternatives"])


def test_a_host_that_can_train_but_not_resume_is_told_so(
    seven_billion: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *seven_billion, "--host-memory-gib", "180"]) == 0
    out = capsys.readouterr().out
    head = out.partition("\n\n")[0].splitlines()
    on_host = [line.split() for line in out.splitlines() if line.endswith("read, in each host's RAM)")]
    assert on_host
    assert all(float(line[3]) > 180 for line in on_host), on_host
    assert head[3] == (
        "trains, but cannot be resumed there: 202.68 GiB of 180.00 GiB RAM on each host when resuming"
    )


def test_check_names_each_choice_of_auto_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = "zero_optimization: {stage: auto, offload_optimizer: auto, offload_param: auto}"
    (here / "run.yaml").write_text(
        RUN.replace("zero_optimization: {stage: 2}", block).replace("cluster: {", "cluster: {num_nodes: 1, ")
    )
    assert main(["check", "run.yaml"]) == 0
    assert capsys.readouterr().out.count("zero_optimization: stage 1 fits: ") == 1


def test_a_host_elsewhere_is_unknown_until_it_is_said(
    seven_billion: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys, *seven_billion)["memory"]["per_host"]["fits"] is None
    assert report(capsys, *seven_billion, "--host-memory-gib", "512")["memory"]["per_host"]["fits"] is True
    assert main(["plan", *seven_billion, "--host-memory-gib", "-1"]) == 2
    assert "host_memory_gib" in capsys.readouterr().err


def test_on_cpus_here_this_machine_is_what_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny model fits any machine that runs these tests."""
    argv = ("--model", "model", "--gpu", "cpu", "--num-gpus-per-node", "2", "--precision", "fp32")
    host = report(capsys, *argv)["memory"]["per_host"]
    assert host["fits"] is True
    assert host["capacity_bytes"] > host["peak_bytes"]
    assert main(["plan", *argv]) == 0
    out = capsys.readouterr().out
    assert "RAM on each host" in out
    assert "on each device" not in out


@pytest.mark.parametrize(
    ("task", "models"),
    [
        ("sft", set()),
        ("dpo", {"reference"}),
        ("kto", {"reference"}),
        ("reward", set()),
        ("ppo", {"reference", "reward model", "critic: weights", "critic: optimizer states"}),
    ],
)
def test_other_tasks_bring_their_models(
    task: str, models: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, "--model", "model", "--gpu", "a100-80g", *FLAGS, "--task", task)
    names = {item["name"] for item in found["memory"]["per_gpu"]["items"]}
    others = {"reference", "reward model", "critic: weights", "critic: optimizer states"}
    assert names & others == models
    assert any("logits" in name for name in names) is (task != "reward")
    if "reference" in models and task != "ppo":
        found = report(capsys, "--model", "model", "--gpu", "a100-80g", *FLAGS, "--task", task,
                       "--precompute-ref-log-probs")  # fmt: skip
        assert "reference" not in {item["name"] for item in found["memory"]["per_gpu"]["items"]}


def test_what_surprises_is_said_once_with_a_value_to_paste(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", "model", "--gpu", "a100-80g", *FLAGS, "--method", "lora", "--lora-r", "4"]
    assert main(["plan", *argv]) == 0
    out = capsys.readouterr().out
    assert out.count("DeepSpeed allocates all 500,000,000 elements of reduce_bucket_size") == 1
    (note,) = (n for n in report(capsys, *argv)["memory"]["notes"] if n["key"])
    assert note["key"] == "zero_optimization.reduce_bucket_size"
    assert f"{note['key']}: {note['value']} takes" in out
    peaks = [
        report(capsys, *argv, *more)["memory"]["per_gpu"]["peak_bytes"]
        for more in ((), ("--set", f"{note['key']}={note['value']}"))
    ]
    assert peaks[0] - peaks[1] == note["saves_bytes"] > 0
