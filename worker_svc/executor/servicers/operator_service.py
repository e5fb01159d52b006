"""OperatorService: the plugin's third duty, one operator at a time, for conformance and precision tools."""

from __future__ import annotations

import time
from functools import partial

from chipmesh.device.v1alpha1 import operator_pb2
from chipmesh.device.v1alpha1.operator_pb2_grpc import OperatorServiceServicer
from chipmesh.device.v1alpha1.tensor_pb2 import AttributeValue
from meshkit.errors import InvalidArgument, NotFound
from meshkit.rpc.handlers import Context
from plugins.sdk.backend import Backend
from worker_svc.device_thread import DeviceThread
from worker_svc.executor.tensor_values import check_sizes, read_value, write_values

Implementation = operator_pb2.RunOperatorRequest.Implementation
Attribute = int | float | bool | str


class OperatorService(OperatorServiceServicer):
    """Operators of one backend."""

    def __init__(self, backend: Backend, device: DeviceThread) -> None:
        self._backend = backend
        self._device = device

    async def RunOperator(
        self, request: operator_pb2.RunOperatorRequest, context: Context
    ) -> operator_pb2.RunOperatorResponse:
        """Run one operator."""
        del context
        if request.implementation == Implementation.IMPLEMENTATION_UNSPECIFIED:
            raise InvalidArgument(
                "implementation is unspecified; say which one is to run", field="implementation"
            )
        run = partial(self._run, request)
        return await self._device.submit(partial(self._backend.execute_runnable, run))

    def _run(self, request: operator_pb2.RunOperatorRequest) -> operator_pb2.RunOperatorResponse:
        operators, memory = self._backend.operators, self._backend.memory
        if operators is None:
            raise NotFound(
                f"name is {request.name!r}; back end {self._backend.info().name!r} has no operators",
                field="name",
            )
        check_sizes(request.inputs.values(), field="inputs")
        inputs = {
            name: memory.upload(read_value(value, field=f"inputs.{name}"), request.device)
            for name, value in request.inputs.items()
        }
        attributes = {name: _read_attribute(value, name) for name, value in request.attributes.items()}
        use_reference = request.implementation == Implementation.IMPLEMENTATION_REFERENCE
        start = time.monotonic()
        outputs = operators.run(request.name, inputs, attributes, use_reference=use_reference)
        self._backend.synchronize()
        seconds = time.monotonic() - start
        response = operator_pb2.RunOperatorResponse(
            outputs=write_values([memory.download(output) for output in outputs], field="outputs"),
            coverage="reference" if use_reference else operators.coverage(request.name).value,
        )
        response.device_time.FromNanoseconds(int(seconds * 1e9))
        return response


def _read_attribute(value: AttributeValue, name: str) -> Attribute:
    which = value.WhichOneof("value")
    if which is None:
        raise InvalidArgument(f"attributes.{name} holds no value", field=f"attributes.{name}")
    read: Attribute = getattr(value, which)
    return read
