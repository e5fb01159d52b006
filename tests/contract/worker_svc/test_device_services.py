"""The executor's other services over gRPC, on the hash plugin."""

from __future__ import annotations

import struct
from collections.abc import Awaitable

import grpc
import grpc.aio
import pytest

from chipmesh.device.v1alpha1 import (
    collective_pb2,
    collective_pb2_grpc,
    device_pb2,
    device_pb2_grpc,
    memory_pb2,
    memory_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    plugin_pb2,
    plugin_pb2_grpc,
)
from chipmesh.device.v1alpha1.execution_pb2 import (
    AllocateKvCacheRequest,
    LoadModelRequest,
    UnloadModelRequest,
)
from chipmesh.device.v1alpha1.tensor_pb2 import TensorSpec, TensorValue
from meshkit.errors import MeshError, from_rpc_error
from tests.contract.worker_svc.harness import INSTANCE, Harness

ONES = TensorValue(spec=TensorSpec(dtype="float32", shape=[2, 2]), data=struct.pack("<4f", 1, 2, 3, 4))


async def refusal(call: Awaitable[object]) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


# ---- PluginService


async def test_info_and_report_say_what_this_is(bare: Harness) -> None:
    stub = plugin_pb2_grpc.PluginServiceStub(bare.channel)
    info = await stub.GetPluginInfo(plugin_pb2.GetPluginInfoRequest())
    assert (info.name, info.instance_id) == ("hash", INSTANCE)
    report = (await stub.GetCapabilities(plugin_pb2.GetCapabilitiesRequest())).report
    assert report.chip == "hash"
    assert report.emulated
    assert report.emulation_note
    assert report == (await stub.GetCapabilities(plugin_pb2.GetCapabilitiesRequest())).report


async def test_a_probe_follows_the_executors_life(bare: Harness) -> None:
    stub = plugin_pb2_grpc.PluginServiceStub(bare.channel)
    assert (
        await stub.Probe(plugin_pb2.ProbeRequest())
    ).readiness == plugin_pb2.ProbeResponse.READINESS_INITIALISING
    await bare.load()
    ready = await stub.Probe(plugin_pb2.ProbeRequest())
    assert ready.readiness == plugin_pb2.ProbeResponse.READINESS_READY
    assert ready.HasField("since_last_step")


# ---- ExecutionService, beside its steps


async def test_loading_twice_gives_the_same_model_and_another_is_refused(bare: Harness) -> None:
    models = []
    for _ in range(2):
        events = [event async for event in bare.execution.LoadModel(LoadModelRequest())]
        assert all(0 <= event.progress.fraction <= 1 for event in events[:-1])
        models.append(events[-1].model)
    assert models[0] == models[1]
    assert (models[0].vocab_size, models[0].kv_bytes_per_token) == (32_000, 36)

    async def load_another() -> None:
        async for _ in bare.execution.LoadModel(LoadModelRequest(model_path="/other")):
            pass

    assert (await refusal(load_another())).reason == "MODEL_LOADED"


async def test_a_failed_load_leaves_the_executor_ready_for_the_next(bare: Harness) -> None:
    async def load_missing() -> None:
        async for _ in bare.execution.LoadModel(LoadModelRequest(model_path="/missing/model")):
            pass

    error = await refusal(load_missing())
    assert error.field == "model_path"
    await bare.load()


async def test_allocating_needs_a_model_and_is_idempotent(bare: Harness) -> None:
    request = AllocateKvCacheRequest(page_count=8, page_size_tokens=4, max_slots=2)
    assert (await refusal(bare.execution.AllocateKvCache(request))).reason == "NO_MODEL"
    async for _ in bare.execution.LoadModel(LoadModelRequest()):
        pass
    assert (await refusal(bare.attach())).reason == "NO_KV_CACHE"
    first = await bare.execution.AllocateKvCache(request)
    assert first.allocated_bytes == 8 * 4 * 36
    assert await bare.execution.AllocateKvCache(request) == first
    other = AllocateKvCacheRequest(page_count=9, page_size_tokens=4, max_slots=2)
    assert (await refusal(bare.execution.AllocateKvCache(other))).reason == "KV_CACHE_ALLOCATED"


@pytest.mark.parametrize("field", ["page_count", "page_size_tokens", "max_slots"])
async def test_a_cache_of_nothing_is_refused_with_the_field(bare: Harness, field: str) -> None:
    async for _ in bare.execution.LoadModel(LoadModelRequest()):
        pass
    request = AllocateKvCacheRequest(page_count=8, page_size_tokens=4, max_slots=2)
    setattr(request, field, 0)
    assert (await refusal(bare.execution.AllocateKvCache(request))).field == field


async def test_unloading_twice_is_fine_and_makes_room_for_another_model(harness: Harness) -> None:
    await harness.execution.UnloadModel(UnloadModelRequest())
    await harness.execution.UnloadModel(UnloadModelRequest())
    await harness.load()


# ---- DeviceService


async def test_devices_are_listed_with_real_properties(bare: Harness) -> None:
    stub = device_pb2_grpc.DeviceServiceStub(bare.channel)
    devices = (await stub.ListDevices(device_pb2.ListDevicesRequest())).devices
    assert [device.index for device in devices] == list(range(len(devices)))
    assert devices[0].memory_total_bytes > 1 << 28
    assert devices[0].attributes["memory"] == "host"
    assert (
        await refusal(stub.GetDevice(device_pb2.GetDeviceRequest(device=len(devices))))
    ).code is grpc.StatusCode.NOT_FOUND


