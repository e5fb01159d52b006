"""Random and systematic differences are told apart, whatever the values look like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plugins.sdk.differences import Kind, describe_difference

ROUNDED = (torch.bfloat16, torch.float16)


def values(seed: int, *shape: int, tail: float = 0.0) -> Tensor:
    """Normal values; tail: some are that many times as large, as models have them."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64)
    rare = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.002
    return torch.where(rare, made * tail, made) if tail else made


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("tail", [0.0, 1000.0])
def test_roundings_are_random(seed: int, dtype: torch.dtype, tail: float) -> None:
    value = values(seed, 24, 576, tail=tail)
    nature = describe_difference(value.to(dtype).double() - value, value)
    assert nature.kind is Kind.RANDOM
    assert 0 < nature.size < 2.0**-8


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_rounded_terms_are_random(seed: int) -> None:
    x, weight = values(seed, 24, 576), values(seed + 100, 320, 576)
    rounded = weight.to(torch.bfloat16).double()
    nature = describe_difference(x @ (rounded - weight).T, x @ weight.T, terms=576)
    assert nature.kind is Kind.RANDOM


@pytest.mark.parametrize("terms", [64, 576])
def test_sums_that_are_kept_in_a_short_dtype_are_random(terms: int) -> None:
    x, weight = values(1, 8, terms), values(2, 64, terms)
    total = torch.zeros(8, 64, dtype=torch.bfloat16)
    for index in range(terms):
        total = (total.double() + torch.outer(x[:, index], weight[:, index])).to(torch.bfloat16)
    value = x @ weight.T
    nature = describe_difference(total.double() - value, value, terms=terms)
    assert nature.kind is Kind.RANDOM
    assert nature.size > 2.0**-8


def test_a_turn_of_a_few_pairs_is_no_rounding() -> None:
    """A position that is off by one leaves most pairs of a head nearly as they are."""
    value = values(3, 24, 9, 64)
    first, second = value.chunk(2, dim=-1)
    angles = 1e5 ** (-torch.arange(32, dtype=torch.float64) / 32)
    turned = torch.cat((first * angles.cos() - second * angles.sin(),
                        second * angles.cos() + first * angles.sin()), dim=-1)  # fmt: skip
    assert describe_difference(turned - value, value, terms=576).kind is Kind.SYSTEMATIC


@pytest.mark.parametrize("tail", [0.0, 1000.0])
@pytest.mark.parametrize("factor", [1e-6, -3e-3, -1.0])
def test_a_wrong_factor_goes_with_the_value_however_small(tail: float, factor: float) -> None:
    value = values(1, 8, 576, tail=tail)
    nature = describe_difference(value * factor, value)
    assert (nature.kind, "factor" in nature.reason) == (Kind.SYSTEMATIC, True)
    assert nature.slope == pytest.approx(factor)
    assert nature.along_errors * factor > 0


def test_cutting_digits_off_goes_with_the_value() -> None:
    """Truncation where rounding is due: every result is a little nearer to 0."""
    value = values(2, 8, 576).float()
    cut = (value.view(torch.int32) & ~0xFFFF).view(torch.float32)
    nature = describe_difference(cut.double() - value.double(), value.double())
    assert nature.kind is Kind.SYSTEMATIC
    assert nature.slope < 0


def test_a_constant_is_a_bias() -> None:
    value = values(3, 8, 576)
    nature = describe_difference(torch.full_like(value, 1e-5), value)
    assert (nature.kind, "bias" in nature.reason) == (Kind.SYSTEMATIC, True)
    assert nature.bias_errors > 60


def test_a_difference_without_direction_that_no_rounding_makes_is_systematic() -> None:
    value = values(4, 64, 576)
    nature = describe_difference(values(5, 64, 576) * 0.1, value, terms=4)
    assert (nature.kind, "larger" in nature.reason) == (Kind.SYSTEMATIC, True)


def test_no_difference_and_no_values_are_no_difference() -> None:
    for value in (torch.ones(2, 3, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.float64)):
        assert describe_difference(torch.zeros_like(value), value).kind is Kind.NONE


def test_one_value_has_no_direction() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    assert describe_difference(one * 1e-4, one).kind is Kind.RANDOM
