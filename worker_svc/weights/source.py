"""What a model runner asks of weights."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Tensors by Hugging Face name (model.layers.0.self_attn.q_proj.weight, ...)."""

    def names(self) -> tuple[str, ...]:
        """All names, in the model's order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises KeyError for a name that is not there."""
        ...

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new tensor of that name on the host, rows in Hugging Face's rotary order."""
        ...
