"""From a spec and facts to a plan: values, reasons, and what cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dslaunch.config.facts import PathFact
from dslaunch.config.origins import plan_values
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.plan import ContainerPlan, Origin
from tests.config.build import SMALL, gpus, plan_of, resolved

DIRECTORY = PathFact("directory", "/models/m")


def problems(text: str, **facts: Any) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        plan_of(text, **facts)
    return [problem.message for problem in caught.value.problems]


def test_defaults() -> None:
    plan = plan_of(SMALL)
    assert (plan.name, plan.task, plan.seed, plan.zero_stage) == ("run", "sft", 42, 2)
    assert (plan.optimizer.type, plan.optimizer.lr, plan.gradient_clipping) == ("AdamW", 2e-5, 1.0)
    assert (plan.num_train_epochs, plan.max_steps, plan.adapter, plan.fp16) == (1.0, None, None, None)
    assert (plan.scheduler.type, plan.scheduler.warmup_ratio) == ("cosine", 0.03)
    assert plan.launch.argv == (
        "/py/bin/python",
        "-m",
        "dslaunch.train.worker",
        "--plan",
        "/runs/r/plan.json",
    )
    assert (plan.launch.run_dir, plan.launch.cwd) == ("/runs/r", "/work dir")


def test_every_value_has_an_origin_and_none_is_left_over() -> None:
    for text in (
        SMALL,
        SMALL + "adapter: {r: 8}\nfp16: {}\nprecision: fp16\ncluster: {gpu: a100, num_gpus_per_node: 1}\n",
    ):
        plan = plan_of(text)
        assert set(plan.origins) == {key for key, _ in plan_values(plan)}
        assert all(origin.reason and origin.source for origin in plan.origins.values())


def test_origins_say_where_a_value_was_written() -> None:
    text = SMALL + "optimizer: {lr: 1.0e-3}\nadapter: {type: dora}\nzero_optimization:\n  stage: 1\n"
    origins = plan_of(text, "seed=7").origins
    source = {key: origin.source for key, origin in origins.items()}
    assert source["model.path"] == "run.yaml:1"
    assert source["data.train[0].path"] == "run.yaml:2"
    assert source["batch.train_batch_size"] == "run.yaml:3"
    assert source["optimizer.lr"] == source["optimizer.params.lr"] == "run.yaml:4"
    assert source["adapter.type"] == "run.yaml:5"
    assert source["adapter.r"] == "default"
    assert source["zero_stage"] == "run.yaml:7"
    assert source["seed"] == "--set"
    assert source["batch.gradient_accumulation_steps"] == "derived"
    assert "emulated" in origins["precision"].reason


def test_the_learning_rate_depends_on_the_adapter() -> None:
    assert plan_of(SMALL + "adapter: {}\n").optimizer.lr == 2e-4
    assert plan_of(SMALL + "adapter: {}\noptimizer: {lr: 3}\n").optimizer.lr == 3.0


@pytest.mark.parametrize(
    ("written", "fact", "kind", "path"),
    [
        ("org/model", PathFact("missing", "/b/org/model"), "hub", "org/model"),
        ("gpt2", PathFact("missing", "/b/gpt2"), "hub", "gpt2"),
        ("./m", DIRECTORY, "directory", "/models/m"),
        ("m", DIRECTORY, "directory", "/models/m"),
        ("m.gguf", PathFact("file", "/models/m.gguf"), "gguf", "/models/m.gguf"),
        ("M.GGUF", PathFact("file", "/models/M.GGUF"), "gguf", "/models/M.GGUF"),
    ],
)
def test_what_a_model_is(written: str, fact: PathFact, kind: str, path: str) -> None:
    text = SMALL.replace("org/model", written)
    model = plan_of(text, paths={"model.path": fact}).model
    assert (model.kind, model.path) == (kind, path)


@pytest.mark.parametrize(
    ("written", "fact", "part"),
    [
        ("./m", PathFact("missing", "/b/m", True, "/b/mm"), "there is no ./m"),
        ("m.gguf", PathFact("missing", "/b/m.gguf"), "there is no m.gguf"),
        ("M.GGUF", PathFact("missing", "/b/M.GGUF"), "there is no M.GGUF"),
        ("/m", PathFact("missing", "/m"), "there is no /m"),
        ("~/m", PathFact("missing", "/home/m"), "there is no ~/m"),
        ("a/b/c", PathFact("missing", "/b/a/b/c"), "there is no a/b/c"),
        ("models/m", PathFact("missing", "/b/models/m", True, "/b/models/n"), "there is no models/m"),
        ("m.bin", PathFact("file", "/b/m.bin"), "m.bin is a file, but not a .gguf one"),
        ("./m", PathFact("directory", "/b/m", fault="holds no config.json"), "/b/m holds no config.json"),
    ],
)
def test_a_path_that_is_not_there_is_never_taken_for_a_hub_id(
    written: str, fact: PathFact, part: str
) -> None:
    (problem,) = problems(SMALL.replace("org/model", written), paths={"model.path": fact})
    assert problem == f"run.yaml:1: model.path: {part}"


WIDE = SMALL + 'precision: bf16\nfp32_modules: ["*norm*", lm_head]\n'


def test_modules_in_fp32_are_in_the_plan_and_have_no_effect_in_fp32() -> None:
    assert plan_of(WIDE, inventory=gpus("h100")).fp32_modules == ("*norm*", "lm_head")
    _, notes = resolved(WIDE.replace("bf16", "fp32"), inventory=gpus("h100"))
    assert "fp32_modules *norm*, lm_head: the whole model is in fp32 already" in notes


def test_modules_in_fp32_without_deepspeed() -> None:
    (problem,) = problems(WIDE + "engine: torch\n", inventory=gpus("h100"))
    assert problem.startswith("run.yaml:5: fp32_modules does not act with engine torch")


@pytest.mark.parametrize(
    ("offload", "part"),
    [
        ("stage: 3, offload_param: cpu", "with zero_optimization.offload_param: DeepSpeed keeps"),
        ("stage: 3, offload_optimizer: {device: nvme, nvme_path: /tmp}", "offload_optimizer nvme: not known"),
    ],
)
def test_modules_in_fp32_where_deepspeed_cannot(offload: str, part: str) -> None:
    found = problems(WIDE + f"zero_optimization: {{{offload}}}\n", inventory=gpus("h100"))
    assert any("fp32_modules with" in problem and part in problem for problem in found)


def test_the_nearest_path_is_in_the_hint() -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan_of(
            SMALL.replace("org/data", "trian.jsonl"),
            paths={"data.train[0].path": PathFact("missing", "/b/trian.jsonl", False, "/b/train.jsonl")},
        )
    assert caught.value.problems[0].hint == "did you mean /b/train.jsonl?"


@pytest.mark.parametrize("name", ["modell", "Model", "mdoel"])
def test_a_typing_mistake_is_never_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan_of(
            SMALL.replace("org/model", name),
            paths={"model.path": PathFact("missing", f"/b/{name}", False, "/b/model")},
        )
    (problem,) = caught.value.problems
    assert problem.message == f"run.yaml:1: model.path: there is no {name} here, but there is /b/model"
    assert f"owner/{name}" in (problem.hint or "")


@pytest.mark.parametrize(("name", "nearest"), [("gpt2", "/b/gpt2-out"), ("modles/llama", "/b/models/llama")])
def test_a_hub_id_that_is_like_a_path_gives_a_note(name: str, nearest: str) -> None:
    paths = {"model.path": PathFact("missing", f"/b/{name}", False, nearest)}
    plan, notes = resolved(SMALL.replace("org/model", name), paths=paths)
    assert plan.model.kind == "hub"
    assert f"run.yaml:1: model.path: {name} is taken for a hub id; there is also {nearest}" in notes


def test_the_interpreter() -> None:
    text = SMALL + "launch: {python: %s}\n"
    there = {"launch.python": PathFact("file", "/base/venv/bin/python")}
    assert plan_of(text % "venv/bin/python", paths=there).launch.argv[0] == "/base/venv/bin/python"
    assert plan_of(text % "python3.11").launch.argv[0] == "python3.11"
    assert problems(text % "venv/bin/pyton") == ["run.yaml:4: launch.python: there is no file venv/bin/pyton"]


def test_a_container() -> None:
    text = SMALL + "launch: {container: {%s}, python: %s}\n"
    image = {"launch.container.image": PathFact("missing", "/base/x.sif")}
    launch = plan_of(text % ("runtime: apptainer, image: x.sif, args: --rocm", "null"), paths=image).launch
    assert launch.argv[0] == "python3"
    assert launch.container == ContainerPlan(runtime="apptainer", image="/base/x.sif", args=("--rocm",))
    launch = plan_of(text % ("runtime: docker, name: box", "/opt/py")).launch
    assert (launch.argv[0], launch.container) == ("/opt/py", ContainerPlan(runtime="docker", name="box"))
    assert problems(text % ("runtime: docker, image: x", "null"), paths=image) == [
        "run.yaml:4: launch.container.name is missing",
        "run.yaml:4: launch.container.image is not for docker",
    ]


def test_evaluation_steps_need_something_to_evaluate_on() -> None:
    text = SMALL + "output: {eval_steps: 5}\n"
    assert problems(text) == ["run.yaml:4: output.eval_steps: there is no data.eval to evaluate on"]
    assert plan_of(text.replace("org/data", "org/data, eval: org/e")).output.eval_steps == 5


def test_the_loss_scale_cannot_start_below_its_least() -> None:
    text = SMALL + "precision: fp16\nfp16: {initial_scale_power: 4, min_loss_scale: %d}\n"
    gpu = gpus("a100")
    assert problems(text % 17, inventory=gpu) == [
        "run.yaml:5: fp16.min_loss_scale 17 is above the first scale, 2^4 = 16"
    ]
    assert plan_of(text % 16, inventory=gpu).fp16 is not None


def test_a_static_scale_with_keys_of_a_dynamic_one_is_a_contradiction() -> None:
    text = SMALL + "precision: fp16\nfp16:\n  loss_scale: 128\n  hysteresis: 2\n  min_loss_scale: 1\n"
    why = "is for a dynamic scale, and fp16.loss_scale is 128, which never moves"
    assert problems(text, inventory=gpus("v100")) == [
        f"run.yaml:7: fp16.hysteresis {why}",
        f"run.yaml:8: fp16.min_loss_scale {why}",
    ]
    assert plan_of(text, "fp16.loss_scale=dynamic", inventory=gpus("v100")).fp16 is not None


def test_the_fp16_block_is_explained_in_words() -> None:
    origins = plan_of(SMALL + "precision: fp16\nfp16: {hysteresis: 3}\n", inventory=gpus("v100")).origins
    assert origins["fp16.initial_scale_power"] == Origin(reason="starts at 2^16 = 65536", source="default")
    assert origins["fp16.hysteresis"] == Origin(
        reason="the first 2 overflows only skip their step, later ones halve the scale too",
        source="run.yaml:5",
    )
    assert "stops the run" in origins["fp16.min_loss_scale"].reason


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_stage_0_in_half_precision_names_stage_1(precision: str) -> None:
    text = SMALL + f"precision: {precision}\nzero_optimization: {{stage: %d}}\n"
    said = [note for note in resolved(text % 0, inventory=gpus("a100"))[1] if "ZeRO stage 0" in note]
    assert len(said) == 1
    assert said[0].startswith(precision)
    assert "stage 1, which computes the same" in said[0]
    assert not any("ZeRO stage 0" in note for note in resolved(text % 1, inventory=gpus("a100"))[1])


def test_a_wrong_hostfile_does_not_hide_the_rest() -> None:
    lines = [ConfigError("hosts:1:1: bad"), ConfigError("hosts:2:1: worse")]
    text = SMALL + "seed: 1\nzero_optimization: {sub_group_size: 5}\ncluster: {hostfile: hosts}\n"
    found = problems(text, hostfile_problem=ConfigErrors(lines))
    assert found == [
        "run.yaml:5: zero_optimization.sub_group_size acts at stage 3 only; the stage is 2,"
        " where DeepSpeed ignores it",
        "hosts:1:1: bad",
        "hosts:2:1: worse",
    ]


def test_data_sources() -> None:
    sources = "[{path: a.jsonl, weight: 1}, {path: org/d, split: all, weight: 3}]"
    text = f"model: m\ntrain_batch_size: 2\ndata: {{train: {sources}}}\n"
    plan = plan_of(text, paths={"data.train[0].path": PathFact("file", "/d/a.jsonl")})
    assert [(s.path, s.kind, s.split, s.weight) for s in plan.data.train] == [
        ("/d/a.jsonl", "file", "train", 1.0),
        ("org/d", "hub", "all", 3.0),
    ]


@pytest.mark.parametrize("written", ["{path: a.jsonl, split: y}", "[{path: a.jsonl, split: y}]"])
def test_a_split_of_a_file_is_refused(written: str) -> None:
    text = f"model: m\ntrain_batch_size: 2\ndata: {{train: {written}}}\n"
    fact = PathFact("file", "/d/a.jsonl")
    found = problems(text, paths={"data.train[0].path": fact})
    assert found == ["run.yaml:3: data.train[0].split has no effect on a file"]


def test_a_file_that_is_not_read_as_data_is_refused_with_what_is() -> None:
    text = "model: m\ntrain_batch_size: 2\ndata:\n  train: org/d\n  eval:\n    - ./x.csv\n"
    fact = PathFact("file", "/d/x.csv", fault="has none of the endings that are read as data")
    with pytest.raises(ConfigErrors) as caught:
        plan_of(text, paths={"data.eval[0].path": fact})
    (problem,) = caught.value.problems
    expected = "run.yaml:6: data.eval[0].path: ./x.csv has none of the endings that are read as data"
    assert problem.message == expected
    assert problem.hint == (
        "write it as .jsonl, .ndjson or .json (each also .gz) or .parquet;"
        " data.eval[0].format names the keys of its records, not its ending"
    )


def test_data_without_an_owner_is_taken_for_a_hub_id_aloud() -> None:
    notes = resolved("model: m\ndata: {train: squad}\ntrain_batch_size: 8\n")[1]
    assert "run.yaml:2: data.train[0].path: there is no squad here; it is taken for a hub id" in notes


def test_a_mistyped_directory_is_seen_to_be_taken_for_a_hub_id() -> None:
    notes = resolved(SMALL.replace("org/model", "models/smol").replace("org/data", "dat/chat"))[1]
    assert [note for note in notes if "hub id" in note] == [
        "run.yaml:1: model.path: there is no models/smol here; it is taken for a hub id",
        "run.yaml:2: data.train[0].path: there is no dat/chat here; it is taken for a hub id",
    ]


def test_an_unknown_device_is_reported_where_it_was_named() -> None:
    found = problems(SMALL + "seed: 1\ncluster: {num_gpus_per_node: 2, gpu: a1000}\n")
    assert found == ["run.yaml:5: cluster.gpu: unknown device 'a1000'"]


def test_all_semantic_problems_at_once() -> None:
    found = problems(
        """\
