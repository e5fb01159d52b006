"""The table that tokens enter a model by."""

from __future__ import annotations

from torch import Tensor

from plugins.sdk.operator_table import OperatorBinder
from worker_svc.layers.linear import LinearLoader


class Embedding:
    """A table `<name>.weight` [rows, hidden]."""

    def __init__(self, name: str, loader: LinearLoader, operators: OperatorBinder) -> None:
        self._weight = loader.tensor(f"{name}.weight")
        self.rows, hidden = self._weight.shape
        self._call = operators.bind("embedding", name, V=self.rows, K=hidden).call
        self.weight_bytes = self._weight.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [t] -> [t, hidden]."""
        made: Tensor = self._call(token_ids, self._weight)
        return made
