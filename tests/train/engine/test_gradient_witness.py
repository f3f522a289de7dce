"""The one number by which a rank knows whether its own gradients were finite, on plain autograd."""

from __future__ import annotations

import math

import pytest
import torch

from dslaunch.train.engine.gradient_witness import LocalGradients

INF, NAN = math.inf, math.nan
SHAPES = ((), (3,), (0,), (4, 5), (2, 3, 4))


def witness_of(*gradients: torch.Tensor, times: int = 1) -> float | None:
    """What is seen where each of ``gradients`` comes out of a backward ``times`` times."""
    parameters = [torch.nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in gradients]
    seen = LocalGradients(parameters)
    for _ in range(times):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            torch.autograd.backward(parameter * 1, gradient)
    total = seen.take()
    assert seen.take() is None  # begun anew
    return None if total is None else total.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_one_element_that_is_not_finite_is_seen_in_any_gradient(dtype: torch.dtype, bad: float) -> None:
    fine = [torch.ones(shape, dtype=dtype) for shape in SHAPES]
    assert witness_of(*fine) == sum(g.numel() for g in fine) == 48
    for at, gradient in enumerate(fine):
        if gradient.numel():
            broken = gradient.clone()
            broken.view(-1)[-1] = bad
            total = witness_of(*fine[:at], broken, *fine[at + 1 :])
            assert total is not None
            assert not math.isfinite(total)


def test_inf_of_either_sign_does_not_cancel() -> None:
    total = witness_of(torch.tensor([INF]), torch.tensor([-INF]))
    assert total is not None
    assert math.isnan(total)


def test_large_16_bit_gradients_do_not_overflow_their_sum() -> None:
    assert witness_of(torch.full((1000,), 60000.0, dtype=torch.float16)) == 6e7


def test_gradients_of_several_dtypes_meet_in_one_number() -> None:
    fine = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert witness_of(*fine) == 6
    assert witness_of(*fine[:2], torch.tensor([1, INF], dtype=torch.float16)) == INF


@pytest.mark.parametrize("times", [2, 3, 7])
def test_a_parameter_may_be_met_more_often_than_there_is_room(times: int) -> None:
    assert witness_of(torch.ones(3), torch.ones(2), times=times) == 5 * times
    assert witness_of(torch.tensor([INF]), torch.ones(2), times=times) == INF


def test_an_inf_of_the_last_window_is_not_seen_in_the_next() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    seen = LocalGradients([parameter])
    for value, expected in ((INF, INF), (1.0, 2.0)):
        torch.autograd.backward(parameter * 1, torch.full((2,), value))
        total = seen.take()
        assert total is not None
        assert total.item() == expected


def test_a_gradient_with_another_order_in_memory() -> None:
    assert witness_of(torch.arange(12.0).view(3, 4).t()) == 66


def test_a_sparse_gradient() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    seen = LocalGradients(table.parameters())
    for weight, expected in ((1.0, 6.0), (NAN, None)):
        (table(torch.tensor([1, 1, 4])) * weight).sum().backward()
        total = seen.take()
        assert total is not None
        assert total.item() == expected if expected is not None else total.isnan()


def test_frozen_parameters_are_not_looked_at_and_remove_ends_it() -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    trained = torch.nn.Parameter(torch.zeros(2))
    seen = LocalGradients([frozen, trained])
    seen.remove()
    (trained * 1).sum().backward()
    assert seen.take() is None


def test_a_course_is_the_same_in_every_process_and_knows_which_and_in_which_order() -> None:
    a, b = (torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float32))
    seen = LocalGradients([a, b])

    def course(*parameters: torch.nn.Parameter, ordered: bool) -> int:
        for parameter in parameters:
            parameter.sum().backward()
        return seen.take_course(ordered=ordered)

    assert course(a, b, ordered=True) == course(a, b, ordered=True) != course(b, a, ordered=True)
    assert course(a, b, ordered=False) == course(b, a, ordered=False) != course(a, ordered=False)
    assert course(a, ordered=True) == hash((hash((0, 0)),)) % 2**48  # whole numbers alone: not salted
