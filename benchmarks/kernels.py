"""Products of the native step kernel by encoding and number of rows, beside torch's, and the host's limits.

Shapes are those of the model's layers; the limits are measured in the same run: multiply-adds on registers
alone, of floats and of bytes, and reads of memory that no cache holds. `share_of_fma_limit` is what a product
reaches of the first, `share_of_int8_limit` what one of rows in int8 (quantization a8, with their rounding)
reaches of the second.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.report import describe_run, run_command
from plugins.cpu.native.library import BLOCKS, ENCODINGS, StepLibrary
from plugins.cpu.native.loading import load_kernel
from plugins.cpu.step_program import CpuStepProgram
from plugins.sdk.step_program import A8, LLAMA, DecoderLayer, DecoderShape, DecoderWeights, StoredMatrix

_READ_BYTES = 512 << 20
_FMA_TURNS = 20_000_000
_ROUNDS_OF_LIMITS = 5
_BLOCKS = {"F32": (1, 4), "BF16": (1, 2), "F16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20)}
SHAPE = DecoderShape(LLAMA, 8, 576, 1536, 9, 3, 64, 49152, 128, 1e-5, 0.125)
"""SmolLM2-135M with fewer layers: still more weights than caches hold."""
MATRICES = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
"""(outputs, inputs) of a layer's products."""


def open_library() -> StepLibrary:
    """The kernel's library. Exits where there is none."""
    kernel = load_kernel()
    if kernel.library is None:
        raise SystemExit(kernel.problem)
    return kernel.library


