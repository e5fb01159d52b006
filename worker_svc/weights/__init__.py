"""Reads a model's weights, whatever file they lie in, as torch tensors under Hugging Face names."""

from __future__ import annotations

from worker_svc.weights.dummy import DummyWeights
from worker_svc.weights.gguf_blocks import dequantize
from worker_svc.weights.quantized import StoredQuantized
from worker_svc.weights.quantized_reader import QuantizedWeights
from worker_svc.weights.reader import WeightReader
from worker_svc.weights.shapes_only import ShapesOnly
from worker_svc.weights.source import WeightSource

__all__ = [
    "DummyWeights",
    "QuantizedWeights",
    "ShapesOnly",
    "StoredQuantized",
    "WeightReader",
    "WeightSource",
    "dequantize",
]
