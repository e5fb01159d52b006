"""Rows in int8 (`quantization=a8`): the kernel against the same arithmetic in numpy, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plugins.cpu.native.library import BLOCKS, ENCODINGS
from plugins.sdk.runner import FloatArray
from plugins.sdk.step_program import A8, DecoderShape, DecoderWeights, DrawSettings
from tests.unit.cpu_plugin import int8_arithmetic
from tests.unit.cpu_plugin.decoder_samples import (
    SHAPE,
    instruction_sets,
    random_weights,
    start,
)

PROMPT = [5, 17, 80, 3, 41, 9, 60, 22, 7, 11, 90, 33, 4]
WIDE = replace(SHAPE, hidden=160, inner=416, vocab_size=131)
SIZES = {"small": SHAPE, "wide": WIDE}


def inputs(rows: int, inner: int) -> FloatArray:
    """Rows whose blocks differ in size by orders of magnitude."""
    rng = np.random.default_rng(rows)
    size = np.exp(rng.uniform(-9, 9, (rows, inner // 32))).repeat(32, axis=1)
    return (rng.standard_normal((rows, inner)) * size).astype(np.float32)


def assert_same_bits(made: FloatArray, expected: FloatArray, where: str) -> None:
    """Where not a number is expected, any of them will do."""
    missing = np.isnan(expected)
    assert (np.isnan(made) == missing).all(), where
    assert made[~missing].tobytes() == expected[~missing].tobytes(), where


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("encoding", BLOCKS)
def test_products_are_those_of_the_definition_for_any_number_of_rows(
    encoding: str, size: str, instruction_set: str
) -> None:
    shape = SIZES[size]
    weights = random_weights(shape, encoding)
    session = start(weights, shape, threads=2, instruction_set=instruction_set, quantization=A8)
    (layer, *_) = weights.layers
    for name, matrix in (("head", weights.head), ("down", layer.down)):
        for rows in (*range(1, 41), 97, 130):
            x = inputs(rows, matrix.inner)
            expected = int8_arithmetic.multiply(x, matrix)
            assert_same_bits(session.program.multiply(name, x), expected, f"{rows} rows of {name}")


def extreme_rows(inner: int) -> dict[str, FloatArray]:
    """One row each."""
    plain = inputs(1, inner)[0]
    halves = np.where(np.arange(inner) % 2, 0.5, -1.5).astype(np.float32)
    halves[::32] = 127.0  # a scale of 1: every other value lies in the middle
    rows = {
        "zeros": np.zeros(inner),
        "signed zeros": np.full(inner, -0.0),
        "halves": halves,
        "one huge value": np.where(np.arange(inner) == 5, 3e38, plain),
        "nearly too large": np.full(inner, 1e36),
        "denormals": plain * 1e-42,
        "the smallest denormal": np.where(np.arange(inner) == 9, 1e-45, 0.0),
        "about 2^-120": np.linspace(-1.1, 1.1, inner) * 2.0**-120,
        "infinite": np.where(np.arange(inner) == 40, np.inf, plain),
        "not a number": np.where(np.arange(inner) == 3, np.nan, plain),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("encoding", BLOCKS)
def test_extreme_rows_follow_the_definition_and_touch_no_other_row(
    encoding: str, instruction_set: str
) -> None:
    weights = random_weights(encoding=encoding)
    session = start(weights, instruction_set=instruction_set, quantization=A8)
    rows = extreme_rows(SHAPE.hidden)
    x = np.stack(list(rows.values()))
    expected = int8_arithmetic.multiply(x, weights.head)
    made = session.program.multiply("head", x)
    for index, name in enumerate(rows):
        assert_same_bits(made[index], expected[index], name)
        alone = session.program.multiply("head", x[index : index + 1])
        assert_same_bits(alone[0], expected[index], f"{name}, alone")
    finite = [np.isfinite(each).all() for each in made]
    assert finite == [name not in ("infinite", "not a number") for name in rows]


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("encoding", BLOCKS)
def test_weights_at_the_ends_of_their_range_do_not_saturate(encoding: str, instruction_set: str) -> None:
    weights = random_weights(encoding=encoding)
    blocks = weights.head.rows.reshape(SHAPE.vocab_size, SHAPE.hidden // 32, -1)
    first = blocks.shape[-1] - (32 if encoding == "Q8_0" else 16)
    blocks[:, :, first:] = np.where(np.arange(SHAPE.vocab_size) % 2, 0x80, 0xFF)[:, None, None]
    session = start(weights, instruction_set=instruction_set, quantization=A8)
    for value in (1.0, -1.0):
        x = np.full((3, SHAPE.hidden), value, dtype=np.float32)
        made = session.program.multiply("head", x)
        assert_same_bits(made, int8_arithmetic.multiply(x, weights.head), f"{value}")


@pytest.mark.parametrize("encoding", sorted(set(ENCODINGS) - set(BLOCKS)))
def test_weights_that_are_no_blocks_are_multiplied_in_float32(encoding: str) -> None:
    weights = random_weights(encoding=encoding)
    rounded, plain = (start(weights, quantization=each).run([(PROMPT, 0, [1])]).logits for each in (A8, ""))
    assert rounded.tobytes() == plain.tobytes()


def test_each_product_goes_by_its_own_encoding() -> None:
    """Rows for one product in int8, for the next in float32, and the other way round."""
    blocks, plain = random_weights(encoding="Q4_1", bias=True), random_weights(encoding="F16", bias=True)
    names = ("query", "key", "value", "out", "gate", "up", "down")
    parts = {"qkv": names[:3], "out": names[3:4], "gate_up": names[4:6], "down": names[6:]}
    expected = start(blocks, quantization=A8).run([(PROMPT, 0, [1])]).logits
    for product, fields in parts.items():
        layers = [
            replace(layer, **{field: getattr(other, field) for field in fields})
            for layer, other in zip(blocks.layers, plain.layers, strict=True)
        ]
        mixed = replace(blocks, layers=layers)
        whole = start(mixed, quantization=A8).run([(PROMPT, 0, [1])], every=True).logits
        alone = start(mixed, quantization=A8)
        rows = [alone.run([(PROMPT[i : i + 1], i, [1])]).logits[0] for i in range(len(PROMPT))]
        assert np.isfinite(whole).all(), product
        assert np.stack(rows).tobytes() == whole.tobytes(), product
        assert whole[-1].tobytes() != expected[0].tobytes(), product


def logits_of(shape: DecoderShape, weights: DecoderWeights, quantization: str, name: str = "") -> FloatArray:
    session = start(weights, shape, instruction_set=name, quantization=quantization)
    return session.run([(PROMPT, 0, [1])], every=True).logits


@pytest.mark.parametrize("encoding", BLOCKS)
def test_a_whole_step_is_near_the_one_in_float32_and_not_the_same(encoding: str) -> None:
    weights = random_weights(WIDE, encoding, bias=True)
    plain, rounded = (logits_of(WIDE, weights, each) for each in ("", A8))
    assert rounded.tobytes() != plain.tobytes()
    # Each row of a product is off by some 0.4 % of its size.
    assert np.abs(rounded - plain).max() < 0.05 * np.abs(plain).max()


def test_instruction_sets_agree_bit_for_bit() -> None:
    fused = [name for name in instruction_sets() if name != "baseline"]
    if len(fused) < 2:
        pytest.skip(f"only {fused} of the fused instruction sets run here")
    weights = random_weights(WIDE, "Q4_1", bias=True)
    assert len({logits_of(WIDE, weights, A8, name).tobytes() for name in fused}) == 1


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_long_context_has_the_same_bits_for_any_threads_batch_and_chunks(threads: int) -> None:
    weights = random_weights(encoding="Q4_1")
    rng = np.random.default_rng(530)
    tokens: list[int] = rng.integers(0, SHAPE.vocab_size, 530).tolist()
    pages = list(range(34))
    whole = start(weights, quantization=A8).run([(tokens, 0, pages)]).logits
    session = start(weights, threads=threads, quantization=A8)
    for begin, end in ((0, 100), (100, 101), (101, 529)):
        session.run([(tokens[begin:end], begin, pages)])
    neighbours = [(tokens[: 3 + row], 0, [60 + row]) for row in range(12)]
    alone = session.run([(tokens[529:], 529, pages)]).logits
    among = session.run([*neighbours[:6], (tokens[529:], 529, pages), *neighbours[6:]]).logits[6:7]
    assert alone.tobytes() == whole.tobytes()
    assert among.tobytes() == whole.tobytes()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_row_that_is_not_finite_fails_alone(value: float) -> None:
    plain = random_weights(encoding="F32")
    plain.embedding.rows.view(np.float32)[8, 3] = value
    weights = replace(random_weights(encoding="Q4_0"), embedding=plain.embedding)
    runs = [([1, 2], 0, [0]), ([1, 8], 0, [1]), ([8], 0, [2]), ([4], 0, [3])]
    outputs = start(weights, quantization=A8).run(runs, draws=greedy(4))
    assert outputs.token_ids is not None
    assert (outputs.token_ids < 0).tolist() == [False, True, True, False]
    assert np.isnan(outputs.logits[1:3]).all()
    assert np.isfinite(outputs.logits[[0, 3]]).all()


def greedy(count: int) -> DrawSettings:
    return DrawSettings(
        temperature=np.zeros(count, dtype=np.float32),
        top_k=np.zeros(count, dtype=np.int64),
        top_p=np.ones(count, dtype=np.float32),
        min_p=np.zeros(count, dtype=np.float32),
        seed=np.zeros(count, dtype=np.uint64),
        choice=np.zeros(count, dtype=np.uint64),
        output_index=np.zeros(count, dtype=np.int64),
    )
