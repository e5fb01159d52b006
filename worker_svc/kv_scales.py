"""Scales of a KV cache in 8 bits: fixed when a model is loaded, from the checkpoint where it brings them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshkit.errors import FailedPrecondition
from meshkit.modelstore import WeightIndex
from worker_svc.weights.gguf_blocks import dequantize
from worker_svc.weights.reader import WeightReader

SCALED_DTYPES: Mapping[str, str] = {"float8_e4m3fn": "float", "float8_e5m2": "float", "int8": "int"}
"""Dtypes of a cache whose cells are a value divided by a scale -> how kv_cache_scheme calls their type."""
_NAMES = (
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ("self_attn.kv_scale", "self_attn.kv_scale"),
)
"""Names that checkpoints give (key, value) scales of a layer."""


@dataclass(frozen=True)
class KvScales:
    """(key, value) by layer: a cell of the cache is a key or value divided by it. Layers not named: 1."""

    by_layer: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def of(self, layer: int) -> tuple[float, float]:
        """Of a layer, by its number in the whole model."""
        return self.by_layer.get(layer, (1.0, 1.0))

    @property
    def identity(self) -> str:
        """Equal for equal scales: part of what makes caches of two replicas the same. "": all are 1."""
        if all(pair == (1.0, 1.0) for pair in self.by_layer.values()):
            return ""
        told = repr(sorted(self.by_layer.items()))
        return f"scales-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def read_kv_scales(config: Mapping[str, Any], weights: WeightIndex | None, kv_dtype: str) -> KvScales:
    """The scales of a cache of `kv_dtype`: the checkpoint's, else 1. config: completed.

    Raises:
        FailedPrecondition: (kv_cache_dtype) int8 without scales: keys and values would be rounded to whole
            numbers; scales of another dtype, of some layers only, by head, or below 0; zero points.
    """
    if kv_dtype not in SCALED_DTYPES:
        return KvScales()
    found = {} if weights is None else _find(config, weights)
    if not found:
        if kv_dtype == "int8":
            raise _refused(
                kv_dtype, "the checkpoint has no k_scale and v_scale, and without them it keeps nothing"
            )
        return KvScales()
    _check_scheme(config, kv_dtype)
    count = config["num_hidden_layers"]
    if len(found) < count:
        raise _refused(kv_dtype, f"the checkpoint has k_scale and v_scale of {len(found)} of {count} layers")
    return KvScales(found)


def _find(config: Mapping[str, Any], weights: WeightIndex) -> dict[int, tuple[float, float]]:
    reader = WeightReader(weights)
    found: dict[int, tuple[float, float]] = {}
    for layer in range(config["num_hidden_layers"]):
        for key, value in _NAMES:
            names = [f"model.layers.{layer}.{each}" for each in (key, value)]
            if all(name in weights.tensors for name in names):
                found[layer] = (_read(reader, names[0]), _read(reader, names[1]))
                break
    return found


def _read(reader: WeightReader, name: str) -> float:
    values = dequantize(reader.raw(name), reader.encoding(name))
    scale = float(values[0])
    if len(values) != 1 or not math.isfinite(scale) or scale <= 0:
        raise _refused(
            "in 8 bits", f"{name} holds {len(values)} values, the first {scale:g}; supported: one above 0"
        )
    return scale


def _check_scheme(config: Mapping[str, Any], kv_dtype: str) -> None:
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme") or {}
    kind = scheme.get("type", "float")
    if kind != SCALED_DTYPES[kv_dtype]:
        raise _refused(kv_dtype, f"the checkpoint's k_scale and v_scale are for cells of type {kind!r}")
    if not scheme.get("symmetric", True):
        raise _refused(kv_dtype, "the checkpoint's kv_cache_scheme has zero points (symmetric is false)")


def _refused(kv_dtype: str, cause: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"kv_cache_dtype {kv_dtype} does not suit this model: {cause}; choose fp8_e4m3, auto, or another "
        "checkpoint",
        field="kv_cache_dtype",
        reason="KV_SCALES",
    )
