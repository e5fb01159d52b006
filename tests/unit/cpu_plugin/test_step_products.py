"""The step kernel's products: any encoding, number of rows and instruction set gives the bits of float32."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from plugins.cpu.native.library import ENCODINGS
from plugins.sdk.runner import FloatArray
from tests.unit.cpu_plugin.decoder_samples import (
    decode_all,
    instruction_sets,
    random_weights,
    start,
    values_of,
)

ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 31, 97, 110)


def inputs(rows: int, inner: int = 64) -> FloatArray:
    return np.random.default_rng(rows).standard_normal((rows, inner)).astype(np.float32)


def in_blocks(x: FloatArray, most: int) -> FloatArray:
    """Rows as the kernel keeps them: blocks of at most `most` rows, each [inner, rows of it]."""
    count = -(-len(x) // most)
    bounds = [block * len(x) // count for block in range(count + 1)]
    parts = [x[low:high].T.ravel() for low, high in pairwise(bounds)]
    return np.concatenate(parts)


MOST_ROWS = {"avx512_vnni": 12, "avx512": 12, "avx2": 6, "baseline": 2}


def multiply(weights: object, rows: int, instruction_set: str, matrix: str = "head") -> FloatArray:
    session = start(weights, instruction_set=instruction_set)  # type: ignore[arg-type]
    x = in_blocks(inputs(rows), MOST_ROWS[instruction_set]).reshape(rows, -1)
    return session.program.multiply(matrix, x)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_product_with_weights_as_stored_has_the_bits_of_decoded_ones(
    encoding: str, instruction_set: str
) -> None:
    weights = random_weights(encoding=encoding)
    plain = decode_all(weights)
    for rows in ROWS:
        stored, expected = multiply(weights, rows, instruction_set), multiply(plain, rows, instruction_set)
        assert stored.tobytes() == expected.tobytes(), f"{rows} rows"


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_products_are_right(instruction_set: str) -> None:
    weights = random_weights(encoding="Q4_1")
    exact = values_of(weights.head).astype(np.float64)
    for rows in ROWS:
        made = multiply(weights, rows, instruction_set)
        np.testing.assert_allclose(made, inputs(rows) @ exact.T, atol=2e-5)


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_a_row_of_a_product_does_not_depend_on_its_neighbours(instruction_set: str) -> None:
    weights = random_weights(encoding="Q8_0")
    x = inputs(110)
    most = MOST_ROWS[instruction_set]
    session = start(weights, instruction_set=instruction_set)
    together = session.program.multiply("head", in_blocks(x, most).reshape(110, -1))
    for row in (0, 1, 50, 109):
        assert session.program.multiply("head", x[row : row + 1]).tobytes() == together[row].tobytes()


def test_instruction_sets_with_a_fused_multiply_add_agree_bit_for_bit() -> None:
    fused = [name for name in instruction_sets() if name != "baseline"]
    if len(fused) < 2:
        pytest.skip(f"only {fused} of the fused instruction sets run here")
    weights = random_weights(encoding="Q4_1", bias=True)
    prompt = list(range(5, 45))
    logits = [
        start(weights, instruction_set=name).run([(prompt, 0, [3, 1, 2])], every=True).logits.tobytes()
        for name in fused
    ]
    assert len(set(logits)) == 1