model: {path: ./none, revision: main, chat_template: t.jinja}
data:
  train: [{path: org/a, weight: 1}, org/b]
  eval: {path: org/c, weight: 1}
zero_optimization: {stage: 0, stage3_max_live_parameters: 5, allgather_bucket_size: 8}
optimizer: {type: SGD, params: {betas: [0.9, 0.9], nesterov: true}}
scheduler: {warmup_steps: 1, warmup_ratio: 0.1}
num_train_epochs: 1
max_steps: 2
train_batch_size: 9
cluster: {num_gpus_per_node: 2, master_addr: a b}
precision: fp16
launch: {env: {HF_TOKEN: secret, "A B": x, RANK: "0"}, secret_env: [1A]}
"""
    )
    assert found == [
        "run.yaml:1: model.path: there is no ./none",
        "run.yaml:1: model.chat_template: there is no file t.jinja",
        "run.yaml:3: data.train[1] has no weight, but other sources have one",
        "run.yaml:4: data.eval[0].weight: held-out data is not mixed",
        "run.yaml:5: zero_optimization.allgather_bucket_size acts at stages 1, 2 only; the stage is 0,"
        " where DeepSpeed ignores it",
        "run.yaml:5: zero_optimization.stage3_max_live_parameters acts at stage 3 only; the stage is 0,"
        " where DeepSpeed ignores it",
        "run.yaml:6: optimizer.params.betas: SGD does not take it",
        "run.yaml:6: optimizer.params.nesterov needs momentum > 0 and dampening 0",
        "run.yaml:7: scheduler.warmup_steps and scheduler.warmup_ratio are both given",
        "run.yaml:9: max_steps and num_train_epochs are both given",
        "run.yaml:10: train_batch_size 9 is not a multiple of world_size 2",
        "run.yaml:11: cluster.master_addr: 'a b' is no host name or address",
        "run.yaml:12: precision fp16: this CPU has neither AVX512-FP16 nor AMX-FP16, so DeepSpeed refuses it",
        "run.yaml:13: launch.env.HF_TOKEN: the name says that it is a secret, and a run file is no place"
        " for one",
        "run.yaml:13: launch.env.A B: 'A B' is no name of an environment variable",
        "run.yaml:13: launch.env.RANK: RANK is set by the launcher for each rank",
        "run.yaml:13: launch.secret_env[0]: '1A' is no name of an environment variable",
    ]


def test_a_secret_is_not_in_the_message() -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan_of(SMALL + "launch: {env: {WANDB_API_KEY: hunter2}}\n")
    assert "hunter2" not in caught.value.format()


def test_a_url_with_a_password_is_a_secret() -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan_of(SMALL + "launch: {env: {HTTPS_PROXY: 'http://bob:hunter2@proxy:3128'}}\n")
    text = caught.value.format()
    assert "launch.env.HTTPS_PROXY: the URL holds a password, and a run file is no place for one" in text
    assert "write launch.secret_env: [HTTPS_PROXY]" in text
    assert "hunter2" not in text
    assert plan_of(SMALL + "launch: {env: {HTTPS_PROXY: 'http://proxy:3128'}}\n").launch.env


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "MY_TOKENS", "PASSWORDLESS"])
def test_names_that_only_look_like_secrets(name: str) -> None:
    assert plan_of(SMALL + f"launch: {{env: {{{name}: x}}}}\n").launch.env == {name: "x"}


def test_environment_values_are_kept_byte_for_byte() -> None:
    text = SMALL + 'launch: {env: {A: "$HOME \\"x\\"; %n\\n\\t-é", B: "", C: ""}}\n'
    assert plan_of(text).launch.env == {"A": '$HOME "x"; %n\n\t-é', "B": "", "C": ""}


def test_local_gpus_are_the_slots() -> None:
    plan = plan_of(SMALL, inventory=gpus("a100", "a100"))
    assert (plan.precision, plan.launch.device_type, plan.batch.world_size) == ("bf16", "cuda", 2)
    assert plan.launch.devices == ("a100",)
    assert "torch_adam" not in plan.optimizer.params


def test_auto_precision_for_unseen_nodes_asks_for_the_device() -> None:
    text = SMALL + "cluster: {num_nodes: 2, num_gpus_per_node: 2}\n"
    (problem,) = problems(text)
    assert "precision auto: which devices the run is for is not known here" in problem
    assert plan_of(text + "precision: bf16\n").precision == "bf16"


def test_notes_say_what_was_chosen() -> None:
    _, notes = resolved(SMALL + "optimizer: {lr: 1e-4}\nfp16: {}\n")
    text = "\n".join(notes)
    assert "optimizer.lr: read 1e-4 as the number 0.0001" in text
    assert "train_micro_batch_size_per_gpu 8 (largest power of two" in text
    assert "precision fp32: the CPU has neither" in text
    assert "fp16 is not used: precision is fp32" in text


def test_bf16_weights_in_fp16_are_warned_of() -> None:
    _, notes = resolved(SMALL, inventory=gpus("v100"), model_dtype="bfloat16")
    assert any("the model's weights are bfloat16: in fp16" in note for note in notes)
    _, notes = resolved(SMALL, inventory=gpus("a100"), model_dtype="bfloat16")
    assert not any("bfloat16" in note for note in notes)


def test_a_constant_schedule_has_no_warmup_unless_asked() -> None:
    assert plan_of(SMALL + "scheduler: {type: constant}\n").scheduler.warmup_ratio == 0.0
    warm = plan_of(SMALL + "scheduler: {type: constant, warmup_steps: 5}\n").scheduler
    assert (warm.warmup_steps, warm.warmup_ratio) == (5, None)


def test_a_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_of(SMALL).seed = 3  # type: ignore[misc]


def test_an_empty_list_of_data_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        plan_of("model: m\ndata: {train: []}\ntrain_batch_size: 1\n")


def test_a_watch_that_would_stop_the_descent_of_every_scale() -> None:
    text = (
        SMALL + "precision: fp16\nzero_optimization: {stage: 1}\ncluster: {gpu: v100, num_gpus_per_node: 8}\n"
    )
    with pytest.raises(ConfigError, match=r"run.yaml:\d+: watch.max_skipped_in_a_row 18: the descent"):
        plan_of(text + "watch: {max_skipped_in_a_row: 18}\n")
    assert plan_of(text + "watch: {max_skipped_in_a_row: 19}\n").watch.max_skipped_in_a_row == 19
    with pytest.raises(ConfigError, match=r"run.yaml:\d+: watch.detect_anomaly is for tracing"):
        plan_of(text + "watch: {detect_anomaly: true}\n")
    traced = plan_of(text + "watch: {detect_anomaly: true, on_nonfinite: trace}\n").watch
    assert traced.detect_anomaly and traced.on_nonfinite == "trace"
    static = text + "fp16: {loss_scale: 128}\nwatch: {max_skipped_in_a_row: 3}\n"
    assert plan_of(static).watch.max_skipped_in_a_row == 3


def test_fp16_on_a_cpu_may_be_emulated_and_the_plan_says_so() -> None:
    text = SMALL + "precision: fp16\ncluster: {gpu: cpu, num_gpus_per_node: 2}\n"
    with pytest.raises(ConfigError, match="precision fp16: this CPU has neither") as caught:
        plan_of(text)
    assert "allow_emulated_fp16: true" in (caught.value.hint or "")
    plan = plan_of(text + "allow_emulated_fp16: true\n")
    assert plan.allow_emulated_fp16 and plan.fp16 is not None
    assert plan.origins["precision"].reason.startswith("emulated on the CPU (allow_emulated_fp16)")
    plan = plan_of(text + "allow_emulated_fp16: true\n", "precision=bf16")
    assert plan.origins["precision"].reason != "emulated"


def test_an_untested_deepspeed_is_allowed_by_name_and_watch_limits_reach_the_plan() -> None:
    text = SMALL
    assert plan_of(text).allow_untested_deepspeed is None
    plan = plan_of(
        text + "allow_untested_deepspeed: 0.20.1\nwatch: {max_nonfinite_losses_in_a_row: 2,"
        " max_unchanged_in_a_row: 7, saw_tooth_falls: 4, saw_tooth_max_skipped_fraction: 0.5}\n"
    )
    assert plan.allow_untested_deepspeed == "0.20.1"
    assert (plan.watch.max_nonfinite_losses_in_a_row, plan.watch.max_unchanged_in_a_row) == (2, 7)
    assert (plan.watch.saw_tooth_falls, plan.watch.saw_tooth_max_skipped_fraction) == (4, 0.5)
    with pytest.raises(ConfigError, match="is a number, where text is meant"):
        plan_of(text + "allow_untested_deepspeed: 0.20\n")
