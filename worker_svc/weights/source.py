"""What a model runner asks of weights."""

from __future__ import annotations

from typing import Protocol

import torch

from worker_svc.weights.quantized import StoredQuantized


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

    def quantized(self, name: str) -> StoredQuantized | None:
        """A matrix that is stored quantised, by the name of its weight; None: `read` is all there is.

        Raises KeyError for a name that is not there.
        """
        ...
