"""Models of Llama's pattern as one native call a step. No torch: numpy arrays in, numpy arrays out."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from meshkit.errors import Internal, InvalidArgument
from meshkit.telemetry.logging import get_logger
from plugins.cpu.native.library import (
    BLOCKS,
    ENCODINGS,
    MATRICES,
    PHASES,
    RUN_FIELDS,
    SETTINGS,
    VECTORS,
    Sizes,
    StepArguments,
    StepLibrary,
)
from plugins.cpu.phase_times import describe_phases
from plugins.sdk.runner import AllowedTokens, FloatArray, IntArray
from plugins.sdk.step_program import (
    A8,
    LLAMA,
    DecoderLayer,
    DecoderShape,
    DecoderWeights,
    DrawSettings,
    ProgramInputs,
    ProgramOutputs,
    StepProgram,
    StepProgramCapability,
    StoredMatrix,
)
from plugins.sdk.timing import OperatorTimes, StopTiming

log = get_logger(__name__)

_GATE_STRIPE = 16
"""A panel of 32 columns holds so many gates, then their ups: both are in one tile when silu wants them."""
KV_LAYOUT = "layer_kv_page_head_(keys: value_token, values: token_value)"


def describe_program(
    library: StepLibrary | None, problem: str, *, instruction_set: str, threads: int
) -> StepProgramCapability:
    """The entry of the capability report."""
    if library is None:
        return StepProgramCapability(LLAMA, reason=problem)
    return StepProgramCapability(
        LLAMA,
        dtypes=("float32",),
        kv_cache_dtypes=("float32",),
        encodings=ENCODINGS,
        constraints=(
            "K % 32 == 0 and I % 32 == 0 and H * D % 32 == 0",
            "D in (16, 32, 48, 64, 80, 96, 128, 256)",
            "H % G == 0 and H // G <= 16",
        ),
        kv_layout=KV_LAYOUT,
        implementation=f"native kernel, {instruction_set or library.instruction_set}, threads: {threads}; "
        "weights as stored, decoded exactly",
        quantizations=("", A8),
    )


class CpuStepProgram(StepProgram):
    """Owns the packed weights and a team of threads."""

    def __init__(
        self,
        library: StepLibrary,
        shape: DecoderShape,
        weights: DecoderWeights,
        *,
        threads: int,
        instruction_set: str = "",
        quantization: str = "",
    ) -> None:
        """instruction_set: "" for the best of this processor. quantization: "" or A8. Raises MemoryError."""
        self._library = library
        self._shape = shape
        self._weight_bytes = 0
        self._int8 = quantization == A8
        self._rounding = 0
        self._kernels = library.find_kernels(instruction_set.encode())
        self._implementation = f"native step kernel, {instruction_set or library.instruction_set}"
        sizes = Sizes(
            shape.layers,
            shape.hidden,
            shape.inner,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.vocab_size,
            shape.context_tokens,
            shape.eps,
            shape.scale,
        )
        self._program = library.create(ctypes.byref(sizes), self._int8, self._kernels, threads)
        if self._program is None:
            raise MemoryError(f"the step kernel gets no memory, or not its {threads} threads")
        self._free = weakref.finalize(self, library.destroy, self._program)
        self._arguments = StepArguments()
        self._cache: Any = None
        self._draws: DrawSettings | None = None
        self._logits = np.empty((0, shape.vocab_size), dtype=np.float32)
        self._pack(weights)
        if self._int8 and not self._rounding:
            log.warning("quantization rounds nothing: no matrix is in 4- or 8-bit blocks", quantization=A8)

    def __repr__(self) -> str:
        return f"<CpuStepProgram {self._library.instruction_set} layers={self._shape.layers}>"

    @property
    def weight_bytes(self) -> int:
        """Of the packed weights and the embedding."""
        return self._weight_bytes

    def attach_cache(self, cache: Any, *, page_count: int, page_size: int) -> None:
        """A contiguous float32 torch tensor of layers x 2 x pages x page x g x d numbers, in KV_LAYOUT."""
        self._cache = cache
        self._arguments.cache = cache.data_ptr()
        self._arguments.page_count, self._arguments.page_size = page_count, page_size

    def run(self, inputs: ProgramInputs) -> ProgramOutputs:
        """One native call, without the GIL.

        Raises:
            InvalidArgument: a token, a position or a page that is not there.
        """
        count = len(inputs.sampled_rows)
        logits = self._room(count)
        chosen = np.empty(count, dtype=np.int32)
        arrays = [
            _plain(each)
            for each in (
                inputs.token_ids,
                inputs.positions,
                inputs.sequences,
                inputs.tables,
                inputs.sampled_rows,
                inputs.sampled_slots,
                chosen,
            )
        ]
        arguments = self._arguments
        arguments.tokens, arguments.sampled = len(arrays[0]), count
        arguments.table_width = arrays[3].shape[1]
        (
            arguments.token_ids,
            arguments.positions,
            arguments.sequences,
            arguments.tables,
            arguments.sampled_rows,
            slots,
            arguments.chosen,
        ) = (each.ctypes.data for each in arrays)
        arguments.logits = logits.ctypes.data
        arguments.sampled_slots = slots if self._take_settings(inputs.draws) else None
        # Kept until the call is over: the kernel has pointers into it.
        bits = None if inputs.allowed is None else self._point_at(inputs.allowed, count)
        if bits is None:
            arguments.allowed_rows = arguments.allowed = None
        _check(self._library.run(self._program, ctypes.byref(arguments)), "a step")
        return ProgramOutputs(logits, chosen if inputs.draws is not None else None)

    def _point_at(self, allowed: AllowedTokens, count: int) -> AllowedTokens:
        """Hand the kernel what rows may take; its own copy where the arrays do not lie as it reads them.

        Raises:
            InvalidArgument: their shapes are not those of this step, which would be read past their end.
        """
        rows, words = _plain(allowed.rows), np.ascontiguousarray(allowed.words, dtype=np.uint32)
        width = -(-self._shape.vocab_size // 32)
        if words.ndim != 2 or words.shape[1] != width or len(rows) != count or (rows >= len(words)).any():
            raise InvalidArgument("allowed tokens do not fit the step's rows and vocabulary", field="plan")
        self._arguments.allowed_rows, self._arguments.allowed = rows.ctypes.data, words.ctypes.data
        return AllowedTokens(rows, words)

    def _take_settings(self, draws: DrawSettings | None) -> bool:
        """Point at the slots' settings, which stay where they are; whether there are any."""
        if draws is not None and draws is not self._draws:
            for name, dtype in SETTINGS.items():
                array = getattr(draws, name)
                if array.dtype != dtype or not array.flags.c_contiguous:
                    raise Internal(f"{name} of the slots is {array.dtype}; the step kernel takes {dtype}")
                setattr(self._arguments, name, array.ctypes.data)
            self._draws = draws
        return draws is not None

    def start_timing(self, *, most_runs: int) -> StopTiming:
        """Time the phases of steps by the first thread's clock; results stay bitwise the same."""
        status = self._library.start_timing(self._program, most_runs)
        _check(status, f"the times of {most_runs} phases")
        return partial(self._stop_timing, most_runs)

    def _stop_timing(self, most_runs: int) -> OperatorTimes:
        calls, seconds = np.zeros(len(PHASES), dtype=np.int64), np.zeros(len(PHASES))
        runs = np.zeros((most_runs, RUN_FIELDS), dtype=np.int64)
        taken = self._library.stop_timing(
            self._program, calls.ctypes.data, seconds.ctypes.data, runs.ctypes.data
        )
        return describe_phases(calls.tolist(), seconds.tolist(), runs[:taken], program=self._implementation)

    def multiply(self, matrix: str, x: FloatArray, *, layer: int = 0) -> FloatArray:
        """One product by itself, for benchmarks and tests.

        x [rows, inner]: in the kernel's blocks of rows, or row by row where they are rounded to int8.
        """
        outputs = self._outputs(matrix)
        made = np.empty((len(x), outputs), dtype=np.float32)
        place = (self._program, MATRICES.index(matrix), layer)
        status = self._library.multiply(*place, x.ctypes.data, len(x), made.ctypes.data)
        _check(status, "a product")
        return made

    def _outputs(self, matrix: str) -> int:
        shape = self._shape
        return {
            "qkv": (shape.heads + 2 * shape.kv_heads) * shape.head_dim,
            "out": shape.hidden,
            "gate_up": 2 * shape.inner,
            "down": shape.hidden,
            "head": shape.vocab_size,
        }[matrix]

    def _room(self, rows: int) -> FloatArray:
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._shape.vocab_size), dtype=np.float32)
        return self._logits[:rows]

    def _pack(self, weights: DecoderWeights) -> None:
        for index, layer in enumerate(weights.layers):
            self._pack_layer(index, layer)
        self._set_vector("final_norm", 0, weights.final_norm)
        self._set_vector("cos_sin", 0, weights.cos_sin)
        self._set_matrix("head", 0, weights.head)
        rows = np.ascontiguousarray(weights.embedding.rows)
        status = self._library.set_embedding(
            self._program, ENCODINGS.index(weights.embedding.encoding), rows.ctypes.data, rows.nbytes
        )
        _check(status, "the embedding")
        self._weight_bytes += rows.nbytes

    def _pack_layer(self, index: int, layer: DecoderLayer) -> None:
        self._set_vector("input_norm", index, layer.input_norm)
        self._set_vector("post_norm", index, layer.post_norm)
        self._set_matrix("qkv", index, join_matrices(self._alike(layer.query, layer.key, layer.value)))
        self._set_matrix("out", index, layer.out)
        self._set_matrix("gate_up", index, interleave(*self._alike(layer.gate, layer.up)))
        self._set_matrix("down", index, layer.down)

    def _alike(self, *parts: StoredMatrix) -> list[StoredMatrix]:
        """Parts of one product: as they are, or in float32 where their encodings differ."""
        if len({part.encoding for part in parts}) == 1:
            return list(parts)
        return [self._decode(part) for part in parts]

    def _decode(self, matrix: StoredMatrix) -> StoredMatrix:
        rows = np.ascontiguousarray(matrix.rows)
        values = np.empty((len(rows), matrix.inner), dtype=np.float32)
        encoding = ENCODINGS.index(matrix.encoding)
        place = (rows.ctypes.data, len(rows), matrix.inner, values.ctypes.data)
        self._library.decode(self._kernels, encoding, *place)
        return StoredMatrix("F32", values.view(np.uint8), matrix.inner, matrix.bias)

    def _set_vector(self, name: str, layer: int, values: FloatArray) -> None:
        flat = np.ascontiguousarray(values, dtype=np.float32).ravel()
        place = (self._program, VECTORS.index(name), layer)
        status = self._library.set_vector(*place, flat.ctypes.data, flat.size)
        _check(status, name)
        self._weight_bytes += flat.nbytes

    def _set_matrix(self, name: str, layer: int, matrix: StoredMatrix) -> None:
        rows = np.ascontiguousarray(matrix.rows)
        bias = None if matrix.bias is None else np.ascontiguousarray(matrix.bias, dtype=np.float32)
        status = self._library.set_matrix(
            self._program,
            MATRICES.index(name),
            layer,
            ENCODINGS.index(matrix.encoding),
            rows.ctypes.data,
            len(rows),
            matrix.inner,
            bias.ctypes.data if bias is not None else None,
        )
        _check(status, name)
        self._rounding += matrix.encoding in BLOCKS
        self._weight_bytes += rows.nbytes + (bias.nbytes if bias is not None else 0)


