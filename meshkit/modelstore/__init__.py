"""Model references turned into one description that gateway (text) and executor (weights) both read. No
torch.
"""

from __future__ import annotations

from meshkit.modelstore.folder import ModelFolder, open_model
from meshkit.modelstore.layouts import SUPPORTED_ARCHITECTURES, tensor_shapes
from meshkit.modelstore.locations import default_cache_dir
from meshkit.modelstore.pull import PULLABLE_MODELS, PullableModel, pull_model
from meshkit.modelstore.weight_index import BLOCK_LAYOUTS, TensorEntry, WeightIndex

__all__ = [
    "BLOCK_LAYOUTS",
    "PULLABLE_MODELS",
    "SUPPORTED_ARCHITECTURES",
    "ModelFolder",
    "PullableModel",
    "TensorEntry",
    "WeightIndex",
    "default_cache_dir",
    "open_model",
    "pull_model",
    "tensor_shapes",
]
