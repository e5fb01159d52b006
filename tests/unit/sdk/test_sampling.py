"""Filters keep what they say, rows do not see each other, shares come out as the model gave them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plugins.cpu.operators import CpuOperators
from plugins.sdk.host import HostMemory
from plugins.sdk.operators import OperatorSet
from plugins.sdk.reference import sampling

VOCAB = 50


class _Plain(OperatorSet):
    """The reference, through the catalogue."""


# The cpu plugin's own implementation has to hold everything that the reference holds.
IMPLEMENTATIONS: list[OperatorSet] = [_Plain(HostMemory()), CpuOperators(HostMemory())]
both = pytest.mark.parametrize("operators", IMPLEMENTATIONS, ids=["reference", "cpu"])


def settings_of(
    rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


def spread_draws(count: int) -> Tensor:
    """`count` numbers that cover [0, 1) evenly: a draw of each share."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def support(operators: OperatorSet, logits: Tensor, **settings: float) -> set[int]:
    """Tokens that can come up at all."""
    count = 4000
    rows = logits.expand(count, -1)
    tokens = operators.sample(rows, *settings_of(count, **settings), spread_draws(count))  # type: ignore[arg-type]
    return set(tokens.tolist())


DESCENDING = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))


@both
@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.86}, {0, 1, 2, 3}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        # top_p counts shares of what top_k left: 0.4 / 0.7 = 0.57.
        ({"top_k": 2, "top_p": 0.56}, {0}),
        ({"top_k": 2, "top_p": 0.58}, {0, 1}),
        # Temperature comes first: at 0.5 the shares are 0.16, 0.09, ... of 0.285.
        ({"temperature": 0.5, "top_p": 0.55}, {0}),
    ],
)
def test_filters_keep_what_they_say(
    operators: OperatorSet, settings: dict[str, float], kept: set[int]
) -> None:
    assert support(operators, DESCENDING, **settings) == kept


@both
def test_tokens_that_tie_with_the_last_one_kept_are_kept(operators: OperatorSet) -> None:
    tied = torch.tensor([1.0, 2.0, 1.0, 0.0])
    assert support(operators, tied, top_k=2) == {0, 1, 2}
    assert support(operators, torch.zeros(6), top_p=0.3) == {0, 1, 2, 3, 4, 5}


@both
def test_shares_are_those_of_the_model(operators: OperatorSet) -> None:
    count = 10_000
    rows = DESCENDING.expand(count, -1)
    tokens = operators.sample(rows, *settings_of(count), spread_draws(count))
    shares = torch.bincount(tokens, minlength=5).double() / count
    assert torch.allclose(shares, DESCENDING.exp().double(), atol=2 / count)


@both
def test_the_draw_walks_tokens_in_order_of_their_ids(operators: OperatorSet) -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]]))
    for uniform, token in ((0.0, 0), (0.0999, 0), (0.1001, 1), (0.6999, 1), (0.7001, 2), (1 - 2**-53, 2)):
        drawn = operators.sample(logits, *settings_of(1), torch.tensor([uniform], dtype=torch.float64))
        assert drawn.tolist() == [token], uniform


@both
@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 100.0])
def test_extreme_temperatures_stay_finite(operators: OperatorSet, temperature: float) -> None:
    logits = torch.tensor([[-500.0, 10.0, 9.0, 500.0]])
    drawn = operators.sample(
        logits, *settings_of(1, temperature=temperature), torch.tensor([0.9999], dtype=torch.float64)
    )
    assert drawn.tolist() == [3]


@both
def test_a_removed_token_never_comes_up_even_at_the_ends_of_the_draw(operators: OperatorSet) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        drawn = operators.sample(logits, *settings_of(1), torch.tensor([uniform], dtype=torch.float64))
        assert drawn.item() in (1, 3)


rows_strategy = st.integers(1, 6)


@both
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=rows_strategy,
    scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
)
def test_a_row_gets_the_same_token_alone_as_in_any_batch(
    operators: OperatorSet, seed: int, rows: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy((rng.standard_normal((rows, VOCAB)) * scale).astype(np.float32))
    settings = (
        torch.from_numpy(rng.uniform(0.05, 3.0, rows).astype(np.float32)),
        torch.from_numpy(rng.integers(0, VOCAB + 5, rows)),
        torch.from_numpy(rng.uniform(0.01, 1.0, rows).astype(np.float32)),
        torch.from_numpy(rng.uniform(0.0, 0.5, rows).astype(np.float32)),
        torch.from_numpy(rng.uniform(0.0, 1.0, rows)),
    )
    together = operators.sample(logits, *settings)
    alone = [
        operators.sample(logits[i : i + 1], *(part[i : i + 1] for part in settings)) for i in range(rows)
    ]
    assert together.tolist() == [token.item() for token in alone]


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.0, 0.001, 1.0, 5.0]))
def test_the_cpu_plugin_draws_what_the_reference_draws_over_a_large_vocabulary(
    seed: int, scale: float
) -> None:
    """Larger than the candidates that it looks at first, and flat enough to need the full sort."""
    rng = np.random.default_rng(seed)
    rows, vocab = 3, 3000
    logits = torch.from_numpy((rng.standard_normal((rows, vocab)) * scale).astype(np.float32))
    settings = (
        torch.from_numpy(rng.uniform(0.3, 2.0, rows).astype(np.float32)),
        torch.from_numpy(rng.choice([0, 1, 40, 2000], rows)),
        torch.from_numpy(rng.choice([0.1, 0.9, 0.999, 1.0], rows).astype(np.float32)),
        torch.from_numpy(rng.choice([0.0, 0.05], rows).astype(np.float32)),
        torch.from_numpy(rng.uniform(0.0, 1.0, rows)),
    )
    reference, native = (operators.sample(logits, *settings) for operators in IMPLEMENTATIONS)
    assert reference.tolist() == native.tolist()


def test_penalties_are_applied_as_documented() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    seen = torch.tensor([True, True, False, True])
    counts = torch.tensor([0, 2, 0, 1], dtype=torch.int32)
    penalised = sampling.apply_penalties(logits, seen, counts, repetition=2.0, presence=0.5, frequency=0.25)
    assert penalised.tolist() == [1.0, -4.0 - 0.5 - 0.5, 1.0, 0.25 - 0.5 - 0.25]


def test_bias_and_suppression() -> None:
    logits = torch.zeros(4)
    assert sampling.apply_bias(logits, {1: 2.5, 3: -100.0}).tolist() == [0.0, 2.5, 0.0, -100.0]
    assert sampling.suppress(logits, [0, 2]).tolist() == [-math.inf, 0.0, -math.inf, 0.0]
    assert logits.tolist() == [0.0] * 4


def test_logprobs_are_of_the_raw_distribution() -> None:
    values = sampling.token_logprobs(DESCENDING.expand(2, -1) + 7.0, torch.tensor([0, 4]))
    assert values.tolist() == pytest.approx([math.log(0.4), math.log(0.05)], abs=1e-6)


def test_rows_that_are_not_finite_are_found() -> None:
    logits = torch.zeros(5, 3)
    logits[1, 2], logits[2, 0], logits[3, 1] = math.nan, math.inf, -math.inf
    logits[4] = 3e38  # finite, though its sum is not
    assert sampling.finite_rows(logits).tolist() == [True, False, False, False, True]
