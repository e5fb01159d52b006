"""OperatorService over gRPC, on a chip that has operators, one of them under a constraint."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import grpc
import grpc.aio
import pytest

from chipmesh.device.v1alpha1.operator_pb2 import RunOperatorRequest
from chipmesh.device.v1alpha1.operator_pb2_grpc import OperatorServiceStub
from chipmesh.device.v1alpha1.tensor_pb2 import AttributeValue, TensorSpec, TensorValue
from meshkit.errors import MeshError, from_rpc_error
from meshkit.rpc.channel import open_channel
from plugins.cpu.operators import CpuOperators
from plugins.hash.options import HashOptions
from plugins.hash.runner import HashRunner
from tests.conformance.liars import PlantedBackend
from worker_svc.executor.app import Executor
from worker_svc.executor.settings import ExecutorSettings
from worker_svc.executor.tensor_values import MAX_VALUES_BYTES
from worker_svc.plugin_loader import LoadedPlugin

if TYPE_CHECKING:  # generated for type checkers only
    from chipmesh.device.v1alpha1.operator_pb2_grpc import OperatorServiceAsyncStub

PLUGIN, REFERENCE = (RunOperatorRequest.IMPLEMENTATION_PLUGIN, RunOperatorRequest.IMPLEMENTATION_REFERENCE)


class Multiples(CpuOperators):
    """A product whose kernel takes inputs of a multiple of 16."""

    constraints: ClassVar[Mapping[str, Sequence[str]]] = {"linear": ("K % 16 == 0",)}


@pytest.fixture
async def operators() -> AsyncIterator[OperatorServiceAsyncStub]:
    """The service of an executor in this process."""
    executor = Executor(
        ExecutorSettings(backend="cpu", instance_id="i"),
        load=lambda: LoadedPlugin(PlantedBackend(operators=Multiples), HashRunner(HashOptions())),
    )
    channel = open_channel(await executor.start(), traced=False)
    yield OperatorServiceStub(channel)
    await channel.close()
    assert await executor.stop(0.5)


async def refusal(call: Awaitable[object]) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


def ones(*shape: int) -> TensorValue:
    count = 1
    for size in shape:
        count *= size
    return TensorValue(spec=TensorSpec(dtype="float32", shape=shape), data=struct.pack("<f", 1.0) * count)


def linear(rows: int, width: int, outputs: int, *, implementation: RunOperatorRequest.Implementation.ValueType
           ) -> RunOperatorRequest:  # fmt: skip
    inputs = {"x": ones(rows, width), "weight": ones(outputs, width)}
    return RunOperatorRequest(name="linear", inputs=inputs, implementation=implementation)


async def test_an_operator_runs_by_value(operators: OperatorServiceAsyncStub) -> None:
    response = await operators.RunOperator(linear(2, 16, 3, implementation=PLUGIN))
    assert response.coverage == "native"
    assert list(response.outputs[0].spec.shape) == [2, 3]
    assert struct.unpack("<6f", response.outputs[0].data) == (16.0,) * 6


async def test_a_constraint_that_does_not_hold_is_a_failed_precondition(
    operators: OperatorServiceAsyncStub,
) -> None:
    error = await refusal(operators.RunOperator(linear(2, 17, 3, implementation=PLUGIN)))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "K % 16 == 0" in error.message
    assert "17" in error.message


async def test_the_reference_has_no_constraints(operators: OperatorServiceAsyncStub) -> None:
    response = await operators.RunOperator(linear(2, 17, 3, implementation=REFERENCE))
    assert response.coverage == "reference"


async def test_values_of_tens_of_mebibytes_travel(operators: OperatorServiceAsyncStub) -> None:
    size = (40 << 20) // 4
    request = RunOperatorRequest(name="silu_mul", inputs={"gate_up": ones(1, size)}, implementation=PLUGIN)
    response = await operators.RunOperator(request)
    assert len(response.outputs[0].data) == 20 << 20


async def test_inputs_that_are_too_large_together_name_the_limit(operators: OperatorServiceAsyncStub) -> None:
    size = (26 << 20) // 4
    inputs = {"query": ones(1, 1, size), "key": ones(1, 1, size)}
    request = RunOperatorRequest(name="rotary", inputs=inputs, implementation=PLUGIN)
    error = await refusal(operators.RunOperator(request))
    assert (error.code, error.field, error.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT, "inputs", "VALUE_TOO_LARGE")  # fmt: skip
    assert error.metadata["limit_bytes"] == str(MAX_VALUES_BYTES)
    assert str(52 << 20) in error.message


async def test_a_result_that_is_too_large_is_refused(operators: OperatorServiceAsyncStub) -> None:
    request = linear(3600, 16, 3600, implementation=PLUGIN)
    error = await refusal(operators.RunOperator(request))
    assert (error.field, error.reason) == ("outputs", "VALUE_TOO_LARGE")


async def test_an_attribute_without_a_value_is_named(operators: OperatorServiceAsyncStub) -> None:
    inputs = {"x": ones(1, 4), "weight": ones(4)}
    request = RunOperatorRequest(
        name="rms_norm", inputs=inputs, attributes={"eps": AttributeValue()}, implementation=PLUGIN
    )
    assert (await refusal(operators.RunOperator(request))).field == "attributes.eps"
