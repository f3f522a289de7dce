"""The parts of a replay that need no ranks: bisecting, judging what was seen, measuring, keeping weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from dslaunch.core.errors import ConfigError
from dslaunch.core.run_dir import RunDir
from dslaunch.train.replay import recent as recent_steps
from dslaunch.train.replay.bisect import Guilt, bisect
from dslaunch.train.replay.measure import measure
from dslaunch.train.replay.probe import Event, Kind, find_broken_weights, probing
from dslaunch.train.replay.recent import RecentSteps
from dslaunch.train.replay.verdict import LOSS, find_first
from dslaunch.train.replay.weights import load_weights, weight_bytes, write_weights
from dslaunch.train.replay.window import (
    build_window,
    make_room,
    read_index,
    read_rank,
    take_rng,
    window_path,
    write_index,
    write_rank,
)
from tests.train.replay.planted import PAD, TRIGGER, PlantedLM, make_corpus

FINE, BAD = torch.ones(2), torch.tensor([1.0, torch.inf])


def searched(count: int, guilty: Collection[int], *, least: int = 1) -> tuple[Guilt, int]:
    """What a search finds where ``least`` of the guilty must be there to break it, and its tries."""
    search = bisect(count)
    wanted, tries = next(search), 0
    while True:
        tries += 1
        try:
            wanted = search.send(len(set(wanted) & set(guilty)) >= least)
        except StopIteration as end:
            return end.value, tries


@pytest.mark.parametrize("guilty", [(0,), (6,), (2, 3), (0, 6), (1, 4, 5)])
def test_bisecting_finds_every_guilty_sample(guilty: tuple[int, ...]) -> None:
    assert searched(7, guilty)[0] == Guilt(guilty)


def test_bisecting_takes_few_tries() -> None:
    assert searched(64, (17,))[1] <= 2 * 6 + 1


def test_what_breaks_only_together_or_without_any_sample_is_said() -> None:
    assert searched(4, (1, 2), least=2)[0] == Guilt((0, 1, 2, 3), together=True)
    assert searched(4, (), least=0)[0] == Guilt((), any_sample=True)


def test_blanked_samples_keep_their_place() -> None:
    corpus = make_corpus(9, (4,), packing=True)
    window = build_window(
        1, corpus=corpus, micro_batches=[[0, 1]], num_tokens=1, loss_scale=1.0, rng=take_rng()
    )
    batch, places = window.batches[0], window.samples[0]
    kept = window.only(0, {1})
    inside = torch.zeros_like(batch.input_ids, dtype=torch.bool)
    inside[places[1].row, places[1].start : places[1].stop] = True
    assert torch.equal(kept.input_ids[inside], batch.input_ids[inside])
    assert torch.equal(kept.targets[inside], batch.targets[inside])
    assert not kept.input_ids[~inside].any() and (kept.targets[~inside] == -100).all()
    assert torch.equal(kept.position_ids, batch.position_ids)
    assert [place.where for place in places] == [f"planted.jsonl:{place.sample + 1}" for place in places]


def event(kind: Kind, module: str, tensor: torch.Tensor, name: str = "") -> Event:
    return Event(kind, module, name, measure(tensor))


def test_the_innermost_module_is_blamed_and_not_those_that_pass_it_on() -> None:
    events = [
        event("input", "a", FINE, "x"), event("input", "a.b", FINE, "x"), event("output", "a.b", BAD),
        event("output", "a", BAD), event("output", "", BAD),
    ]  # fmt: skip
    first = find_first(events, float("nan"))
    assert first is not None and (first.phase, first.module, first.between) == ("forward", "a.b", None)


def test_a_modules_own_code_is_told_from_the_modules_in_it() -> None:
    between = [
        event("output", "a.b", FINE), event("input", "a.c", BAD, "x"), event("output", "a.c", BAD),
        event("output", "a", BAD),
    ]  # fmt: skip
    first = find_first(between, float("nan"))
    assert first is not None and (first.module, first.between) == ("a", "a.b")
    assert first.what == "what it gives to a.c as x"
    after = [event("output", "a.b", FINE), event("output", "a", BAD)]
    first = find_first(after, float("nan"))
    assert first is not None and (first.module, first.between) == ("a", "a.b")


def test_a_loss_of_finite_outputs_is_the_losss_own() -> None:
    first = find_first([event("output", "", FINE)], float("inf"))
    assert first is not None and (first.phase, first.module) == ("loss", LOSS)


def test_in_the_backward_the_first_gradient_counts() -> None:
    events = [
        event("output", "", FINE), event("gradient of output", "", FINE),
        event("gradient of output", "a", FINE), event("gradient of parameter", "a", BAD, "a.weight"),
        event("gradient of input", "a", BAD, "x"),
    ]  # fmt: skip
    first = find_first(events, 1.0)
    assert first is not None and (first.phase, first.module, first.parameter) == ("backward", "a", "a.weight")
    given_back = [
        event("output", "a", FINE), event("gradient of output", "", FINE),
        event("gradient of output", "a.b", BAD),
    ]  # fmt: skip
    first = find_first(given_back, 1.0)
    assert first is not None and (first.module, first.what) == ("a", "the gradient that it gives back to a.b")
    from_loss = [event("gradient of output", "", BAD, "logits")]
    first = find_first(from_loss, 1.0)
    assert first is not None and first.module == LOSS


def test_what_goes_into_a_list_of_modules_was_made_by_the_module_that_has_the_list() -> None:
    """ "layers" is a ModuleList: it has no forward, so nothing was seen of it."""
    given = [
        event("output", "a.layers.0", FINE),
        event("input", "a.layers.1", BAD, "x"),
        event("output", "a", BAD),
    ]
    first = find_first(given, float("nan"))
    assert first is not None and (first.module, first.between) == ("a", "a.layers.0")
    first = find_first([given[0], event("input", "layers.1", BAD, "x")], float("nan"))
    assert first is not None and first.module == ""
    back = [event("output", "a", FINE), event("gradient of output", "a.layers.1", BAD)]
    first = find_first(back, 1.0)
    assert first is not None and first.module == "a"


def test_a_buffer_with_nan_is_a_broken_weight_and_one_with_inf_is_not() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    assert find_broken_weights(model) == []
    model[0].running_mean[1] = torch.nan
    (found,) = find_broken_weights(model)
    assert (found["name"], found["num_nan"], found["first_bad"]) == ("0.running_mean", 1, [1])


def test_finite_events_and_a_finite_loss_have_no_culprit() -> None:
    assert find_first([event("output", "", FINE), event("gradient of input", "a", FINE)], 2.0) is None


def test_the_range_of_a_tensor() -> None:
    spread = measure(torch.tensor([[1.0, torch.nan], [-3.0, -torch.inf]], dtype=torch.float16))
    assert (spread.low, spread.high, spread.absmax) == (-3.0, 1.0, 3.0)
    assert (spread.num_nan, spread.num_inf, spread.first_bad, spread.limit) == (1, 1, (0, 1), 65504.0)
    assert spread.to_json()["share_nonfinite"] == 0.5
    nothing = measure(torch.full((2,), torch.nan))
    assert nothing.low is None and nothing.to_json()["absmax"] is None


def test_hooks_are_gone_after_the_pass_and_gradients_are_the_same() -> None:
    model = PlantedLM()
    ids = torch.tensor([[1, 2, TRIGGER, 4]])
    model(ids).logits.sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    seen: dict[str, torch.Tensor] = {}
    handles = [
        p.register_hook(lambda g, n=name: seen.__setitem__(n, g)) for name, p in model.named_parameters()
    ]
    with probing(model) as probe:
        loss = model(ids).logits.sum()
        probe.in_backward = True
        loss.backward()
    for handle in handles:
        handle.remove()
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in expected)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(not p._backward_hooks and p.grad is None for p in model.parameters())
    kinds = [e.kind for e in probe.events]
    assert {"input", "output", "gradient of output", "gradient of input", "gradient of parameter"} == set(
        kinds
    )


def test_weights_come_back_in_their_own_dtype(tmp_path: Path) -> None:
    model, other = PlantedLM().to(torch.bfloat16), PlantedLM().to(torch.bfloat16)
    for frozen in (model.head.weight, other.head.weight):
        frozen.requires_grad_(False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    untouched = other.head.weight.clone()
    write_weights(tmp_path, 0, model)
    assert (tmp_path / "weights-0.safetensors").stat().st_size > weight_bytes(model)
    load_weights(tmp_path, 0, other)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(torch.equal(model.state_dict()[name], other.state_dict()[name]) for name in trained)
    assert torch.equal(other.head.weight, untouched)
    with pytest.raises(ConfigError, match="is of another model"):
        load_weights(tmp_path, 0, torch.nn.Linear(3, 3))


class Ended:
    """Of a step's result what is asked for."""

    def __init__(self, *, skipped: bool = False, loss: float = 1.0) -> None:
        self.skipped, self.loss = skipped, loss


