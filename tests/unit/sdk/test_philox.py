"""Philox4x32-10 gives the numbers that its authors published; a draw is a function of its counter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.sdk.reference.philox import philox4x32, uniforms

# Known answers of Random123 (kat_vectors, philox 4x32 10): counter, key, result.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]) -> None:
    words = philox4x32(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert tuple(words[0].tolist()) == result


def test_rows_do_not_see_each_other() -> None:
    counters = np.array([answer[0] for answer in KNOWN_ANSWERS], dtype=np.uint64)
    keys = np.array([answer[1] for answer in KNOWN_ANSWERS], dtype=np.uint64)
    assert [tuple(row) for row in philox4x32(counters, keys).tolist()] == [
        answer[2] for answer in KNOWN_ANSWERS
    ]


def draw(seed: int, choice: int, index: int) -> float:
    arrays = (np.array([value], dtype=np.uint64) for value in (seed, choice, index))
    return float(uniforms(*arrays)[0])


seeds = st.integers(0, 2**64 - 1)


@given(seeds, st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_a_draw_is_in_range_and_every_part_of_its_counter_matters(seed: int, choice: int, index: int) -> None:
    value = draw(seed, choice, index)
    assert 0.0 <= value < 1.0
    others = (
        draw(seed ^ 1, choice, index),
        draw(seed ^ (1 << 63), choice, index),
        draw(seed, choice ^ 1, index),
        draw(seed, choice, index ^ 1),
    )
    assert value not in others


def test_draws_are_uniform() -> None:
    count = 20_000
    values = uniforms(
        np.full(count, 12345, dtype=np.uint64),
        np.zeros(count, dtype=np.uint64),
        np.arange(count, dtype=np.uint64),
    )
    histogram, _ = np.histogram(values, bins=20, range=(0, 1))
    expected = count / 20
    # Chi-squared with 19 degrees of freedom: 43.8 is passed by chance once in a thousand.
    assert float(((histogram - expected) ** 2 / expected).sum()) < 43.8
