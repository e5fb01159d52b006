"""Operators: one is the chip's own. What is not overridden runs on the reference, and the report says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from plugins.sdk.operators import OperatorSet


class ExampleOperators(OperatorSet):
    """Covers `silu_mul`.

    REPLACE: its body with a call of your kernel. Then override the next operator: the catalogue with shapes,
    dtypes and tolerances is plugins/sdk/catalogue.py, the meaning of each plugins/sdk/reference. Names and
    parameters are the contract's; a drift is refused when this class is defined.
    """

    # Another dtype runs on the reference. Widen it once conformance passes there.
    dtypes: ClassVar[Mapping[str, Sequence[str]]] = {"silu_mul": ("float32",)}

    # REPLACE: override torch_device(self, device) to say where torch keeps your tensors.

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [t, 2i], gate first -> [t, i]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
