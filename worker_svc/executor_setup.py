"""Makes a fresh executor ready: reads its report, loads the model, sizes and allocates the KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from chipmesh.device.v1alpha1.device_pb2 import DeviceProperties, GetDeviceRequest
from chipmesh.device.v1alpha1.device_pb2_grpc import DeviceServiceStub
from chipmesh.device.v1alpha1.execution_pb2 import AllocateKvCacheRequest, LoadedModel, LoadModelRequest
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from chipmesh.device.v1alpha1.plugin_pb2 import (
    CapabilityReport,
    GetCapabilitiesRequest,
    GetPluginInfoRequest,
    GetPluginInfoResponse,
)
from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceStub
from chipmesh.scheduler.v1alpha1.registry_pb2 import RegisterRequest
from meshkit.errors import Internal, from_rpc_error
from meshkit.telemetry.logging import get_logger
from plugins.sdk.planning import choose_chunk, choose_page_size, choose_window
from worker_svc.config import WorkerConfig
from worker_svc.executor_process import ExecutorProcess
from worker_svc.kv_sizing import DeviceMemory, KvRequest, KvSize, size_kv_cache

if TYPE_CHECKING:  # generated for type checkers only
    from chipmesh.device.v1alpha1.device_pb2_grpc import DeviceServiceAsyncStub
    from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceAsyncStub
    from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceAsyncStub

log = get_logger(__name__)

CALL_TIMEOUT_S = 30.0

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class ReadyExecutor:
    """What the scheduler is told of an executor."""

    info: GetPluginInfoResponse
    report: CapabilityReport
    model: LoadedModel
    size: KvSize
    max_slots: int


async def set_up_executor(
    channel: grpc.aio.Channel, config: WorkerConfig, *, progress: Progress
) -> ReadyExecutor:
    """Everything between an executor's ready line and its registration.

    Raises:
        MeshError: the executor's refusal, or numbers that do not fit.
    """
    plugin: PluginServiceAsyncStub = PluginServiceStub(channel)
    device: DeviceServiceAsyncStub = DeviceServiceStub(channel)
    execution: ExecutionServiceAsyncStub = ExecutionServiceStub(channel)
    try:
        info = await plugin.GetPluginInfo(GetPluginInfoRequest(), timeout=CALL_TIMEOUT_S)
        capabilities = await plugin.GetCapabilities(GetCapabilitiesRequest(), timeout=CALL_TIMEOUT_S)
        report = capabilities.report
        # Before the load, which may take minutes: a page size that is refused should be refused now.
        page_size: int = choose_page_size(config.page_size, report.page_sizes_tokens).value
        model = await _load_model(execution, config, progress)
        properties = await device.GetDevice(GetDeviceRequest(device=config.device), timeout=CALL_TIMEOUT_S)
        size = size_kv_cache(
            _kv_request(config),
            _memory(properties.device),
            page_size=page_size,
            kv_bytes_per_token=model.kv_bytes_per_token,
            weight_bytes=model.weight_bytes,
        )
        window: int = choose_window(config.max_running_requests, report.preferred_batch_size).value
        slots = min(window, size.page_count)
        request = AllocateKvCacheRequest(
            page_count=size.page_count, page_size_tokens=size.page_size, max_slots=slots
        )
        allocated = await execution.AllocateKvCache(request)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    log.info("kv_cache", pages=size.page_count, page_size=size.page_size, slots=slots,
             bytes=allocated.allocated_bytes, rule=size.rule)  # fmt: skip
    return ReadyExecutor(info, report, model, size, slots)


def registration_of(
    ready: ReadyExecutor, config: WorkerConfig, process: ExecutorProcess, *, takeover_token: str
) -> RegisterRequest:
    """The registration of a ready executor."""
    return RegisterRequest(
        worker_id=config.worker_id,
        instance_id=process.instance_id,
        executor_address=advertised(process.address, config.executor.advertise),
        group=config.group,
        model=config.model,
        plugin=ready.info,
        capabilities=ready.report,
        loaded_model=ready.model,
        page_count=ready.size.page_count,
        page_size_tokens=ready.size.page_size,
        max_slots=ready.max_slots,
        chunk_tokens=choose_chunk(config.chunked_prefill_size, ready.report.preferred_chunk_tokens).value,
        takeover_token=takeover_token,
        supervisor_pid=os.getpid(),
        executor_pid=process.pid,
    )


def advertised(bound: str, advertise: str | None) -> str:
    """What the scheduler is told: `bound`, or `advertise` with the bound port where it has none."""
    if advertise is None or bound.startswith("unix:"):
        return advertise or bound
    has_port = advertise.rpartition(":")[2].isdigit() and not advertise.endswith("]")
    return advertise if has_port else f"{advertise}:{bound.rpartition(':')[2]}"


async def _load_model(
    execution: ExecutionServiceAsyncStub, config: WorkerConfig, progress: Progress
) -> LoadedModel:
    request = LoadModelRequest(
        model_path=config.model_path,
        load_format=config.load_format,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        device=config.device,
        strict=config.strict,
        quantization=config.quantization,
        cache_dir=str(config.cache_dir) if config.cache_dir is not None else "",
    )
    model: LoadedModel | None = None
    async for event in execution.LoadModel(request):
        if event.HasField("model"):
            model = event.model
        else:
            progress(event.progress.stage, event.progress.fraction)
    if model is None:
        raise Internal("the executor ended LoadModel without a model")
    return model


def _kv_request(config: WorkerConfig) -> KvRequest:
    return KvRequest(
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
        mem_fraction_static=config.mem_fraction_static,
        executors_on_host=config.executors_on_host,
    )


def _memory(device: DeviceProperties) -> DeviceMemory:
    return DeviceMemory(
        total_bytes=device.memory_total_bytes,
        free_bytes=device.memory_free_bytes,
        shared_with_host=device.attributes.get("memory") == "host",
    )
