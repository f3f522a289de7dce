"""NEFTune: how large the noise is, for which tokens, and where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dslaunch.train.data.collate import Batch, Sample, collate
from dslaunch.train.embedding_noise import EmbeddingNoise, sample_lengths

CPU = torch.device("cpu")
ALPHA, HIDDEN = 5.0, 512


class Model(torch.nn.Module):
    """Puts its embeddings out as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, HIDDEN)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed(ids)
        return embedded


def sample(length: int) -> Sample:
    return Sample(np.arange(length, dtype=np.int32) % 9, np.ones(length, dtype=np.bool_))


def batch(*lengths: tuple[int, ...], packed: bool) -> Batch:
    units = [[sample(n) for n in row] for row in lengths]
    return collate(units, pad_token_id=0, packed=packed, pad_to_multiple_of=4)


def noise_of(model: Model, noise: EmbeddingNoise, given: Batch) -> torch.Tensor:
    with torch.no_grad(), noise.on(given, CPU):
        return model(given.input_ids) - model.embed.weight[given.input_ids]


def test_lengths_of_padded_rows_leave_padding_out() -> None:
    found = sample_lengths(batch((3,), (6,), packed=False))
    assert found.tolist() == [[3] * 3 + [math.inf] * 5, [6] * 6 + [math.inf] * 2]


def test_lengths_of_packed_rows_are_those_of_each_sample() -> None:
    found = sample_lengths(batch((3, 2), (6,), packed=True))
    assert found.tolist() == [
        [3] * 3 + [2] * 2 + [3] * 3,
        [6] * 6 + [2] * 2,
    ]  # padding is a sample of its own
    one_row = sample_lengths(batch((3, 2), (6,), packed=True).in_one_row())
    assert one_row.flatten().tolist() == found.flatten().tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_the_noise_is_uniform_in_the_papers_bounds(packed: bool) -> None:
    torch.manual_seed(0)
    model = Model().train()
    found = noise_of(model, EmbeddingNoise(model, ALPHA), batch((4,), (16,), packed=packed))
    for row, length in ((0, 4), (1, 16)):
        bound = ALPHA / math.sqrt(length * HIDDEN)
        values = found[row, :length]
        assert 0.99 * bound < values.abs().max() <= bound * (1 + 1e-4)  # the sum is rounded
        assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    if not packed:
        assert (found[0, 4:] == 0).all()


def test_none_outside_of_training() -> None:
    model = Model().eval()
    noise, given = EmbeddingNoise(model, ALPHA), batch((4,), packed=False)
    assert (noise_of(model, noise, given) == 0).all()
    model.train()
    assert (model(given.input_ids) == model.embed.weight[given.input_ids]).all()  # not the objective's pass
    assert (noise_of(model, noise, given) != 0).any()
    assert list(model.state_dict()) == ["embed.weight"]


def test_the_same_random_state_gives_the_same_noise() -> None:
    model = Model().train()
    noise, given = EmbeddingNoise(model, ALPHA), batch((4,), packed=False)
    state = torch.get_rng_state()
    first, second = noise_of(model, noise, given), noise_of(model, noise, given)
    torch.set_rng_state(state)
    assert (noise_of(model, noise, given) == first).all() and not (first == second).all()
