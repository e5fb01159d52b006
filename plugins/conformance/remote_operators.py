"""Operators of an executor by its address: inputs and results travel by value. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from chipmesh.device.v1alpha1 import operator_pb2
from chipmesh.device.v1alpha1.operator_pb2_grpc import OperatorServiceStub
from chipmesh.device.v1alpha1.tensor_pb2 import AttributeValue
from meshkit.errors import InvalidArgument
from plugins.conformance.host_values import from_host_tensor, to_host_tensor
from plugins.conformance.recorder import CheckFailed, OutOfReach
from plugins.conformance.remote_calls import MAX_MESSAGE_BYTES, Calls, read_value, write_value
from plugins.conformance.report import Fault
from plugins.sdk.capabilities import CapabilityReport, Coverage, OperatorCapability
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.torch_memory import TORCH_DTYPES

Implementation = operator_pb2.RunOperatorRequest.Implementation
_TOO_LARGE = "VALUE_TOO_LARGE"
_DEVICE = 0


class RemoteOperators(OperatorSet):
    """OperatorService on device 0. Caches travel in the order in which operators index them, and are laid out
    in the executor.
    """

    def __init__(self, calls: Calls, memory: MemoryManager, report: CapabilityReport) -> None:
        super().__init__(memory)
        self._calls = calls
        self._stub = OperatorServiceStub(calls.channel)
        self._entries = {entry.name: entry for entry in report.operators}

    def capabilities(self) -> list[OperatorCapability]:
        """As the report has them."""
        return list(self._entries.values())

    def coverage(self, name: str) -> Coverage:
        """As the report has it; `run` sees whether that is so."""
        return self._entries[name].coverage

    def run(
        self,
        name: str,
        inputs: Mapping[str, Tensor],
        attributes: Mapping[str, int | float | bool | str],
        *,
        use_reference: bool = False,
    ) -> tuple[Tensor, ...]:
        """RunOperator.

        Raises:
            CheckFailed: the plugin declares the operator, and the reference ran.
            OutOfReach: inputs or results are larger than what travels.
        """
        if untold := [each for each in inputs.values() if each.dtype not in TORCH_DTYPES.values()]:
            raise OutOfReach(f"{untold[0].dtype} is a KV cache's only, and does not travel")
        request = operator_pb2.RunOperatorRequest(
            name=name,
            device=_DEVICE,
            inputs={key: write_value(to_host_tensor(value)) for key, value in inputs.items()},
            attributes={key: _attribute(value) for key, value in attributes.items()},
            implementation=Implementation.IMPLEMENTATION_REFERENCE
            if use_reference
            else Implementation.IMPLEMENTATION_PLUGIN,
        )
        response = self._send(request)
        if not use_reference and response.coverage == Coverage.REFERENCE.value:
            _check_undeclared(name, self._entries.get(name))
        return tuple(from_host_tensor(read_value(value)) for value in response.outputs)

    def _send(self, request: operator_pb2.RunOperatorRequest) -> operator_pb2.RunOperatorResponse:
        size = request.ByteSize()
        if size > MAX_MESSAGE_BYTES:
            raise OutOfReach(f"the inputs have {size} bytes; a message has at most {MAX_MESSAGE_BYTES}")
        try:
            response: operator_pb2.RunOperatorResponse = self._calls.call(self._stub.RunOperator, request)
        except InvalidArgument as error:
            if error.reason == _TOO_LARGE:
                raise OutOfReach(error.message) from error
            raise
        return response


def _check_undeclared(name: str, entry: OperatorCapability | None) -> None:
    if entry is not None and entry.coverage is not Coverage.REFERENCE:
        raise CheckFailed(
            Fault.DECLARED_BUT_MISSING,
            f"{name} is declared {entry.coverage.value}, and the executor ran the reference",
        )


def _attribute(value: float | bool | str) -> AttributeValue:
    if isinstance(value, bool):
        return AttributeValue(boolean=value)
    if isinstance(value, int):
        return AttributeValue(integer=value)
    return AttributeValue(text=value) if isinstance(value, str) else AttributeValue(real=value)