def measure_limits(library: StepLibrary, instruction_set: str, threads: int) -> dict[str, float]:
    """GFLOP/s of multiply-adds, GOP/s of those of bytes, and GB/s of reads on `threads` threads: the best of
    some rounds each.
    """
    kernels = library.find_kernels(instruction_set.encode())
    memory = np.ones(_READ_BYTES // 4, dtype=np.float32)  # Zeros would all be one page.
    parts = np.array_split(memory, threads)
    sinks = [(ctypes.c_float * 16)() for _ in range(threads)]

    def multiply_adds(thread: int) -> float:
        return float(library.fma(kernels, _FMA_TURNS, ctypes.addressof(sinks[thread])))

    def multiply_adds_of_bytes(thread: int) -> float:
        return float(library.int8(kernels, _FMA_TURNS, ctypes.addressof(sinks[thread])))

    def read(thread: int) -> float:
        part = parts[thread]
        library.read(kernels, part.ctypes.data, part.size)
        return float(part.nbytes)

    return {
        "gflops": _best_rate(multiply_adds, threads),
        "int8_gops": _best_rate(multiply_adds_of_bytes, threads),
        "read_gbytes_per_s": _best_rate(read, threads),
    }


def _best_rate(work: Callable[[int], float], threads: int) -> float:
    """1e9 units a second; `work(thread)` returns its units."""
    best = 0.0
    for _ in range(_ROUNDS_OF_LIMITS):
        units = [0.0] * threads

        def run(thread: int, units: list[float] = units) -> None:
            units[thread] = work(thread)

        team = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
        begun = time.perf_counter()
        for each in team:
            each.start()
        for each in team:
            each.join()
        best = max(best, sum(units) / (time.perf_counter() - begun) / 1e9)
    return round(best, 1)


def make_program(
    library: StepLibrary, encoding: str, instruction_set: str, threads: int, quantization: str = ""
) -> CpuStepProgram:
    """A model of zeros: what numbers are multiplied makes no difference to the time."""

    def matrix(outputs: int, inner: int) -> StoredMatrix:
        count, size = _BLOCKS[encoding]
        return StoredMatrix(encoding, np.zeros((outputs, inner // count * size), dtype=np.uint8), inner)

    norm = np.ones(SHAPE.hidden, dtype=np.float32)
    heads, keys = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    layer = DecoderLayer(
        norm,
        matrix(heads, SHAPE.hidden),
        matrix(keys, SHAPE.hidden),
        matrix(keys, SHAPE.hidden),
        matrix(SHAPE.hidden, heads),
        norm,
        matrix(SHAPE.inner, SHAPE.hidden),
        matrix(SHAPE.inner, SHAPE.hidden),
        matrix(SHAPE.hidden, SHAPE.inner),
    )
    small = matrix(32, SHAPE.hidden)
    cos_sin = np.zeros((SHAPE.context_tokens, SHAPE.head_dim), dtype=np.float32)
    weights = DecoderWeights(small, [layer] * SHAPE.layers, norm, small, cos_sin)
    return CpuStepProgram(
        library,
        SHAPE,
        weights,
        threads=threads,
        instruction_set=instruction_set,
        quantization=quantization,
    )


def time_native(program: CpuStepProgram, rows: int, rounds: int) -> dict[str, float]:
    """Seconds of one layer's products, the median over rounds; every layer's weights are used in turn."""
    seconds: dict[str, float] = {}
    for name, (_, inner) in MATRICES.items():
        x = np.random.default_rng(rows).standard_normal((rows, inner)).astype(np.float32)
        taken: list[float] = []
        for _ in range(rounds):
            begun = time.perf_counter()
            for layer in range(SHAPE.layers):
                program.multiply(name, x, layer=layer)
            taken.append((time.perf_counter() - begun) / SHAPE.layers)
        seconds[name] = statistics.median(taken)
    return seconds


def time_torch(rows: int, rounds: int) -> dict[str, float]:
    """The same by oneDNN on weights that it has packed, in float32."""
    seconds: dict[str, float] = {}
    for name, (outputs, inner) in MATRICES.items():
        packed = [
            torch.ops.mkldnn._reorder_linear_weight(torch.zeros(outputs, inner), None)
            for _ in range(SHAPE.layers)
        ]
        x = torch.randn(rows, inner)
        taken: list[float] = []
        for _ in range(rounds):
            begun = time.perf_counter()
            for weight in packed:
                torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            taken.append((time.perf_counter() - begun) / SHAPE.layers)
        seconds[name] = statistics.median(taken)
    return seconds


def describe(
    seconds: Mapping[str, float], rows: int, encoding: str, limits: Mapping[str, float]
) -> dict[str, Any]:
    """Rates over one layer's products together."""
    count, size = _BLOCKS[encoding]
    values = sum(outputs * inner for outputs, inner in MATRICES.values())
    total = sum(seconds.values())
    gflops = 2 * rows * values / total / 1e9
    return {
        "encoding": encoding,
        "rows": rows,
        "layer_us": round(total * 1e6, 1),
        "gflops": round(gflops, 1),
        "share_of_fma_limit": round(gflops / limits["gflops"], 3),
        "share_of_int8_limit": round(gflops / limits["int8_gops"], 3),
        "weights_gbytes_per_s": round(values / count * size / total / 1e9, 1),
        "products_us": {name: round(each * 1e6, 1) for name, each in seconds.items()},
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All encodings and numbers of rows."""
    library = open_library()
    threads = arguments.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    name = arguments.kernel or library.instruction_set
    limits = measure_limits(library, name, threads)

    def measure(encoding: str, quantization: str = "") -> list[dict[str, Any]]:
        program = make_program(library, encoding, name, threads, quantization)
        return [
            describe(time_native(program, rows, arguments.rounds), rows, encoding, limits)
            for rows in arguments.rows
        ]

    lines = [line for encoding in arguments.encodings for line in measure(encoding)]
    rounded = [
        line for encoding in arguments.encodings if encoding in BLOCKS for line in measure(encoding, A8)
    ]
    with torch.inference_mode():
        peer = [describe(time_torch(rows, arguments.rounds), rows, "F32", limits) for rows in arguments.rows]
    return {
        **describe_run(),
        "instruction_set": name,
        "threads": threads,
        "limits": limits,
        "native": lines,
        A8: rounded,
        "onednn": peer,
    }


def print_table(report: Mapping[str, Any]) -> None:
    """For people."""
    print(f"{report['instruction_set']}, threads: {report['threads']}, limits: {report['limits']}")
    for source in ("native", A8, "onednn"):
        for line in report[source]:
            limit = "int8" if source == A8 else "fma"
            share = f"{100 * line[f'share_of_{limit}_limit']:.0f} % of the {limit} limit"
            print(
                f"{source:>7} {line['encoding']:>5} rows {line['rows']:>4}: {line['layer_us']:>9} us, "
                f"{line['gflops']:>6} GFLOP/s ({share}), {line['weights_gbytes_per_s']} GB/s of weights"
            )


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=["F32", "BF16", "Q8_0", "Q4_1"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--threads", type=int, help="default: torch's, which follows OMP_NUM_THREADS")
    parser.add_argument("--kernel", default="", help="instruction set; default: the best of this processor")
    parser.add_argument("--rounds", type=int, default=5)
    run_command(parser, run, print_table, words)


if __name__ == "__main__":
    main()
