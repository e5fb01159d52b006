"""Turns GGUF's quantised blocks into float32, as ggml defines them.

Each decoder takes blocks [n, bytes of a block] (uint8) and returns values [n, values of a block] (float32).
Scales are stored as float16 and widened first; products and sums are then made in float32 in ggml's order, so
results are equal to the reference's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshkit.modelstore import BLOCK_LAYOUTS

Tensor = torch.Tensor


def dequantize(stored: Tensor, encoding: str) -> Tensor:
    """Values (float32, one dimension) of `stored`: whole blocks of `encoding`, uint8, one dimension,
    contiguous.

    Raises:
        KeyError: unknown encoding. ValueError: not a whole number of blocks.
    """
    block_bytes = BLOCK_LAYOUTS[encoding][1]
    if stored.dtype != torch.uint8 or stored.numel() % block_bytes:
        raise ValueError(
            f"{stored.numel()} values of {stored.dtype} are no whole {encoding} blocks of {block_bytes} bytes"
        )
    return _DECODERS[encoding](stored.view(-1, block_bytes)).reshape(-1)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def decode(blocks: Tensor) -> Tensor:
        return _typed(blocks, dtype).to(torch.float32)

    return decode


def _typed(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret bytes [n, k] as [n, k / size of dtype]; a slice is copied, since a view needs rows without
    gaps.
    """
    return piece.contiguous().view(dtype)


def _scale(piece: Tensor) -> Tensor:
    """float16 scales stored in bytes [n, 2] -> float32 [n, 1]."""
    return _typed(piece, torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., k] -> [..., 2k]: all low halves, then all high halves."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> Tensor:
    """2 bytes scale, 16 bytes of values: scale x (q - 8)."""
    return _scale(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).to(torch.float32) - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    """2 bytes scale, 2 bytes minimum, 16 bytes of values: scale x q + minimum."""
    return _scale(blocks[:, :2]) * _nibbles(blocks[:, 4:]).to(torch.float32) + _scale(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    """2 bytes scale, 32 signed bytes: scale x q."""
    return _scale(blocks[:, :2]) * _typed(blocks[:, 2:], torch.int8).to(torch.float32)


def _q4_k(blocks: Tensor) -> Tensor:
    """Two scales, 12 bytes of 6-bit sub-scales and sub-minima, 128 bytes of values in 8 groups of 32.

    value = (scale x sub-scale) x q - (scale of minima x sub-minimum).
    """
    count = blocks.shape[0]
    sub_scales, sub_minima = _six_bit_pairs(blocks[:, 4:16])
    scales = _scale(blocks[:, :2]) * sub_scales
    minima = _scale(blocks[:, 2:4]) * sub_minima
    # 32 bytes hold two groups: the low halves are one, the high halves the next.
    values = _nibbles(blocks[:, 16:].reshape(count, 4, 32)).reshape(count, 8, 32).to(torch.float32)
    return (scales.unsqueeze(-1) * values - minima.unsqueeze(-1)).reshape(count, 256)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 minima of 6 bits, float32.

    Bytes 0..3 and 4..7 hold the first four of each in their low 6 bits; bytes 8..11 hold the low 4 bits of
    the last four (scale below, minimum above), whose upper 2 bits sit on top of bytes 0..3 and 4..7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)), dim=-1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales.to(torch.float32), minima.to(torch.float32)


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low halves, 64 bytes of upper 2 bits, 16 signed sub-scales, one scale: 16 groups of 16.

    value = (scale x sub-scale) x (q - 32).
    """
    count = blocks.shape[0]
    # Each half of the block (128 values): 64 bytes of low halves hold values 0..63 below and 64..127 above;
    # 32 bytes of upper bits hold those of values i, i + 32, i + 64, i + 96, from the lowest bits up.
    low = _nibbles(blocks[:, :128].reshape(count, 2, 64)).reshape(count, 2, 4, 32)
    upper_bytes = blocks[:, 128:192].reshape(count, 2, 1, 32)
    upper = torch.cat([(upper_bytes >> shift) & 0x03 for shift in (0, 2, 4, 6)], dim=2)
    values = (low | (upper << 4)).reshape(count, 16, 16).to(torch.float32) - 32.0
    scales = _scale(blocks[:, 208:]) * _typed(blocks[:, 192:208], torch.int8).to(torch.float32)
    return (scales.unsqueeze(-1) * values).reshape(count, 256)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