def join_matrices(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """One matrix of all outputs in order. The parts must be of one encoding."""
    rows = np.concatenate([part.rows for part in parts])
    return StoredMatrix(parts[0].encoding, rows, parts[0].inner, _join_biases(parts))


def interleave(gate: StoredMatrix, up: StoredMatrix) -> StoredMatrix:
    """16 rows of gate, the 16 of up that belong to them, and so on."""
    joined = join_matrices((gate, up))
    count = len(gate.rows)
    order = np.arange(2 * count).reshape(2, count // _GATE_STRIPE, _GATE_STRIPE).swapaxes(0, 1).ravel()
    bias = None if joined.bias is None else joined.bias[order]
    return StoredMatrix(joined.encoding, joined.rows[order], joined.inner, bias)


def _join_biases(parts: Sequence[StoredMatrix]) -> FloatArray | None:
    if all(part.bias is None for part in parts):
        return None
    zeros = [np.zeros(len(part.rows), dtype=np.float32) if part.bias is None else part.bias for part in parts]
    return np.concatenate(zeros)


def _plain(array: IntArray) -> IntArray:
    return np.ascontiguousarray(array, dtype=np.int32)


def _check(status: int, what: str) -> None:
    if status == 1:
        raise MemoryError(f"the step kernel has no memory for {what}")
    if status == 2:
        raise InvalidArgument(
            "a step names a token, a position or a page outside the model and its cache", field="plan"
        )
    if status != 0:
        raise Internal(f"the step kernel failed with {status} in {what}")
