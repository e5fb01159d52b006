"""Rotary position tables, with the scalings that configurations name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshkit.errors import InvalidArgument

SUPPORTED_SCALINGS = ("default", "linear", "llama3", "yarn", "frequency_factors")


def build_cos_sin(
    *, head_dim: int, context: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device
) -> Tensor:
    """float32 [context, head_dim]: cosines of each position's angles, then their sines.

    Raises:
        InvalidArgument: (model_path) a scaling that is not supported.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = scale_frequencies(theta**-exponents, scaling)
    if device.type == "meta":
        return torch.empty((context, head_dim), device=device)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor(scaling)
    return table.float().to(device)


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What cosines and sines are multiplied by: YaRN's temperature, by its root in query and in key."""
    if scaling is None or _kind_of(scaling) != "yarn":
        return 1.0
    if given := scaling.get("attention_factor"):
        return float(given)

    def temperature(weight: float) -> float:
        factor = float(scaling["factor"])
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    whole, part = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return temperature(whole) / temperature(part) if whole and part else temperature(1.0)


def _kind_of(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def scale_frequencies(frequencies: Tensor, scaling: Mapping[str, Any] | None) -> Tensor:
    """Angles per position (float64 [d/2]) under `rope_scaling` of config.json; None: as they are."""
    if scaling is None:
        return frequencies
    kind = _kind_of(scaling)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind == "frequency_factors":
        # A GGUF's `rope_freqs` tensor: what llama3's rule gives, worked out when the file was made.
        return frequencies / torch.tensor(scaling["factors"], dtype=torch.float64)
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    if kind == "yarn":
        return _yarn(frequencies, scaling)
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


def _yarn(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Peng et al. 2023: pairs that turn more than `beta_fast` times within the trained context stay, those
    that turn less than `beta_slow` times are stretched by `factor`, by index those between are blended.
    """
    trained = scaling.get("original_max_position_embeddings")
    if not trained:
        raise InvalidArgument(
            "rope_scaling 'yarn' needs original_max_position_embeddings, which config.json leaves out",
            field="model_path",
            reason="CONFIG_DAMAGED",
        )
    count = len(frequencies)
    # Frequencies fall by the same factor from pair to pair; so the index at which a pair turns n times is:
    step = -math.log(float(frequencies[1])) if count > 1 else 1.0

    def index_of(turns: float) -> float:
        return math.log(float(trained) / (turns * 2 * math.pi)) / step

    low, high = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    ramp = (torch.arange(count, dtype=torch.float64) - low) / (high - low if high != low else 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return frequencies / float(scaling["factor"]) * stretched + frequencies * (1 - stretched)
