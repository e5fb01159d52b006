"""Small decoders with random weights in any encoding, for tests of the step kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshkit.modelstore import BLOCK_LAYOUTS
from plugins.cpu.native.loading import load_kernel
from plugins.cpu.step_program import CpuStepProgram
from plugins.sdk.runner import AllowedTokens, FloatArray, IntArray
from plugins.sdk.step_program import (
    LLAMA,
    DecoderLayer,
    DecoderShape,
    DecoderWeights,
    DrawSettings,
    ProgramInputs,
    ProgramOutputs,
    StoredMatrix,
)
from worker_svc.layers.rotary import build_cos_sin
from worker_svc.weights import dequantize

SHAPE = DecoderShape(
    pattern=LLAMA,
    layers=2,
    hidden=64,
    inner=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=97,
    context_tokens=1024,
    eps=1e-5,
    scale=0.25,
)
PAGE = 16
INSTRUCTION_SETS = ("avx512_vnni", "avx512", "avx2", "baseline")


def instruction_sets() -> list[str]:
    """Those that run here; the baseline does everywhere."""
    library = load_kernel().library
    assert library is not None, load_kernel().problem
    return [name for name in INSTRUCTION_SETS if library.find_kernels(name.encode())]


def random_matrix(
    rng: np.random.Generator, outputs: int, inner: int, encoding: str, *, bias: bool = False
) -> StoredMatrix:
    """Values of spread about 1 / sqrt(inner), whatever the encoding."""
    spread = inner**-0.5
    values = (rng.standard_normal((outputs, inner)) * spread).astype(np.float32)
    offsets = rng.standard_normal(outputs).astype(np.float32) if bias else None
    if encoding == "F32":
        return StoredMatrix(encoding, values.view(np.uint8), inner, offsets)
    if encoding == "F16":
        return StoredMatrix(encoding, values.astype(np.float16).view(np.uint8), inner, offsets)
    if encoding == "BF16":
        halves = (values.view(np.uint32) >> 16).astype(np.uint16)
        return StoredMatrix(encoding, halves.view(np.uint8), inner, offsets)
    count, size = BLOCK_LAYOUTS[encoding]
    blocks = rng.integers(0, 256, (outputs, inner // count, size), dtype=np.uint8)
    steps = {"Q8_0": 60.0, "Q4_0": 5.0, "Q4_1": 5.0}[encoding]
    scales = (rng.uniform(0.5, 1.5, (outputs, inner // count)) * spread / steps).astype(np.float16)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    if encoding == "Q4_1":
        minima = (scales.astype(np.float32) * -7.5).astype(np.float16)
        blocks[..., 2:4] = minima[..., None].view(np.uint8)
    return StoredMatrix(encoding, blocks.reshape(outputs, -1), inner, offsets)


def in_blocks(matrix: StoredMatrix, encoding: str) -> StoredMatrix:
    """An F32 matrix rounded to blocks of Q8_0 or Q4_1."""
    values = matrix.rows.view(np.float32).reshape(len(matrix.rows), -1, 32)
    low, high = values.min(axis=-1, keepdims=True), values.max(axis=-1, keepdims=True)
    if encoding == "Q8_0":
        scale = (np.maximum(-low, high) / 127).astype(np.float16)
        levels = np.rint(values / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
        parts = [scale.view(np.uint8), levels.view(np.uint8)]
    else:
        scale = ((high - low) / 15).astype(np.float16)
        minimum = low.astype(np.float16)
        levels = np.rint((values - minimum) / scale.astype(np.float32)).clip(0, 15).astype(np.uint8)
        parts = [scale.view(np.uint8), minimum.view(np.uint8), levels[..., :16] | levels[..., 16:] << 4]
    rows = np.concatenate(parts, axis=-1).reshape(len(values), -1)
    return StoredMatrix(encoding, rows, matrix.inner, matrix.bias)


def decoded(matrix: StoredMatrix) -> StoredMatrix:
    """The same numbers in float32."""
    flat = torch.from_numpy(np.ascontiguousarray(matrix.rows).reshape(-1))
    values = dequantize(flat, matrix.encoding).view(len(matrix.rows), matrix.inner).numpy()
    return StoredMatrix("F32", values.view(np.uint8), matrix.inner, matrix.bias)


def values_of(matrix: StoredMatrix) -> FloatArray:
    """float32 [outputs, inner]."""
    values: FloatArray = decoded(matrix).rows.view(np.float32)
    return values


def random_weights(
    shape: DecoderShape = SHAPE, encoding: str = "F32", *, seed: int = 1, bias: bool = False
) -> DecoderWeights:
    """Weights of a model; its layers can be read any number of times."""
    rng = np.random.default_rng(seed)
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(outputs: int, inner: int) -> StoredMatrix:
        return random_matrix(rng, outputs, inner, encoding, bias=bias)

    def norm() -> FloatArray:
        return rng.uniform(0.5, 1.5, shape.hidden).astype(np.float32)

    layers = [
        DecoderLayer(
            input_norm=norm(),
            query=matrix(query, shape.hidden),
            key=matrix(keys, shape.hidden),
            value=matrix(keys, shape.hidden),
            out=matrix(shape.hidden, query),
            post_norm=norm(),
            gate=matrix(shape.inner, shape.hidden),
            up=matrix(shape.inner, shape.hidden),
            down=matrix(shape.hidden, shape.inner),
        )
        for _ in range(shape.layers)
    ]
    table = build_cos_sin(
        head_dim=shape.head_dim,
        context=shape.context_tokens,
        theta=1e4,
        scaling=None,
        device=torch.device("cpu"),
    )
    embedding = random_matrix(rng, shape.vocab_size, shape.hidden, encoding)
    head = random_matrix(rng, shape.vocab_size, shape.hidden, encoding)
    return DecoderWeights(embedding, layers, norm(), head, table.numpy())


def decode_all(weights: DecoderWeights) -> DecoderWeights:
    """The same model in float32."""
    layers = [DecoderLayer(**_decoded_fields(layer)) for layer in weights.layers]
    return DecoderWeights(
        decoded(weights.embedding), layers, weights.final_norm, decoded(weights.head), weights.cos_sin
    )


def _decoded_fields(layer: DecoderLayer) -> dict[str, Any]:
    values = {name: getattr(layer, name) for name in layer.__slots__}
    return {name: decoded(each) if isinstance(each, StoredMatrix) else each for name, each in values.items()}


@dataclass
class Session:
    """A program with a cache of its own, driven by whole sequences."""

    program: CpuStepProgram
    page_size: int
    pages: int

    def run(
        self,
        runs: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        *,
        draws: DrawSettings | None = None,
        every: bool = False,
        allowed: AllowedTokens | None = None,
    ) -> ProgramOutputs:
        """runs: (tokens, position of the first, pages) of each sequence. Logits of the last token of each, or
        of every token.
        """
        counts = [len(tokens) for tokens, _, _ in runs]
        tables = np.zeros((len(runs), max(len(pages) for _, _, pages in runs)), dtype=np.int32)
        for row, (_, _, pages) in enumerate(runs):
            tables[row, : len(pages)] = pages
        ends = np.cumsum(counts) - 1
        rows = np.arange(sum(counts)) if every else ends
        outputs = self.program.run(
            ProgramInputs(
                token_ids=int32([token for tokens, _, _ in runs for token in tokens]),
                positions=int32([start + i for tokens, start, _ in runs for i in range(len(tokens))]),
                sequences=int32(np.repeat(np.arange(len(runs)), counts)),
                tables=tables,
                sampled_rows=int32(rows),
                sampled_slots=int32(np.arange(len(rows))),
                draws=draws,
                allowed=allowed,
            )
        )
        return ProgramOutputs(outputs.logits.copy(), outputs.token_ids)


def int32(values: Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> IntArray:
    """An array of int32."""
    return np.asarray(values, dtype=np.int32)


def start(
    weights: DecoderWeights,
    shape: DecoderShape = SHAPE,
    *,
    threads: int = 1,
    instruction_set: str = "",
    quantization: str = "",
    page_size: int = PAGE,
    pages: int = 80,
) -> Session:
    """A session of its own program."""
    library = load_kernel().library
    assert library is not None, load_kernel().problem
    program = CpuStepProgram(
        library,
        shape,
        weights,
        threads=threads,
        instruction_set=instruction_set,
        quantization=quantization,
    )
    cache = torch.zeros(shape.layers, 2, pages, page_size, shape.kv_heads, shape.head_dim)
    program.attach_cache(cache, page_count=pages, page_size=page_size)
    return Session(program, page_size, pages)
