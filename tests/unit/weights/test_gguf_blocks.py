"""Our decoding of GGUF's blocks against the reference library's, value by value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as reference_dequantize
from gguf.quants import quantize as reference_quantize

from meshkit.modelstore import BLOCK_LAYOUTS
from worker_svc.weights import dequantize

# Where each encoding keeps its float16 scales, so that random bytes there do not become infinities.
SCALE_OFFSETS = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
QUANTIZABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"]


def random_blocks(encoding: str, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Blocks of random bytes with finite random scales."""
    random = np.random.default_rng(sum(encoding.encode()))
    blocks = random.integers(0, 256, size=(count, BLOCK_LAYOUTS[encoding][1]), dtype=np.uint8)
    for offset in SCALE_OFFSETS[encoding]:
        scales = random.normal(size=(count, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks


def assert_equal_to_reference(stored: np.ndarray[tuple[int, int], np.dtype[np.uint8]], encoding: str) -> None:
    reference = reference_dequantize(stored, GGMLQuantizationType[encoding])
    ours = dequantize(torch.from_numpy(stored).reshape(-1), encoding)
    assert ours.dtype == torch.float32
    np.testing.assert_array_equal(ours.numpy(), reference.reshape(-1))


@pytest.mark.parametrize("encoding", SCALE_OFFSETS)
def test_random_blocks_decode_bit_for_bit_as_the_reference(encoding: str) -> None:
    assert_equal_to_reference(random_blocks(encoding, 257), encoding)


@pytest.mark.parametrize("encoding", QUANTIZABLE)
def test_what_the_library_quantised_decodes_bit_for_bit_as_the_reference(encoding: str) -> None:
    values = np.random.default_rng(7).normal(size=(33, 512)).astype(np.float32)
    stored = np.ascontiguousarray(reference_quantize(values, GGMLQuantizationType[encoding])).view(np.uint8)
    assert_equal_to_reference(stored, encoding)


@pytest.mark.parametrize("encoding", BLOCK_LAYOUTS)
def test_the_block_table_agrees_with_the_library(encoding: str) -> None:
    from gguf import GGML_QUANT_SIZES

    assert BLOCK_LAYOUTS[encoding] == GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]


def test_a_part_of_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole Q4_0 blocks"):
        dequantize(torch.zeros(17, dtype=torch.uint8), "Q4_0")