async def test_streams_and_events_have_a_life(bare: Harness) -> None:
    stub = device_pb2_grpc.DeviceServiceStub(bare.channel)
    stream = (await stub.CreateStream(device_pb2.CreateStreamRequest())).stream_id
    event = (await stub.RecordEvent(device_pb2.RecordEventRequest(stream_id=stream))).event_id
    await stub.WaitEvent(device_pb2.WaitEventRequest(stream_id=stream, event_id=event))
    await stub.Synchronize(device_pb2.SynchronizeRequest(stream_id=stream))
    await stub.Synchronize(device_pb2.SynchronizeRequest())
    for _ in range(10):
        await stub.DestroyStream(device_pb2.DestroyStreamRequest(stream_id=stream))
    error = await refusal(stub.RecordEvent(device_pb2.RecordEventRequest(stream_id=stream)))
    assert error.code is grpc.StatusCode.NOT_FOUND


async def test_the_self_test_passes_on_a_good_device(bare: Harness) -> None:
    stub = device_pb2_grpc.DeviceServiceStub(bare.channel)
    checks = (await stub.SelfTest(device_pb2.SelfTestRequest())).checks
    assert {check.name for check in checks} >= {"properties", "copy_round_trip", "streams_and_events"}
    assert [check.name for check in checks if not check.passed] == []


# ---- MemoryService


async def test_a_value_goes_through_two_buffers_and_comes_back_bit_for_bit(bare: Harness) -> None:
    stub = memory_pb2_grpc.MemoryServiceStub(bare.channel)
    first, second = [
        (await stub.Allocate(memory_pb2.AllocateRequest(device=0, spec=ONES.spec))).buffer_id
        for _ in range(2)
    ]
    await stub.Copy(memory_pb2.CopyRequest(source_value=ONES, destination_buffer_id=first))
    await stub.Copy(memory_pb2.CopyRequest(source_buffer_id=first, destination_buffer_id=second))
    back = await stub.Copy(memory_pb2.CopyRequest(source_buffer_id=second, destination_value=True))
    assert back.value == ONES
    assert (await stub.GetStats(memory_pb2.GetStatsRequest())).allocated_bytes >= 32
    for _ in range(10):
        await stub.Free(memory_pb2.FreeRequest(buffer_id=first))
    gone = await refusal(stub.Copy(memory_pb2.CopyRequest(source_buffer_id=first, destination_value=True)))
    assert gone.code is grpc.StatusCode.NOT_FOUND


WRONG_COPIES = {
    "source": memory_pb2.CopyRequest(destination_value=True),
    "destination": memory_pb2.CopyRequest(source_value=ONES),
    "source_value": memory_pb2.CopyRequest(
        source_value=TensorValue(spec=TensorSpec(dtype="uint8", shape=[49 << 20]), data=bytes(49 << 20)),
        destination_value=True,
    ),
    "source_value.data": memory_pb2.CopyRequest(
        source_value=TensorValue(spec=TensorSpec(dtype="float32", shape=[3]), data=b"1"),
        destination_value=True,
    ),
    "source_value.spec.dtype": memory_pb2.CopyRequest(
        source_value=TensorValue(spec=TensorSpec(dtype="float3")), destination_value=True
    ),
    "source_buffer_id": memory_pb2.CopyRequest(source_buffer_id="none", destination_value=True),
}


@pytest.mark.parametrize("field", WRONG_COPIES)
async def test_a_wrong_copy_names_its_field(bare: Harness, field: str) -> None:
    stub = memory_pb2_grpc.MemoryServiceStub(bare.channel)
    assert (await refusal(stub.Copy(WRONG_COPIES[field]))).field == field


async def test_a_buffer_larger_than_a_value_may_be_is_not_returned(bare: Harness) -> None:
    stub = memory_pb2_grpc.MemoryServiceStub(bare.channel)
    spec = TensorSpec(dtype="uint8", shape=[(48 << 20) + 1])
    buffer = (await stub.Allocate(memory_pb2.AllocateRequest(spec=spec))).buffer_id
    error = await refusal(stub.Copy(memory_pb2.CopyRequest(source_buffer_id=buffer, destination_value=True)))
    assert error.reason == "VALUE_TOO_LARGE"


@pytest.mark.parametrize("shape", [[1 << 50], [1 << 63, 1 << 63]])
async def test_more_memory_than_there_is_names_both_numbers(bare: Harness, shape: list[int]) -> None:
    stub = memory_pb2_grpc.MemoryServiceStub(bare.channel)
    spec = TensorSpec(dtype="float32", shape=shape)
    error = await refusal(stub.Allocate(memory_pb2.AllocateRequest(device=0, spec=spec)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "free" in error.message


# ---- OperatorService and CollectiveService, of a chip that has neither


async def test_an_operator_that_is_not_there_is_not_found(bare: Harness) -> None:
    stub = operator_pb2_grpc.OperatorServiceStub(bare.channel)
    request = operator_pb2.RunOperatorRequest(
        name="linear", implementation=operator_pb2.RunOperatorRequest.IMPLEMENTATION_PLUGIN
    )
    error = await refusal(stub.RunOperator(request))
    assert (error.code, error.field) == (grpc.StatusCode.NOT_FOUND, "name")


async def test_a_chip_that_works_alone_has_no_groups(bare: Harness) -> None:
    stub = collective_pb2_grpc.CollectiveServiceStub(bare.channel)
    join = collective_pb2.InitGroupRequest(
        group_name="g", rank=0, world_size=1, rendezvous="tcp://127.0.0.1:0"
    )
    assert (await refusal(stub.InitGroup(join))).reason == "NO_COLLECTIVES"
    assert not (await stub.GetTopology(collective_pb2.GetTopologyRequest())).links
    await stub.DestroyGroup(collective_pb2.DestroyGroupRequest(group_name="g"))
