"""Root-mean-square norms: alone, and after a sum with the residual stream."""

from __future__ import annotations

from torch import Tensor

from plugins.sdk.operator_table import OperatorBinder
from worker_svc.layers.linear import LinearLoader


class Norm:
    """A weight [size] and the operator that takes it. offset: what is added to the stored weight, once, at
    load: Gemma stores weights less 1.
    """

    def __init__(
        self, name: str, loader: LinearLoader, operators: OperatorBinder, *, eps: float, offset: float = 0.0
    ) -> None:
        self._weight = loader.norm_weight(f"{name}.weight", offset)
        self._eps = eps
        self._call = operators.bind("rms_norm", name, K=self._weight.shape[0]).call
        self.weight_bytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [..., size] as they are."""
        made: Tensor = self._call(x, self._weight, self._eps)
        return made


class AddNorm:
    """As Norm, of a sum."""

    def __init__(
        self, name: str, loader: LinearLoader, operators: OperatorBinder, *, eps: float, offset: float = 0.0
    ) -> None:
        self._weight = loader.norm_weight(f"{name}.weight", offset)
        self._eps = eps
        self._call = operators.bind("add_rms_norm", name, K=self._weight.shape[0]).call
        self.weight_bytes = self._weight.nbytes

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum), each [t, size]."""
        made: tuple[Tensor, Tensor] = self._call(x, residual, self._weight, self._eps)
        return made
