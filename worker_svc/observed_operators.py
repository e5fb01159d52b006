"""A model's operators with a witness: every call's inputs and outputs are shown to an observer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plugins.sdk.operator_table import BoundOperator, OperatorBinder


@dataclass(frozen=True)
class OperatorCall:
    """One call, after it ran. where: the place in the model. inputs: as given, weights in the chip's form."""

    name: str
    where: str
    inputs: Sequence[Any]
    outputs: Sequence[Tensor]
    """Empty for an operator that writes to an input."""


class ObservedOperators:
    """Binds what `operators` binds. For precision tools: the calls of a served model are not observed."""

    def __init__(self, operators: OperatorBinder, observe: Callable[[OperatorCall], None]) -> None:
        self._operators = operators
        self._observe = observe

    def bind(self, name: str, where: str, **sizes: int) -> BoundOperator:
        """As OperatorBinder says."""
        bound = self._operators.bind(name, where, **sizes)

        def call(*inputs: Any) -> Any:
            outcome = bound.call(*inputs)
            self._observe(OperatorCall(name, where, inputs, _as_outputs(outcome)))
            return outcome

        return BoundOperator(name, where, call, bound.place)


def _as_outputs(outcome: Any) -> Sequence[Tensor]:
    if outcome is None:
        return ()
    return outcome if isinstance(outcome, tuple) else (outcome,)
