"""The gated feed-forward part of a layer."""

from __future__ import annotations

from torch import Tensor

from plugins.sdk.operator_table import OperatorBinder
from worker_svc.layers.linear import LinearLoader


class GatedFeedForward:
    """down(gate(x) * up(x)); gate and up come from one product. activation: the operator that joins them."""

    def __init__(
        self, block: str, loader: LinearLoader, operators: OperatorBinder, *, inner: int, activation: str
    ) -> None:
        """block: the name that the matrices have in common. inner: columns between the products."""
        self._gate_up = loader.load(f"{block}.gate_up_proj", f"{block}.gate_proj", f"{block}.up_proj")
        self._join = operators.bind(activation, f"{block}.act", I=inner).call
        self._down = loader.load(f"{block}.down_proj", f"{block}.down_proj")
        self.weight_bytes = self._gate_up.weight_bytes + self._down.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[t, hidden] as it is."""
        return self._down(self._join(self._gate_up(x)))