def told(*results: Ended) -> RecentSteps:
    recent = RecentSteps()
    for step, result in enumerate(results):
        recent.begin(step, 1.0)
        recent.end(result)  # type: ignore[arg-type]
    return recent


def test_the_step_that_went_wrong_and_whether_its_weights_are_still_there() -> None:
    found = told(Ended(), Ended(skipped=True)).suspect(2)
    assert found is not None and (found[0].step, found[1]) == (1, True)
    found = told(Ended(skipped=True), Ended()).suspect(1)  # a verdict one step late, and a step since
    assert found is not None and (found[0].step, found[1]) == (0, False)
    found = told(Ended(), Ended(loss=float("nan"))).suspect(None)
    assert found is not None and (found[0].step, found[1]) == (1, False)
    assert told(Ended(), Ended()).suspect(None) is None
    raised = told(Ended())
    raised.begin(1, 1.0)
    found = raised.suspect(None)
    assert found is not None and (found[0].step, found[1]) == (1, True)


def test_only_the_last_steps_are_held() -> None:
    recent = told(*[Ended(skipped=True)] * 10)
    assert len(recent._steps) == recent_steps._KEPT
    assert recent.suspect(3) is None


def test_at_most_three_steps_are_kept(tmp_path: Path) -> None:
    for step in (3, 20, 100, 7):
        make_room(tmp_path)
        folder = window_path(tmp_path, step)
        folder.mkdir(parents=True)
        write_index(folder, {"step": step})
    assert RunDir(tmp_path).kept_steps() == (7, 20, 100)
    window_path(tmp_path, 200).mkdir()  # not whole
    assert RunDir(tmp_path).kept_steps() == (7, 20, 100)
    assert read_index(window_path(tmp_path, 7))["step"] == 7


def test_a_window_is_read_as_it_was_written(tmp_path: Path) -> None:
    corpus = make_corpus(9, (4,), packing=True)
    window = build_window(
        5, corpus=corpus, micro_batches=[[0, 1], [2, -1]], num_tokens=40, loss_scale=256.0, rng=take_rng()
    )
    write_rank(tmp_path, 1, window)
    write_index(tmp_path, {"step": 5, "loss_scale": 256.0, "num_tokens": 40})
    read = read_rank(tmp_path, 1, pad_token_id=PAD)
    assert (read.step, read.loss_scale, read.num_tokens, read.samples) == (5, 256.0, 40, window.samples)
    assert len(read.batches) == 2
    for one, other in zip(read.batches, window.batches, strict=True):
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.targets, other.targets)
        assert torch.equal(one.position_ids, other.position_ids) and one.attention_mask is None
    assert torch.equal(read.rng["torch"], window.rng["torch"])
    with pytest.raises(ConfigError, match="cannot be read by rank 0"):
        read_rank(tmp_path, 0, pad_token_id=PAD)
