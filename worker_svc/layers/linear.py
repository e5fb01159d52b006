"""Linear layers: weights read, joined where one product serves several, and packed for the chip once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plugins.sdk.operators import OperatorTable
from worker_svc.weights.source import WeightSource


class Linear:
    """y = x W^T + b on the chip's operator. `weight_bytes` counts what it holds."""

    def __init__(self, weight: Tensor, bias: Tensor | None, operators: OperatorTable) -> None:
        self._operator = operators.linear
        self._weight: Any = operators.relayout(weight, "linear")
        self._bias = bias
        self.weight_bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        """[t, in] -> [t, out]."""
        return self._operator(x, self._weight, self._bias)


class LinearLoader:
    """Makes linear layers from a weight source."""

    def __init__(
        self, source: WeightSource, operators: OperatorTable, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._operators = operators
        self._dtype = dtype
        self._device = device
        self._names = frozenset(source.names())

    def load(self, *names: str) -> Linear:
        """One layer of the matrices `<name>.weight` stacked in that order, with `<name>.bias` where there
        are any.
        """
        weight = self._joined([f"{name}.weight" for name in names])
        bias_names = [f"{name}.bias" for name in names]
        if not any(name in self._names for name in bias_names):
            return Linear(weight, None, self._operators)
        biases = [
            self.tensor(bias) if bias in self._names else torch.zeros(self._source.shape(f"{name}.weight")[0])
            for name, bias in zip(names, bias_names, strict=True)
        ]
        return Linear(weight, torch.cat([bias.to(weight) for bias in biases]), self._operators)

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is, in the model's dtype on the device."""
        return self._source.read(name, self._dtype).to(self._device)

    def _joined(self, names: Sequence[str]) -> Tensor:
        return torch.cat([self.tensor(name) for name in names]) if len(names) > 1 else self.tensor(names[0])
