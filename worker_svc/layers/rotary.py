"""Rotary position tables, with the scalings that Llama configurations name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshkit.errors import InvalidArgument

SUPPORTED_SCALINGS = ("default", "linear", "llama3", "frequency_factors")


def build_cos_sin(
    *, head_dim: int, context: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device
) -> Tensor:
    """float32 [context, head_dim]: cosines of each position's angles, then their sines.

    Raises:
        InvalidArgument: (model_path) a scaling that is not supported.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = scale_frequencies(theta**-exponents, scaling)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float().to(device)


def scale_frequencies(frequencies: Tensor, scaling: Mapping[str, Any] | None) -> Tensor:
    """Angles per position (float64 [d/2]) under `rope_scaling` of config.json; None: as they are."""
    if scaling is None:
        return frequencies
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind == "frequency_factors":
        # A GGUF's `rope_freqs` tensor: what llama3's rule gives, worked out when the file was made.
        return frequencies / torch.tensor(scaling["factors"], dtype=torch.float64)
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise InvalidArgument(
        f"rope_scaling {kind!r} is not supported; supported: {', '.join(SUPPORTED_SCALINGS)}",
        field="model_path",
        reason="ARCHITECTURE_UNSUPPORTED",
    )


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's rule: wavelengths beyond the trained context are stretched by `factor`, short ones kept,
    those between blended.
    """
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    turns = trained * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies
