"""Whole steps of the native kernel: against the model's definition, over pages, splits, threads, settings."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from meshkit.errors import InvalidArgument
from plugins.cpu.native.library import ENCODINGS
from plugins.sdk.reference import sampling
from plugins.sdk.reference.philox import uniforms
from plugins.sdk.runner import FloatArray
from plugins.sdk.step_program import DecoderShape, DecoderWeights, DrawSettings, ProgramInputs
from tests.unit.cpu_plugin.decoder_samples import (
    SHAPE,
    Session,
    decode_all,
    instruction_sets,
    int32,
    random_weights,
    start,
    values_of,
)

PROMPT = [5, 17, 80, 3, 41, 9, 60, 22, 7, 11, 90, 33, 4]


def expected_logits(shape: DecoderShape, weights: DecoderWeights, tokens: list[int]) -> FloatArray:
    """Logits of every token, in float64, by the definition of the model."""
    x = values_of(weights.embedding).astype(np.float64)[tokens]
    cos, sin = np.split(weights.cos_sin.astype(np.float64)[: len(tokens)], 2, axis=1)
    for layer in weights.layers:
        normed = _rms_norm(x, layer.input_norm, shape.eps)
        heads = [_project(normed, part).reshape(len(tokens), -1, shape.head_dim)
                 for part in (layer.query, layer.key, layer.value)]  # fmt: skip
        attended = _attend(_rotate(heads[0], cos, sin), _rotate(heads[1], cos, sin), heads[2], shape.scale)
        x = x + _project(attended, layer.out)
        normed = _rms_norm(x, layer.post_norm, shape.eps)
        gate, up = _project(normed, layer.gate), _project(normed, layer.up)
        x = x + _project(gate / (1 + np.exp(-gate)) * up, layer.down)
    logits: FloatArray = _project(_rms_norm(x, weights.final_norm, shape.eps), weights.head)
    return logits


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _project(x: Any, matrix: Any) -> Any:
    bias = 0.0 if matrix.bias is None else matrix.bias
    return x @ values_of(matrix).astype(np.float64).T + bias


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _attend(query: Any, key: Any, value: Any, scale: float) -> Any:
    count, heads, size = query.shape
    key, value = (np.repeat(part, heads // part.shape[1], axis=1) for part in (key, value))
    scores = np.einsum("nhd,lhd->hnl", query, key) * scale
    scores[:, np.triu(np.ones((count, count), dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hnl,lhd->nhd", weights, value).reshape(count, heads * size)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("page_size", [1, 5, 16, 48])
def test_logits_are_those_of_the_model(instruction_set: str, page_size: int) -> None:
    weights = random_weights(encoding="Q8_0", bias=True)
    session = start(weights, instruction_set=instruction_set, page_size=page_size)
    pages = np.random.default_rng(2).permutation(80)[: -(-len(PROMPT) // page_size)].tolist()
    made = session.run([(PROMPT, 0, pages)], every=True).logits
    np.testing.assert_allclose(made, expected_logits(SHAPE, weights, PROMPT), atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 96},
        {"heads": 5, "kv_heads": 1, "head_dim": 32, "inner": 160},
        {"heads": 2, "kv_heads": 2, "head_dim": 128},
        {"heads": 2, "kv_heads": 1, "head_dim": 256, "vocab_size": 100},
        {"heads": 2, "kv_heads": 1, "head_dim": 80},
    ],
)
def test_models_of_other_sizes_run(changes: dict[str, int]) -> None:
    shape = replace(SHAPE, **changes, scale=changes["head_dim"] ** -0.5)  # type: ignore[arg-type]
    weights = random_weights(shape)
    for name in instruction_sets():
        session = start(weights, shape, instruction_set=name)
        made = session.run([(PROMPT, 0, [7])], every=True).logits
        tokens = expected_logits(shape, weights, PROMPT)
        np.testing.assert_allclose(made, tokens, atol=2e-4, err_msg=name)


def tokens_of(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, SHAPE.vocab_size, count).tolist()
    return tokens


def pages_for(count: int, first: int = 0) -> list[int]:
    return list(range(first, first - (-count // 16)))


def test_contexts_longer_than_a_split_are_right() -> None:
    weights, tokens = random_weights(), tokens_of(530)
    made = start(weights).run([(tokens, 0, pages_for(530))], every=True).logits
    np.testing.assert_allclose(made, expected_logits(SHAPE, weights, tokens), atol=2e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_long_context_has_the_same_bits_for_any_threads_batch_and_chunks(threads: int) -> None:
    weights, tokens = random_weights(encoding="Q4_1"), tokens_of(530)
    whole = start(weights).run([(tokens, 0, pages_for(530))]).logits
    session = start(weights, threads=threads)
    pages = pages_for(530)
    for begin, end in ((0, 100), (100, 101), (101, 529)):
        session.run([(tokens[begin:end], begin, pages)])
    neighbours = [(tokens_of(3 + row), 0, [60 + row]) for row in range(12)]
    alone = session.run([(tokens[529:], 529, pages)]).logits
    among = session.run([*neighbours[:6], (tokens[529:], 529, pages), *neighbours[6:]]).logits[6:7]
    assert alone.tobytes() == whole.tobytes()
    assert among.tobytes() == whole.tobytes()


def settings_of(rng: np.random.Generator, count: int) -> DrawSettings:
    """Every third row greedy; filters on and off."""
    temperature = rng.uniform(0.2, 2.0, count)
    temperature[::3] = 0.0
    return DrawSettings(
        temperature=temperature.astype(np.float32),
        top_k=rng.choice([0, 1, 5, 60, 200], count),
        top_p=rng.choice([1.0, 0.9, 0.5, 0.999], count).astype(np.float32),
        min_p=rng.choice([0.0, 0.05, 0.5], count).astype(np.float32),
        seed=rng.integers(0, 2**63, count).astype(np.uint64),
        choice=rng.integers(0, 4, count).astype(np.uint64),
        output_index=rng.integers(0, 2**40, count),
    )


def reference_tokens(logits: FloatArray, draws: DrawSettings) -> list[int]:
    numbers = uniforms(draws.seed, draws.choice, draws.output_index.astype(np.uint64))
    random = draws.temperature > 0
    arrays = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, numbers)
    drawn = sampling.sample(
        torch.from_numpy(logits[random]), *(torch.from_numpy(array[random]) for array in arrays)
    )
    tokens = logits.argmax(axis=-1)
    tokens[random] = drawn.numpy()
    made: list[int] = tokens.tolist()
    return made


@pytest.mark.parametrize("vocab_size", [97, 3000])
def test_tokens_are_drawn_as_the_reference_draws_them(vocab_size: int) -> None:
    shape = replace(SHAPE, vocab_size=vocab_size)
    session = start(random_weights(shape), shape)
    rng = np.random.default_rng(4)
    for _ in range(10):
        runs = [(rng.integers(0, vocab_size, 4).tolist(), 0, [page]) for page in range(30)]
        draws = settings_of(rng, len(runs))
        outputs = session.run(runs, draws=draws)
        assert outputs.token_ids is not None
        assert outputs.token_ids.tolist() == reference_tokens(outputs.logits, draws)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_parts_of_a_product_in_different_encodings_are_joined_in_float32(encoding: str) -> None:
    stored = random_weights(encoding=encoding, bias=True)
    plain = decode_all(stored)
    mixed = [
        replace(layer, key=whole.key, up=whole.up)
        for layer, whole in zip(stored.layers, plain.layers, strict=True)
    ]
    made = start(replace(stored, layers=mixed)).run([(PROMPT, 0, [1])]).logits
    assert made.tobytes() == start(plain).run([(PROMPT, 0, [1])]).logits.tobytes()


def test_equal_logits_give_the_lowest_token() -> None:
    weights = random_weights()
    weights.head.rows[:] = 0
    outputs = start(weights).run([(PROMPT, 0, [0])], draws=greedy(1))
    assert outputs.token_ids is not None
    assert outputs.token_ids.tolist() == [0]


def greedy(count: int) -> DrawSettings:
    mixed = settings_of(np.random.default_rng(0), count)
    return replace(mixed, temperature=np.zeros(count, dtype=np.float32))


def test_a_row_that_is_not_finite_fails_alone() -> None:
    weights = random_weights()
    weights.embedding.rows.view(np.float32)[8, 3] = np.inf
    runs = [([1, 2], 0, [0]), ([1, 8], 0, [1]), ([8], 0, [2]), ([4], 0, [3])]
    outputs = start(weights).run(runs, draws=greedy(4))
    assert outputs.token_ids is not None
    assert (outputs.token_ids < 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("tokens", "first", "pages"),
    [
        ([97], 0, [0]),
        ([-1], 0, [0]),
        ([1], 1024, [0] * 65),
        ([1], 0, [80]),
        ([1, 2], 15, [0, -1]),
        ([1], 16, [0]),
    ],
)
def test_what_points_outside_the_model_is_refused(tokens: list[int], first: int, pages: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="token, a position or a page"):
        start(random_weights()).run([(tokens, first, pages)])


def test_a_step_without_sampling_rows_only_writes_the_cache() -> None:
    weights = random_weights()
    session, other = start(weights), start(weights)
    whole = other.run([(PROMPT, 0, [3])]).logits
    assert _fill(session, PROMPT[:-1]).shape == (0, SHAPE.vocab_size)
    assert session.run([(PROMPT[-1:], len(PROMPT) - 1, [3])]).logits.tobytes() == whole.tobytes()


def _fill(session: Session, tokens: list[int]) -> FloatArray:
    inputs = ProgramInputs(
        token_ids=int32(tokens),
        positions=int32(range(len(tokens))),
        sequences=int32([0] * len(tokens)),
        tables=int32([[3]]),  # type: ignore[list-item]
        sampled_rows=int32([]),
        sampled_slots=int32([]),
        draws=None,
    )
    return session.program.run(inputs).logits


WITHOUT_ROOM_FOR_THREADS = """
import ctypes, resource
from plugins.cpu.native.library import Sizes
from plugins.cpu.native.loading import load_kernel
library = load_kernel().library
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
sizes = Sizes(1, 32, 32, 1, 1, 32, 32, 32, 1e-5, 1.0)
print(library.create(ctypes.byref(sizes), 0, library.kernels, 200))
"""


def test_a_system_that_gives_no_more_threads_is_refused_and_ends_no_process() -> None:
    command = [sys.executable, "-c", WITHOUT_ROOM_FOR_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.parametrize("quantization", ["", "a8"])
def test_threads_that_are_stopped_in_the_middle_of_a_piece_change_no_bit(quantization: str) -> None:
    # More threads than processors, and pieces that take a while: what one has in hand when it is stopped,
    # another does again.
    shape = replace(SHAPE, hidden=256, inner=2048, layers=4)
    weights = random_weights(shape, encoding="Q4_1")
    alone, crowd = (start(weights, shape, threads=count, quantization=quantization) for count in (1, 4))
    for step in range(60):
        rows = [([5 + (step + row) % 80], step % 16, [row]) for row in range(1 + step % 5)]
        expected, made = alone.run(rows, every=True).logits, crowd.run(rows, every=True).logits
        assert made.tobytes() == expected.tobytes(), step


def test_a_program_may_end_while_a_thread_of_it_is_late() -> None:
    # Its memory goes right behind a step whose last pieces another thread may have taken over.
    shape = replace(SHAPE, hidden=256, inner=2048)
    weights = random_weights(shape, encoding="Q4_1")
    for _ in range(40):
        made = start(weights, shape, threads=8).run([([5], 0, [0])]).logits
        assert np.isfinite(made).all()
