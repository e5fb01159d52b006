"""The step kernel keeps to allowed tokens, and draws as the reference does from logits without the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshkit.errors import InvalidArgument
from plugins.sdk.runner import AllowedTokens, FloatArray
from tests.unit.cpu_plugin.decoder_samples import SHAPE, random_weights, start
from tests.unit.cpu_plugin.test_step_program import reference_tokens, settings_of

ROWS = 24


def random_bits(rng: np.random.Generator, vocab_size: int) -> AllowedTokens:
    """Every fourth row is free; others may take from one token to all."""
    rows = np.arange(ROWS, dtype=np.int32)
    rows[::4] = -1
    bits = rng.random((ROWS, -(-vocab_size // 32) * 32)) < rng.choice([0.001, 0.05, 0.5, 1.0], (ROWS, 1))
    bits[np.arange(ROWS), rng.integers(0, vocab_size, ROWS)] = True
    bits[:, vocab_size:] = False
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return AllowedTokens(rows, np.ascontiguousarray(words))


def without_others(logits: FloatArray, allowed: AllowedTokens) -> FloatArray:
    masked: FloatArray = logits.copy()
    bits = np.unpackbits(allowed.words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    for row in np.flatnonzero(allowed.rows >= 0):
        masked[row, bits[allowed.rows[row]] == 0] = -np.inf
    return masked


@pytest.mark.parametrize("vocab_size", [97, 3000])
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_are_drawn_as_the_reference_draws_them_without_the_others(
    vocab_size: int, threads: int
) -> None:
    shape = replace(SHAPE, vocab_size=vocab_size)
    session = start(random_weights(shape), shape, threads=threads)
    rng = np.random.default_rng(5)
    for _ in range(8):
        runs = [(rng.integers(0, vocab_size, 4).tolist(), 0, [page]) for page in range(ROWS)]
        draws, allowed = settings_of(rng, ROWS), random_bits(rng, vocab_size)
        made = session.run(runs, draws=draws, allowed=allowed)
        free = session.run(runs, draws=draws)
        assert made.token_ids is not None
        assert free.token_ids is not None
        assert made.logits.tobytes() == free.logits.tobytes()
        assert made.token_ids.tolist() == reference_tokens(without_others(made.logits, allowed), draws)
        assert made.token_ids[::4].tolist() == free.token_ids[::4].tolist()


def test_a_program_that_was_bound_is_free_in_its_next_step() -> None:
    session = start(random_weights())
    rng = np.random.default_rng(6)
    draws = settings_of(rng, 1)
    runs = [([1, 2, 3], 0, [0])]
    free = session.run(runs, draws=draws).token_ids
    assert free is not None
    words = np.zeros((1, -(-SHAPE.vocab_size // 32)), dtype=np.uint32)
    other = (int(free[0]) + 1) % SHAPE.vocab_size
    words[0, other // 32] = 1 << (other % 32)
    bound = session.run(
        runs, draws=draws, allowed=AllowedTokens(np.zeros(1, dtype=np.int32), words)
    ).token_ids
    assert bound is not None
    assert bound.tolist() == [other]
    again = session.run(runs, draws=draws).token_ids
    assert again is not None
    assert again.tolist() == free.tolist()


def test_bits_that_do_not_fit_the_step_are_refused() -> None:
    session = start(random_weights())
    draws = settings_of(np.random.default_rng(7), 1)
    width = -(-SHAPE.vocab_size // 32)
    for rows, shape in (([0, 0], (1, width)), ([1], (1, width)), ([0], (1, width + 1))):
        allowed = AllowedTokens(np.array(rows, dtype=np.int32), np.ones(shape, dtype=np.uint32))
        with pytest.raises(InvalidArgument):
            session.run([([1], 0, [0])], draws=draws, allowed=allowed)
