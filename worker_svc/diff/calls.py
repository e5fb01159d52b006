"""Operator calls of one side taken down, and run again on the other with the same inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshkit.errors import FailedPrecondition
from plugins.sdk.catalogue import CATALOGUE, COMPUTE, KV, OpSpec
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.operator_table import BoundOperator, OperatorBinder
from worker_svc.diff.weight_sizes import WeightSizes, measure_weights

_PLAIN_PARAMETERS = frozenset(("weight", "bias", "cos_sin"))
"""Inputs that belong to a model though no chip lays them out anew: each side uses its own."""


@dataclass(frozen=True)
class OperatorCall:
    """One call that was made. where: the place in the model. sizes: as it was bound.

    inputs: by parameter; tensors as copies on the host from before the call, without the model's own
    parameters. outputs: copies on the host; of an operator that writes to its input, that input afterwards.
    """

    name: str
    where: str
    sizes: Mapping[str, int]
    inputs: Mapping[str, Any]
    outputs: Sequence[Tensor]


@dataclass(frozen=True)
class RepeatedCall:
    """A call of one side run again by the other. own: the parameters that it used in place of the first's.

    outputs: on the host. weights: how large its placed weights are; None: it has none.
    """

    call: OperatorCall
    outputs: Sequence[Tensor]
    own: Mapping[str, Any]
    weights: WeightSizes | None


@dataclass(frozen=True)
class Form:
    """How a side wants its tensors."""

    dtype: torch.dtype
    device: torch.device
    kv_layout: KvLayout


class RecordingOperators:
    """Binds what `operators` binds; each call is put down in `calls`."""

    def __init__(self, operators: OperatorBinder, calls: deque[OperatorCall]) -> None:
        self._operators = operators
        self._calls = calls

    def bind(self, name: str, where: str, **sizes: int) -> BoundOperator:
        """As OperatorBinder says."""
        bound, spec = self._operators.bind(name, where, **sizes), CATALOGUE[name]

        def call(*inputs: Any) -> Any:
            named = _by_parameter(spec, inputs)
            kept = {key: _on_host(value) for key, value in named.items() if key not in own_parameters(spec)}
            outcome = bound.call(*inputs)
            outputs = [_on_host(each) for each in _outputs(spec, named, outcome)]
            self._calls.append(OperatorCall(name, where, sizes, kept, outputs))
            return outcome

        return BoundOperator(name, where, call, bound.place)


class RepeatingOperators:
    """Binds what `operators` binds; before each call of its own, the other side's next call is run again here
    and shown to `compare`, so that errors of earlier calls are not in it.
    """

    def __init__(
        self,
        operators: OperatorBinder,
        form: Form,
        calls: deque[OperatorCall],
        compare: Callable[[RepeatedCall], None],
    ) -> None:
        self._operators = operators
        self._form = form
        self._calls = calls
        self._compare = compare

    def bind(self, name: str, where: str, **sizes: int) -> BoundOperator:
        """As OperatorBinder says."""
        bound, spec = self._operators.bind(name, where, **sizes), CATALOGUE[name]
        logical: dict[str, Tensor] = {}
        measured: list[WeightSizes | None] = []

        def place(parameter: str, weight: Tensor) -> Any:
            logical[parameter] = weight
            if logical.keys() >= set(spec.weights):
                measured[:] = [measure_weights(name, logical)]
                logical.clear()
            return bound.place(parameter, weight)

        def call(*inputs: Any) -> Any:
            recorded = self._next(name, where)
            own = _by_parameter(spec, inputs)
            outputs = self._repeat(spec, bound, recorded, own)
            parameters = {key: value for key, value in own.items() if key in own_parameters(spec)}
            weights = measured[0] if measured else None
            self._compare(RepeatedCall(recorded, outputs, parameters, weights))
            return bound.call(*inputs)

        return BoundOperator(name, where, call, place)

    def _next(self, name: str, where: str) -> OperatorCall:
        if not self._calls:
            raise _out_of_step(f"{name} of {where}", "nothing more")
        recorded = self._calls.popleft()
        if (recorded.name, recorded.where) != (name, where):
            raise _out_of_step(f"{name} of {where}", f"{recorded.name} of {recorded.where}")
        return recorded

    def _repeat(
        self, spec: OpSpec, bound: BoundOperator, recorded: OperatorCall, own: Mapping[str, Any]
    ) -> list[Tensor]:
        inputs = {
            key: self._form_input(spec, key, recorded.inputs[key], value) if key in recorded.inputs else value
            for key, value in own.items()
        }
        outcome = bound.call(*inputs.values())
        return [_on_host(each) for each in _outputs(spec, inputs, outcome)]

    def _form_input(self, spec: OpSpec, name: str, value: Any, own: Any) -> Any:
        """What the other side had, as this side would have it."""
        if not isinstance(value, Tensor):
            return value
        kind = next(each.dtype for each in spec.inputs if each.name == name)
        if kind == KV:
            return self._form.kv_layout.place(value.to(self._form.device, own.dtype, copy=True))
        dtype = self._form.dtype if kind == COMPUTE and value.is_floating_point() else value.dtype
        return value.to(self._form.device, dtype, copy=True)


def own_parameters(spec: OpSpec) -> frozenset[str]:
    """Inputs of an operator that are the model's own on each side rather than values of a step."""
    return frozenset(spec.weights) | {each.name for each in spec.inputs if each.name in _PLAIN_PARAMETERS}


def check_all_repeated(calls: deque[OperatorCall]) -> None:
    """Raises FailedPrecondition where a side made calls that the other did not."""
    if calls:
        raise _out_of_step("nothing more", f"{calls[0].name} of {calls[0].where}")


def _by_parameter(spec: OpSpec, inputs: Sequence[Any]) -> dict[str, Any]:
    names = [*(each.name for each in spec.inputs), *(each.name for each in spec.attributes)]
    return dict(zip(names, inputs, strict=False))


def _outputs(spec: OpSpec, inputs: Mapping[str, Any], outcome: Any) -> Sequence[Tensor]:
    if outcome is None:
        return [inputs[name] for name in spec.writes]
    return outcome if isinstance(outcome, tuple) else (outcome,)


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _out_of_step(here: str, there: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the two sides do not call the same operators: one calls {here} where the other calls {there}; a "
        "model has to bind the same on every chip",
        reason="CALLS_DIFFER",
    )
