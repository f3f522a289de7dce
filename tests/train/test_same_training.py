"""However a step is split over ranks, passes, ZeRO stages and rows, it is the same step.

Through the rank's whole path: tokens on disk, batch schedule, collation, objective, engine,
checkpoint. In fp32 and with SGD, whose step is as long as the gradient says: a wrong factor shows
in the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dslaunch.core.plan import OptimizerPlan, RunPlan
from dslaunch.train.corpus import build_corpus
from dslaunch.train.data.dataset import TokenizedDataset, TokenizingOptions, prepare_dataset
from dslaunch.train.weights import find_checkpoint, load_trained_weights
from tests.support.plans import make_plan, read_rows, save_plan, write_questions
from tests.support.ranks import check_ranks, run_ranks
from tests.support.tiny import make_tiny_model_dir

SCRIPT = Path(__file__).with_name("rank_plans.py")
STAGES = (0, 1, 2, 3)
STEPS, BATCH = 3, 8
SGD = {"type": "SGD", "params": {"lr": 0.2}}
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Course:
    """What a run did: per step, and the fp32 weights at its end."""

    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    digests: list[str]
    weights: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Courses:
    root: Path
    plans: Mapping[str, RunPlan]

    def __getitem__(self, name: str) -> Course:
        run_dir = Path(self.plans[name].launch.run_dir)
        rows = read_rows(run_dir / "metrics.jsonl", "train")
        columns = ([row[key] for row in rows] for key in ("loss", "grad_norm", "lr", "data_digest"))
        tensors = load_trained_weights(find_checkpoint(run_dir)).tensors
        return Course(*columns, {name: tensor.detach() for name, tensor in tensors.items()})


@pytest.fixture(scope="module")
def courses(ops_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Courses:
    root = tmp_path_factory.mktemp("same")
    model = make_tiny_model_dir(root / "model", layers=1)
    many = write_questions(root / "many.jsonl", STEPS * BATCH)
    few = write_questions(root / "few.jsonl", BATCH)  # each step trains on all of them
    plans: dict[str, RunPlan] = {}

    def add_torch(name: str, data: Path, ranks: int, micro: int) -> None:
        plans[name] = make_plan(
            root / name, model, data, world_size=ranks, micro=micro, accumulation=BATCH // ranks // micro,
            max_steps=STEPS, engine="torch", gradient_clipping=0.0,
            optimizer=OptimizerPlan(type="SGD", lr=0.2, params={"lr": 0.2, "momentum": 0.0}),
        )  # fmt: skip

    def add(name: str, data: Path, ranks: int, micro: int, stage: int, **settings: Any) -> None:
        batch = settings.pop("batch", BATCH)
        assert batch % (ranks * micro) == 0
        plans[name] = make_plan(
            root / name, model, data, world_size=ranks, micro=micro, accumulation=batch // ranks // micro,
            zero_stage=stage, max_steps=STEPS,
            ds_config={"optimizer": SGD, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True},
            **settings,
        )  # fmt: skip

    packed = _packed_settings(root, model, few)
    for stage in STAGES:
        for ranks, micro in ((1, 8), (1, 1), (2, 4), (2, 1)):
            add(f"{ranks}x{micro} stage {stage}", many, ranks, micro, stage)
        add(f"packed stage {stage}", few, 2, 1, stage, **packed)
    for ranks, micro in ((1, 8), (1, 1), (2, 4), (2, 1)):
        add_torch(f"{ranks}x{micro} torch", many, ranks, micro)
    add("few", few, 1, 8, 0)
    add("few packed", few, 1, 2, 0, **packed)
    _run(plans)
    return Courses(root, plans)


def _packed_settings(root: Path, model: Path, data: Path) -> dict[str, Any]:
    """Rows of a length that makes a number of packs that two ranks can share."""
    plan = make_plan(root, model, data, packing=True, max_length=128)
    dataset = _tokenized(plan, root)
    for max_length in range(int(dataset.lengths.max()), int(dataset.lengths.sum())):
        cut = replace(plan.data, max_length=max_length)
        batch = len(build_corpus(dataset, cut, pad_token_id=2, seed=plan.seed))
        if batch == 4:
            return {"batch": batch, "packing": True, "max_length": max_length}
    raise AssertionError("no row length packs the samples into four rows")


def _tokenized(plan: RunPlan, root: Path) -> TokenizedDataset:
    options = TokenizingOptions(
        tokenizer=AutoTokenizer.from_pretrained(plan.model.path), max_length=128,
        cache_dir=root / "tokens", max_dropped_fraction=0.0, seed=plan.seed,
    )  # fmt: skip
    return prepare_dataset(plan.data.train, options)


def _run(plans: Mapping[str, RunPlan]) -> None:
    for ranks in (1, 2):
        paths = [save_plan(plan) for plan in plans.values() if plan.batch.world_size == ranks]
        check_ranks(run_ranks([SCRIPT, *paths], world_size=ranks, timeout_s=240))


def _assert_same(course: Course, expected: Course) -> None:
    assert len(course.losses) == STEPS
    assert course.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert course.grad_norms == pytest.approx(expected.grad_norms, rel=TOLERANCE)
    _assert_same_weights(course.weights, expected.weights)


def _assert_same_weights(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((weights[name] - tensor).abs().max() / tensor.abs().max()) < TOLERANCE, name


@pytest.mark.parametrize("engine", [*(f"stage {stage}" for stage in STAGES), "torch"])
@pytest.mark.parametrize("split", ["1x8", "1x1", "2x4", "2x1"])
def test_ranks_passes_and_engines_do_not_change_the_training(
    courses: Courses, split: str, engine: str
) -> None:
    expected = courses["1x8 stage 0"]
    course = courses[f"{split} {engine}"]
    assert course.digests == expected.digests
    assert len(set(course.digests)) == STEPS  # each step has other samples
    _assert_same(course, expected)


@pytest.mark.parametrize("name", ["few packed", *(f"packed stage {stage}" for stage in STAGES)])
def test_packing_does_not_change_the_training(courses: Courses, name: str) -> None:
    assert courses.plans[name].data.packing
    _assert_same(courses[name], courses["few"])


def test_it_is_what_plain_pytorch_does(courses: Courses) -> None:
    """One sample at a time, the sum over all of them by their number of answer tokens, and SGD."""
    course, plan = courses["few"], courses.plans["few"]
    model = AutoModelForCausalLM.from_pretrained(plan.model.path).train()
    dataset = _tokenized(plan, courses.root)
    for step, rate in enumerate(course.lrs):
        model.zero_grad()
        total = torch.zeros(())
        for sample in (dataset[i] for i in range(len(dataset))):
            ids = torch.from_numpy(sample.input_ids.copy()).long()
            answer = torch.from_numpy(sample.completion_mask.copy())[1:]
            nll = torch.nn.functional.cross_entropy(
                model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none"
            )
            total = total + nll[answer].sum()
        loss = total / int(dataset.num_supervised.sum())
        loss.backward()
        gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat(gradients))
        assert course.losses[step] == pytest.approx(float(loss.detach()), rel=TOLERANCE)
        assert course.grad_norms[step] == pytest.approx(float(norm), rel=TOLERANCE)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= rate * parameter.grad
    _assert_same_weights(course.weights, {n: p.detach() for n, p in model.named_parameters()})
    start = AutoModelForCausalLM.from_pretrained(plan.model.path)
    moved = [float((p.detach() - course.weights[n]).abs().max()) for n, p in start.named_parameters()]
    assert min(moved) > 1e-4  # else equal weights would say nothing
