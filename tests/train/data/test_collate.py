"""Targets sit where the logits are, never cross a sample, and come from masks alone."""

from __future__ import annotations

import numpy as np
import torch

from dslaunch.train.data.collate import Batch, Sample, collate


def sample(ids: list[int], mask: list[int]) -> Sample:
    return Sample(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


QUESTION_ANSWER = sample([5, 6, 7, 2], [0, 0, 1, 1])
TEXT = sample([8, 9, 2], [0, 1, 1])


def test_padded_rows() -> None:
    batch = collate([[QUESTION_ANSWER], [TEXT]], pad_token_id=0, packed=False, pad_to_multiple_of=1)
    assert batch.input_ids.tolist() == [[5, 6, 7, 2], [8, 9, 2, 0]]
    assert batch.targets.tolist() == [[-100, 7, 2, -100], [9, 2, -100, -100]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.dtype == torch.bool
    assert batch.attention_mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 2]]


def test_padding_with_the_eos_id_hides_no_eos() -> None:
    batch = collate([[QUESTION_ANSWER], [TEXT]], pad_token_id=2, packed=False, pad_to_multiple_of=8)
    assert batch.targets[0, :4].tolist() == [-100, 7, 2, -100]
    assert batch.targets[:, 4:].eq(-100).all()


def test_packed_rows() -> None:
    batch = collate([[QUESTION_ANSWER, TEXT], [TEXT]], pad_token_id=0, packed=True, pad_to_multiple_of=1)
    assert batch.input_ids.tolist() == [[5, 6, 7, 2, 8, 9, 2], [8, 9, 2, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [
        [-100, 7, 2, -100, 9, 2, -100],
        [9, 2, -100, -100, -100, -100, -100],
    ]
    # Padding restarts the positions: to the model it is one more sample.
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3]]
    assert batch.attention_mask is None


def test_the_first_token_of_the_next_sample_is_no_target_even_if_marked() -> None:
    careless = sample([8, 9], [1, 1])
    batch = collate([[QUESTION_ANSWER, careless]], pad_token_id=0, packed=True, pad_to_multiple_of=1)
    assert batch.targets.tolist() == [[-100, 7, 2, -100, 9, -100]]


def test_supervised_tokens_are_the_targets() -> None:
    for packed, units in ((True, [[QUESTION_ANSWER, TEXT], []]), (False, [[QUESTION_ANSWER], [TEXT], []])):
        batch = collate(units, pad_token_id=0, packed=packed)
        assert int((batch.targets != -100).sum()) == 4


def test_empty_units_give_rows_without_targets_that_still_see_a_token() -> None:
    batch = collate([[], []], pad_token_id=3, packed=False)
    assert batch.input_ids.tolist() == [[3] * 8] * 2
    assert batch.targets.eq(-100).all()
    assert batch.attention_mask is not None
    assert batch.attention_mask.sum(dim=1).tolist() == [1, 1]


def test_width_is_a_multiple() -> None:
    for multiple, width in ((1, 4), (3, 6), (8, 8)):
        batch = collate([[QUESTION_ANSWER]], pad_token_id=0, packed=False, pad_to_multiple_of=multiple)
        assert batch.input_ids.shape == (1, width)


def test_moving_a_batch_keeps_every_field() -> None:
    for packed in (True, False):
        batch = collate([[TEXT]], pad_token_id=0, packed=packed)
        moved = batch.to("meta")
        assert isinstance(moved, Batch)
        assert moved.input_ids.device.type == moved.targets.device.type == "meta"
        assert (moved.attention_mask is None) is packed


def test_the_model_gets_no_cache() -> None:
    inputs = collate([[TEXT]], pad_token_id=0, packed=True).model_inputs()
    assert inputs["use_cache"] is False
    assert inputs["attention_mask"] is None
    assert set(inputs) == {"input_ids", "position_ids", "attention_mask", "use_cache"}
