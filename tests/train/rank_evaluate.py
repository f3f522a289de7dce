"""One rank that evaluates a table of small sets and prints ``{case: [loss, num_tokens, perplexity]}``.

The model looks its logits up by token, so the expected loss needs no model code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed

from dslaunch.train.data.collate import Sample, collate
from dslaunch.train.data.packing import one_sample_units, pack_samples
from dslaunch.train.evaluate import eval_batches, run_evaluation
from dslaunch.train.objectives.sft import SftObjective

VOCABULARY = 11


class TableModel(torch.nn.Module):
    """Logits of a position depend on its own token alone: [B, T] to [B, T, V]."""

    def __init__(self, *, nan: bool = False, scale: float = 3.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        with torch.no_grad():
            self.table.weight.copy_(scale * torch.randn(VOCABULARY, VOCABULARY, generator=generator))
            if nan:
                self.table.weight[4] = float("nan")

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.table(input_ids))


def make_samples(*lengths: int) -> list[Sample]:
    """Samples of which a random third of the tokens is trained, the second token always."""
    rng = np.random.default_rng(len(lengths))
    samples = []
    for length in lengths:
        mask = rng.random(length) < 1 / 3
        mask[0], mask[1] = False, True
        samples.append(Sample(rng.integers(0, VOCABULARY, length, dtype=np.int32), mask))
    return samples


# name -> samples, micro batch size, packed
CASES: dict[str, tuple[list[Sample], int, bool]] = {
    "uneven": (make_samples(9, 2, 31, 5, 14, 3, 8), 2, False),
    "even": (make_samples(6, 6, 6, 6), 1, False),
    "packed": (make_samples(9, 2, 31, 5, 14, 3, 8), 2, True),
    "fewer than ranks": (make_samples(7), 1, False),
    "fewer than one micro-batch": (make_samples(7, 4, 5), 8, False),
    "empty": ([], 2, False),
}
MODELS: dict[str, Callable[[], TableModel]] = {
    "usual": TableModel,
    "nan": partial(TableModel, nan=True),
    "far off": partial(TableModel, scale=1e4),
}


def evaluate(model: TableModel, samples: list[Sample], micro: int, packed: bool) -> list[float]:
    """One case, on this rank."""
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    packs = pack_samples(lengths, 32, 0) if packed else one_sample_units(len(samples))
    batches = eval_batches(
        packs,
        packs.sum_per_unit(lengths),
        micro_batch_size=micro,
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
        collate_units=lambda units: collate(
            [[samples[i] for i in packs[unit]] for unit in units], pad_token_id=0, packed=packed
        ),
    )
    device = torch.device("cpu")
    result = run_evaluation(model, SftObjective(model, model, device), batches, device)
    assert model.training and torch.is_grad_enabled()
    return [result.loss, result.num_tokens, result.perplexity]


def main() -> None:
    torch.distributed.init_process_group("gloo")
    found = {
        f"{name}/{case}": evaluate(make(), *arguments)
        for name, make in MODELS.items()
        for case, arguments in CASES.items()
    }
    print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
