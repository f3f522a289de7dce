"""Reading a run file: every problem at once, with line, key and what to write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.config.load import load_run_file
from dslaunch.config.spec_optimizer import OPTIMIZER_TYPES
from dslaunch.core.errors import ConfigError, ConfigErrors
from tests.config.build import SMALL, load, only, problems

_FP32 = "fp32, in which optimizers compute, could not hold what they make of it"


def without(written: str) -> str:
    """The smallest file, with an empty line in place of the key that ``written`` gives anew."""
    key = written.partition(":")[0]
    return "".join("\n" if line.startswith(f"{key}:") else line for line in SMALL.splitlines(True))


def test_the_smallest_file() -> None:
    loaded = load(SMALL)
    assert loaded.spec.model.path == "org/model"
    assert loaded.spec.data.train[0].path == "org/data"
    assert loaded.positions["train_batch_size"] == "run.yaml:3"
    assert loaded.where("data.train[0].split") == "run.yaml:2: "
    assert loaded.where("optimizer.lr") == ""
    assert loaded.notes == ()


def test_all_problems_at_once_in_file_order() -> None:
    found = problems(
        """\
modle: org/model
data: {train: org/data, max_length: 1}
optimizer:
  lr: "1e-5"
  typ: AdamW
seed: 1.5
seed: 2
fp16: {hysteresis: -2}
zero_optimization: {stage: 7}
"""
    )
    assert [message for message, _ in found] == [
        "run.yaml:1: unknown key modle; did you mean model?",
        "run.yaml:2: data.max_length: 1 is not >= 2",
        'run.yaml:4: optimizer.lr: "1e-5" is text because it is quoted; a number is meant',
        "run.yaml:5: unknown key optimizer.typ; did you mean type?",
        "run.yaml:6: seed: 1.5 is not a whole number",
        "run.yaml:7: seed is given twice, first in line 6",
        "run.yaml:8: fp16.hysteresis: -2 is not > 0",
        "run.yaml:9: zero_optimization.stage: 7 is not one of auto, 0, 1, 2, 3",
    ]


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("optimizer: {lr: 1e-5}", "optimizer.lr", 1e-05),
        ("optimizer: {lr: 2E-4}", "optimizer.lr", 2e-04),
        ("optimizer: {params: {eps: 1e-8}}", "optimizer.params.eps", 1e-08),
        ("zero_optimization: {reduce_bucket_size: 5e8}", "zero_optimization.reduce_bucket_size", 500_000_000),
        (
            "zero_optimization: {allgather_bucket_size: 2e+8}",
            "zero_optimization.allgather_bucket_size",
            200_000_000,
        ),
        ("fp16: {loss_scale: 1e3}", "fp16.loss_scale", 1000.0),
        ("max_steps: 1e3", "max_steps", 1000),
    ],
)
def test_a_number_that_yaml_reads_as_text_is_read_with_a_note(written: str, key: str, value: float) -> None:
    loaded = load(SMALL + written + "\n")
    found = loaded.spec
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)
    (note,) = loaded.notes
    assert note.startswith(f"run.yaml:4: {key}: read ")


def test_a_large_float_with_an_exponent_is_a_whole_number_where_one_is_meant() -> None:
    assert (
        load(SMALL + "zero_optimization: {sub_group_size: 1.0e+9}\n").spec.zero_optimization.sub_group_size
        == 10**9
    )


def test_numbers_in_raw_overrides_are_numbers_too() -> None:
    loaded = load(
        SMALL + 'deepspeed:\n  aio: {block_size: 1e6}\n  x: "1e6"\n  list: [1e-3, a]\n  y: 5.0e+8\n'
    )
    found = loaded.spec.deepspeed
    assert found == {"aio": {"block_size": 1_000_000}, "x": "1e6", "list": (1e-3, "a"), "y": 500_000_000}
    assert type(found["y"]) is int
    assert loaded.notes == (
        "run.yaml: read as numbers, though they are text to YAML:"
        " deepspeed.aio.block_size 1e6 (line 5), deepspeed.list[0] 1e-3 (line 7)",
    )


def test_all_unquoted_numbers_of_a_file_are_one_note() -> None:
    text = SMALL + "deepspeed: {x: 1e6}\noptimizer: {lr: 1e-4, params: {eps: 1e-8}}\n"
    (note,) = load(text, "optimizer.params.weight_decay=1e-2").notes
    assert note.endswith(
        ": deepspeed.x 1e6 (line 4), optimizer.lr 1e-4 (line 5), optimizer.params.eps 1e-8 (line 5)"
    )
    assert load(SMALL, "deepspeed.x=1e6").notes == ()


@pytest.mark.parametrize(
    ("written", "message", "hint"),
    [
        (
            "seed: '8'",
            'seed: "8" is text because it is quoted; a whole number is meant',
            "remove the quotes: seed: 8",
        ),
        ("seed: yes", "seed: YAML reads yes as true, where a whole number is meant", "write a whole number"),
        ("seed: 010", "seed: 010 is not a whole number", None),
        ("seed: 1:30", "seed: 1:30 is not a whole number", None),
        ("seed: .inf", "seed: .inf is not a whole number", None),
        ("seed:", "seed: an empty value is not a whole number", None),
        ("seed: [1]", "seed: a list is not a whole number", None),
        ("name: no", "name: YAML reads no as false, where text is meant", 'write name: "no"'),
        ("name: 12", "name: 12 is a number, where text is meant", 'write name: "12"'),
        (
            "launch: {env: {A: on}}",
            "launch.env.A: YAML reads on as true, where text is meant",
            'write A: "on"',
        ),
        (
            "launch: {env: {A: 1.50}}",
            "launch.env.A: 1.50 is a number, where text is meant",
            'write A: "1.50"',
        ),
        (
            'fp16: {consecutive_hysteresis: "true"}',
            'fp16.consecutive_hysteresis: "true" is text because it is quoted; true or false is meant',
            "remove the quotes: consecutive_hysteresis: true",
        ),
        ("fp16: {loss_scale: auto}", "fp16.loss_scale: auto is not a number or one of dynamic", None),
        (
            "fp16: {loss_scale: 0}",
            None,
            "write dynamic; a fixed scale of 1 or less leaves gradients below 6e-8 at 0",
        ),
        (
            "cluster: {gpu: no}",
            "cluster.gpu: YAML reads no as false, where text or a list is meant",
            "name a device, such as a100 or cpu, or leave cluster.gpu out",
        ),
        ("optimizer: {lr: .nan}", "optimizer.lr: .nan is not a finite number", None),
        ("optimizer: {lr: 0}", "optimizer.lr: 0 is not > 0", None),
        ("optimizer: {lr: 1e38}", "optimizer.lr: 1e38 is not <= 1e+15", _FP32),
        (
            "optimizer: {params: {weight_decay: 1.0e+39}}",
            "optimizer.params.weight_decay: 1.0e+39 is not <= 1e+15",
            _FP32,
        ),
        (
            "optimizer: {params: {eps: 1e-50}}",
            "optimizer.params.eps: 1e-50 is not >= 1.2e-38",
            _FP32,
        ),
        (
            "optimizer: {type: adamw}",
            f"optimizer.type: adamw is not one of {', '.join(OPTIMIZER_TYPES)}",
            "did you mean AdamW?",
        ),
        ("optimizer: {params: {betas: 0.9}}", None, None),
        (
            "optimizer: AdamW",
            "optimizer: AdamW is not a mapping of keys to values",
            "write optimizer: {type: AdamW}",
        ),
        ("zero_optimization: 2", None, "write zero_optimization: {stage: 2}"),
        ("zero_optimization: true", "zero_optimization: true is not a mapping of keys to values", None),
        ("scheduler: [cosine]", None, "write scheduler: {type: ...}"),
        ("gradient_clipping: -1.0", "gradient_clipping: -1.0 is not >= 0", None),
        (
            "zero_optimization: {stage3_prefetch_bucket_size: 15099494.4}",
            "zero_optimization.stage3_prefetch_bucket_size: 15099494.4 is not a whole number",
            "write stage3_prefetch_bucket_size: 15099494",
        ),
        ("train_micro_batch_size_per_gpu: 0", "train_micro_batch_size_per_gpu: 0 is not > 0", None),
        (
            "zero_optimization: {allgather_bucket_size: 3}",
            "zero_optimization.allgather_bucket_size: 3 is not a multiple of 2, as 4 is",
            None,
        ),
        ("cluster: {master_port: 70000}", "cluster.master_port: 70000 is not <= 65535", None),
        ("adapter: {lora_dropout: 1}", "adapter.lora_dropout: 1 is not < 1", None),
        (
            "precision: float16",
            "precision: float16 is not one of auto, bf16, fp16, fp32",
            "did you mean fp16?",
        ),
        ("precision: bfloat16", None, "did you mean bf16?"),
        ("precision: 32", None, "did you mean fp32?"),
        ("optimizer: {type: adamw_torch}", None, "did you mean AdamW?"),
        ("data: {train: {path: d, format: sharegpt}}", None, "did you mean conversations?"),
        ("model: {path: m, attn_implementation: flash_attn}", None, "did you mean flash_attention_2?"),
        (
            "zero_optimization: {stage: 4}",
            "zero_optimization.stage: 4 is not one of auto, 0, 1, 2, 3",
            "stage 3 shards all there is; offload_optimizer and offload_param save more",
        ),
        ("fp16: true", None, "choose 16 bit with precision: fp16; this section holds its loss scale"),
        ("deepspeed: ds.json", None, "write the keys of the DeepSpeed JSON themselves here, as a mapping"),
        ("name: a/b", None, None),
        ("output: {report_to: tensorbord}", None, None),
    ],
)
def test_a_wrong_value_says_what_is_meant(written: str, message: str | None, hint: str | None) -> None:
    found, found_hint = only(without(written) + written + "\n")
    assert found.startswith("run.yaml:4: ")
    if message is not None:
        assert found == f"run.yaml:4: {message}"
    if hint is not None:
        assert found_hint == hint


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("train_micro_batch_size_per_gpu: 0.4", None),
        ("zero_optimization: {reduce_bucket_size: 0.4}", None),
        ("fp16: {min_loss_scale: 0.5}", None),
        ("fp16: {initial_scale_power: 32.6}", None),
        ("fp16: {initial_scale_power: 31.6}", "write initial_scale_power: 32"),
        ("gradient_accumulation_steps: 1.6", "write gradient_accumulation_steps: 2"),
    ],
)
def test_a_fraction_is_rounded_only_to_what_may_be_written(written: str, hint: str | None) -> None:
    found, found_hint = only(without(written) + written + "\n")
    assert found.endswith("is not a whole number")
    assert found_hint == hint


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("train_micro_batch_size_per_gpus: 4", "did you mean train_micro_batch_size_per_gpu?"),
        ("gradient_clipp1ng: 1", "did you mean gradient_clipping?"),
        ("zero_optimisation: {stage: 3}", "did you mean zero_optimization?"),
        ("learning_rate: 1", "it is called optimizer.lr here"),
        ("max_grad_norm: 1", "it is called gradient_clipping here"),
        ("bf16: {enabled: true}", "it is called precision here"),
        ("hostfile: x", "it is called cluster.hostfile here"),
        ("optimizer: {params: {lr: 1}}", "it is called optimizer.lr here"),
        ("optimizer: {params: {beta: [0, 0]}}", "did you mean betas?"),
        ("data.eval: x", "unknown key data.eval"),
        (
            "zero_optimization: {offload_param: {device: cpu, pin: true}}",
            "unknown key zero_optimization.offload_param.pin",
        ),
        ("fp16: {}\nadapter: {R: 8}", "did you mean r?"),
        ("qqq: 1", "unknown key qqq"),
        ("adapter: {lora_r: 8}", "it is called adapter.r here"),
        ("lora_rank: 8", "it is called adapter.r here"),
        ("save_steps: 8", "it is called output.save_steps here"),  # and not max_steps, which is near
        ("data: {max_seq_length: 8, train: d}", "it is called data.max_length here"),
        ("optimizer: {learning_rate: 1}", "it is called optimizer.lr here"),
        ("eval_dataset: x", "it is called data.eval here"),
        ("optimizer.lr: 1", "unknown key optimizer.lr"),
    ],
)
def test_an_unknown_key_names_the_right_one(written: str, message: str) -> None:
    found, hint = only(without(written) + written + "\n")
    assert message in found
    assert hint


def test_an_unknown_key_in_a_list_of_sources() -> None:
    text = "model: m\ndata:\n  train:\n    - a.jsonl\n    - path: b.jsonl\n      wieght: 2\n"
    assert only(text)[0] == "run.yaml:6: unknown key data.train[1].wieght; did you mean weight?"


def test_an_unknown_key_in_a_single_source() -> None:
    text = "model: m\ndata:\n  train:\n    path: b.jsonl\n    wieght: 2\n"
    assert only(text)[0] == "run.yaml:5: unknown key data.train.wieght; did you mean weight?"


def test_data_forms_mean_the_same() -> None:
    forms = ("a", "{path: a}", "[a]", "[{path: a}]")
    specs = [load(f"model: m\ndata: {{train: {form}}}\n").spec.data for form in forms]
    assert all(spec == specs[0] for spec in specs)


def test_one_name_or_a_list() -> None:
    spec = load(SMALL + "adapter: {target_modules: q_proj}\noutput: {report_to: wandb}\n").spec
    assert spec.adapter is not None
    assert spec.adapter.target_modules == ("q_proj",)
    assert spec.output.report_to == ("wandb",)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_byte_order_mark_and_crlf_hide_no_other_problem(tmp_path: Path, newline: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(("\ufeff" + SMALL + "name: übung\nseed: x\n").replace("\n", newline).encode())
    with pytest.raises(ConfigError) as caught:
        load_run_file(file)
    assert "run.yaml:4: name: übung is not letters" in caught.value.format()
    assert "run.yaml:5: seed: x is not a whole number" in caught.value.format()
    assert isinstance(caught.value, ConfigErrors)
    assert len(caught.value.problems) == 3
    assert caught.value.problems[0].message == f"{file}:1: a byte order mark (BOM) stands before the text"


@pytest.fixture
def python_depth() -> Iterator[None]:
    """Python's own recursion limit, which a library that another test needs may have raised."""
    raised = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(raised)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"a: 1\nb: \xff\n", "run.yaml:2: not UTF-8 text"),
        (b"a:\n\tb: 1\n\tc: 2\n", "run.yaml:2: a tab indents lines 2, 3; YAML wants spaces"),
        (b"a: {b: 1\nc: 2\n", "run.yaml:"),
        (b"- 1\n", "run.yaml:1: a run file is a mapping"),
        (b"a: 1\n---\nb: 1\n", "a second document begins"),
        (b"a: b\x00\n", "run.yaml:1: not readable as YAML"),
        (b"a: &x [*x]\n", "refers to the mapping or list that it is in"),
        (b"[" * 5000, "nest"),  # libyaml and PyYAML itself have each their own words for it
        (b"a: " + b"[" * 900 + b"]" * 900, "nested too deeply"),
    ],
)
def test_text_that_is_no_run_file(tmp_path: Path, python_depth: None, data: bytes, part: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_run_file(file)
    assert part in caught.value.message
    assert "\n" not in caught.value.message


def test_aliases_that_grow_without_bound_are_stopped() -> None:
    lines = ["x-a: &a [" + "1," * 30 + "]"]
    for before, name in zip("abcde", "bcdef", strict=True):
        lines.append(f"x-{name}: &{name} [" + f"*{before}," * 30 + "]")
    assert "aliases are expanded" in only("\n".join(lines))[0]


def test_a_tag_runs_no_code() -> None:
    found = problems(SMALL + "name: !!python/object/apply:os.getcwd []\nseed: !seed 3\n")
    assert found[0][0] == "run.yaml:4: name: the tag 'python/object/apply:os.getcwd' is not supported"
    assert "run.yaml:5: seed: the tag '!seed' is not supported" in [message for message, _ in found]


def test_anchors_merge_and_own_keys_win() -> None:
    text = SMALL + "x-common: &common {lr: 1.0e-3, type: SGD}\noptimizer:\n  <<: *common\n  type: AdamW\n"
    spec = load(text).spec
    assert (spec.optimizer.lr, spec.optimizer.type) == (1e-3, "AdamW")


def test_a_missing_file_names_a_near_one(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(SMALL)
    with pytest.raises(ConfigError, match="run file not found") as caught:
        load_run_file(tmp_path / "quickstrat.yaml")
    assert caught.value.hint == f"did you mean {tmp_path / 'quickstart.yaml'}?"
    for folder, hint in (
        ("a", f"did you mean {tmp_path / 'a/mine.yaml'}?"),
        ("b", None),
    ):  # of two it is neither
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.yaml").touch()
        with pytest.raises(ConfigError, match="run file not found") as caught:
            load_run_file(tmp_path / "mine.yaml")
        assert caught.value.hint == hint


def test_a_missing_key_names_the_file() -> None:
    found = [message for message, _ in problems("seed: 1\n")]
    assert found == ["run.yaml: model is missing", "run.yaml: data is missing"]
    assert [m for m, _ in problems("optimizer: {}\n")] == found


@pytest.mark.parametrize("line", ["modle: m", "model_name_or_path: m"])
def test_a_misspelt_key_is_not_reported_as_missing_too(line: str) -> None:
    found, _ = only(f"{line}\ndata: {{train: d}}\n")
    assert found.startswith(f"run.yaml:1: unknown key {line.partition(':')[0]};")


def test_what_the_hint_says_takes_the_byte_order_mark_away(tmp_path: Path) -> None:
    file = tmp_path / "my run.yaml"
    file.write_bytes(("\ufeff" + SMALL).encode())
    with pytest.raises(ConfigError) as caught:
        load_run_file(file)
    assert caught.value.hint is not None
    subprocess.run(["bash", "-c", caught.value.hint.partition("or: ")[2]], check=True)
    assert file.read_bytes() == SMALL.encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: 5\ndata: {train: d}\n", "run.yaml:1: model: 5 is a number, where text or a mapping"),
        ("model: [a]\ndata: {train: d}\n", "run.yaml:1: model: a list is not text or a mapping"),
        ("model: m\ndata: {train: [5]}\n", "run.yaml:2: data.train[0]: 5 is a number, where text"),
    ],
)
def test_where_text_stands_for_a_mapping_the_message_says_so(text: str, message: str) -> None:
    assert only(text)[0].startswith(message)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("model: {path: m, device_map: auto}\n", "leave it out: DeepSpeed places the weights"),
        ("model: {path: m, low_cpu_mem_usage: true}\n", "leave it out: at zero_optimization.stage 3"),
        ("adapter: {load_in_4bit: true}\n", "write load_in_4bit in the section model.quantization_config"),
        ("adapter: lora\n", "write adapter: {type: lora}"),
        ("ddp_timeout: 60\n", "write ddp_timeout_s in the section launch"),
    ],
)
def test_what_other_tools_have_says_what_to_do_here(text: str, hint: str) -> None:
    found = [said for _, said in problems(text) if said and said.startswith(hint)]
    assert found, problems(text)
