"""New tokens: tokenizer, embedding, head and config agree at every stage, and in what is exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dslaunch.core.errors import ConfigError
from dslaunch.core.plan import ModelPlan, RunPlan
from tests.support.plans import LORA, make_plan, read_rows, save_plan
from tests.support.ranks import check_ranks, run_ranks
from tests.support.tiny import make_tiny_model_dir, make_tiny_tokenizer
from tests.train.rank_quantised import FOUR

SCRIPT = Path(__file__).with_name("rank_plans.py")
TOOL, END = "<|tool|>", "<|end_of_tool|>"
ROWS = replace(LORA, trainable_token_indices=(272, 279))  # of "house"
KINDS: dict[str, dict[str, Any]] = {
    "full-0": {"model_dir": "untied", "zero_stage": 0},
    "full-3": {"model_dir": "untied", "zero_stage": 3},
    "lora-1": {"model_dir": "tied", "zero_stage": 1, "adapter": LORA},
    "lora-3": {"model_dir": "tied", "zero_stage": 3, "adapter": LORA},
    "qlora-3": {
        "model_dir": "untied", "zero_stage": 3, "adapter": LORA, "precision": "bf16",
        "model": {"quantization_config": FOUR},
    },
    # The model has rows to spare, so that embedding and head stay as ZeRO has partitioned them.
    "spare-1": {"model_dir": "spare", "zero_stage": 1, "adapter": ROWS},
    "spare-3": {"model_dir": "spare", "zero_stage": 3, "adapter": ROWS},
}  # fmt: skip


def write_tools(path: Path) -> Path:
    answers = [f"{TOOL}find {i}{END} house {i}" for i in range(12)]
    turns = [
        [{"role": "user", "content": f"Where is {i}?"}, {"role": "assistant", "content": answer}]
        for i, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps({"messages": t}) + "\n" for t in turns))
    return path


@pytest.fixture(scope="module")
def runs(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunPlan]:
    root = tmp_path_factory.mktemp("tokens")
    for name, vocabulary in (("tied", 384), ("untied", 384), ("spare", 400)):
        make_tiny_model_dir(root / name, tie=name == "tied", layers=1, vocab_size=vocabulary)
    data, plans = write_tools(root / "tools.jsonl"), {}
    for name, kind in KINDS.items():
        model = {"new_tokens": (TOOL, END), **kind.get("model", {})}
        settings = {**kind, "model_dir": root / kind["model_dir"], "model": model, "lr": 1e-2}
        plans[name] = make_plan(root / name, data=data, accumulation=1, max_steps=3, **settings)
    results = run_ranks(
        [SCRIPT, *(str(save_plan(plan)) for plan in plans.values())], world_size=2, timeout_s=240
    )
    check_ranks(results)
    assert "2 new tokens, ids 384 to 385, begin at the mean of the others" in results[0].stderr
    assert ", 2 rows of embed_tokens, 2 rows of lm_head" in results[0].stderr  # where they are not one
    return plans


def losses(plan: RunPlan) -> list[float]:
    return [row["loss"] for row in read_rows(Path(plan.launch.run_dir) / "metrics.jsonl", "train")]


def logits(model: Any, tokenizer: Any) -> Any:
    import torch

    ids = torch.tensor([tokenizer(f"a {TOOL}find{END} b")["input_ids"]])
    with torch.no_grad():
        return model.eval().float()(input_ids=ids).logits


@pytest.mark.parametrize(
    ("one", "other"), [("full-0", "full-3"), ("lora-1", "lora-3"), ("spare-1", "spare-3")]
)
def test_partitioned_or_not_the_training_is_the_same(runs: dict[str, RunPlan], one: str, other: str) -> None:
    assert losses(runs[one]) == pytest.approx(losses(runs[other]), rel=1e-4)
    assert losses(runs[one])[-1] < losses(runs[one])[0] - 0.1


def test_rows_are_trained_where_the_embedding_stays_partitioned(
    runs: dict[str, RunPlan], tmp_path: Path
) -> None:
    """Those that are named and those of new tokens, of the embedding; of new ones in the head."""
    from safetensors.torch import load_file

    from dslaunch.train.export import export_checkpoint

    found = []
    for name in ("spare-1", "spare-3"):
        export_checkpoint(Path(runs[name].launch.run_dir), tmp_path / name)
        adapter = load_file(tmp_path / name / "adapter_model.safetensors")
        rows = {key: value for key, value in adapter.items() if "token_adapter" in key}
        assert sorted(len(value) for value in rows.values()) == [2, 4]
        found.append(rows)
    base = load_file(Path(runs["spare-1"].model.path) / "model.safetensors")
    for key, value in found[0].items():
        assert found[1][key].allclose(value, atol=1e-4)
        if "embed_tokens" in key:
            assert not value[:2].allclose(base["model.embed_tokens.weight"][[272, 279]], atol=1e-3)


@pytest.mark.parametrize("name", ["full-0", "full-3"])
def test_a_whole_model_is_exported_with_all_its_rows(
    runs: dict[str, RunPlan], name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dslaunch.train.export import export_checkpoint

    export_checkpoint(Path(runs[name].launch.run_dir), tmp_path / "out")
    model, tokenizer = (
        kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert model.config.vocab_size == len(tokenizer) == 386 == model.lm_head.weight.shape[0]
    assert tokenizer(TOOL + END)["input_ids"] == [384, 385]
    assert tokenizer.decode([384, 5, 385], skip_special_tokens=True) == tokenizer.decode([5])
    rows = model.model.embed_tokens.weight
    assert not rows[384].equal(rows[385])  # both began at the mean, and were trained


@pytest.mark.parametrize("name", ["lora-1", "lora-3", "qlora-3"])
def test_under_an_adapter_their_rows_alone_are_trained(
    runs: dict[str, RunPlan], name: str, tmp_path: Path
) -> None:
    """And plain peft, which grows the base by the tokenizer, has the model that was merged."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from dslaunch.train.export import export_checkpoint
    from dslaunch.train.generate import answer_prompts, load_generator

    plan = runs[name]
    source, adapter, out = Path(plan.launch.run_dir), tmp_path / "adapter", tmp_path / "merged"
    export_checkpoint(source, adapter)
    report = export_checkpoint(source, out, merge=True)
    assert report.max_logit_drift is not None and report.max_logit_drift < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(out)
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.config.vocab_size == len(tokenizer) == 386
    assert merged.config.tie_word_embeddings == (name != "qlora-3")
    base = AutoModelForCausalLM.from_pretrained(plan.model.path, dtype=merged.dtype)
    for module in ("model.embed_tokens", "lm_head"):
        rows, before = (m.get_submodule(module).weight for m in (merged, base))
        assert rows[:384].equal(before)
        assert not torch.allclose(rows[384], rows[385], atol=1e-3)
    more: dict[str, Any] = {}
    if name == "qlora-3":
        how = json.loads((adapter / "quantization_config.json").read_text())
        more = {"quantization_config": BitsAndBytesConfig(**how), "dtype": torch.bfloat16}
    plain = AutoPeftModelForCausalLM.from_pretrained(adapter, **more)
    assert torch.allclose(logits(plain, tokenizer), logits(merged, tokenizer), atol=0.05 if more else 1e-4)
    generator = load_generator(str(adapter))
    (answer,) = answer_prompts(generator, ["Where is 3?"], max_new_tokens=2)
    assert answer.num_new_tokens == 2


def plan_of(path: Path, *names: str) -> ModelPlan:
    return ModelPlan(path=str(path), kind="directory", new_tokens=names)


def test_a_token_that_is_there_already_is_an_error(tmp_path: Path) -> None:
    import torch

    from dslaunch.train.model import load_tokenizer

    make_tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ConfigError, match=r"model\.new_tokens: the tokenizer has '<\|im_end\|>' already"
    ) as error:
        load_tokenizer(plan_of(tmp_path, "<|new|>", "<|im_end|>"), torch.float32)
    assert error.value.hint == "leave it out; adapter.trainable_token_indices: [1] trains its row"


def test_rows_begin_at_the_mean_also_where_the_model_has_some_to_spare(tmp_path: Path) -> None:
    import torch

    from dslaunch.train.model import load_base_model, load_tokenizer
    from dslaunch.train.new_tokens import grow_vocabulary

    path = make_tiny_model_dir(tmp_path / "m", layers=1, tie=False)
    make_tiny_tokenizer(300).save_pretrained(path)  # 84 rows of the model are nobody's
    plan = plan_of(path, TOOL, END)
    model, tokenizer = load_base_model(plan, torch.float32), load_tokenizer(plan, torch.float32)
    old = model.lm_head.weight.detach().clone()
    first = len(tokenizer) - 2
    said = grow_vocabulary(model, tokenizer, plan.new_tokens)
    assert said.endswith("(the model has 384 rows)")
    assert model.lm_head.weight.shape == old.shape
    for module in (model.lm_head, model.model.embed_tokens):
        rows = module.weight.detach()
        assert torch.allclose(rows[first], rows[:first].mean(0)) and rows[first].equal(rows[first + 1])


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (replace(LORA, trainable_token_indices=(384,)), "384 is no row of the embedding, which has 384"),
        (
            replace(LORA, trainable_token_indices=(5,), target_modules=("q_proj", "embed_tokens")),
            "embed_tokens has rows to train, and cannot have an adapter as well",
        ),
    ],
)
def test_rows_that_cannot_be_trained_are_one_sentence(tmp_path: Path, adapter: Any, message: str) -> None:
    import torch

    from dslaunch.train.adapters import add_adapter
    from dslaunch.train.model import load_base_model

    path = make_tiny_model_dir(tmp_path / "m", layers=1)
    model = load_base_model(plan_of(path), torch.float32)
    with pytest.raises(ConfigError, match=message):
        add_adapter(model, adapter)


def test_the_witness_tells_of_rows_whose_token_was_not_there(tmp_path: Path) -> None:
    import torch

    from dslaunch.train.adapters import GradientWitness, add_adapter
    from dslaunch.train.model import load_base_model

    path = make_tiny_model_dir(tmp_path / "m", layers=1, tie=False)
    model, said = add_adapter(
        load_base_model(plan_of(path), torch.float32), replace(LORA, trainable_token_indices=(5, 6, 7))
    )
    assert said.endswith(", 3 rows of embed_tokens")
    one = add_adapter(
        load_base_model(plan_of(path), torch.float32), replace(LORA, trainable_token_indices=(5,))
    )
    assert one[1].endswith(", 1 row of embed_tokens")
    witness = GradientWitness(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)  # else nothing but B gets a gradient in the first step
    ids = torch.tensor([[5, 9, 6, 11]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert witness.check(lambda values: values) == (
        "1 rows of tokens got no gradient: their tokens were not in the first step"
    )


def test_a_token_that_the_data_never_has_is_told() -> None:
    from dslaunch.train.new_tokens import unused_tokens

    class Sample:
        def __init__(self, *ids: int) -> None:
            self.input_ids = list(ids)

    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {TOOL: 384, END: 385}

    data = [Sample(1, 2), Sample(3, 384)]
    assert unused_tokens(data, Tokenizer(), (TOOL,)) == []
    assert unused_tokens(data, Tokenizer(), (TOOL, END)) == [
        "model.new_tokens: not once in the training data: '<|end_of_tool|>'"
    ]
