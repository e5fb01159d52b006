"""Makes fresh executors ready: reads their reports, loads the model, sizes and allocates the KV cache."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1.device_pb2 import DeviceProperties, GetDeviceRequest
from chipmesh.device.v1alpha1.device_pb2_grpc import DeviceServiceStub
from chipmesh.device.v1alpha1.execution_pb2 import (
    AllocateKvCacheRequest,
    AllocateKvCacheResponse,
    LoadedModel,
    LoadModelRequest,
    ParallelPlace,
    RankInfo,
)
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from chipmesh.device.v1alpha1.plugin_pb2 import (
    CapabilityReport,
    GetCapabilitiesRequest,
    GetPluginInfoRequest,
    GetPluginInfoResponse,
)
from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceStub
from chipmesh.scheduler.v1alpha1.registry_pb2 import RegisterRequest
from meshkit.errors import Internal, MeshError, from_rpc_error
from meshkit.modelstore.sharding import ParallelLayout
from meshkit.ports import reserve_port
from meshkit.telemetry.logging import get_logger
from plugins.sdk.planning import choose_chunk, choose_page_size, choose_window
from worker_svc.config import WorkerConfig
from worker_svc.executor_set import ExecutorSet, Rank
from worker_svc.kv_sizing import DeviceMemory, KvRequest, KvSize, size_kv_cache
from worker_svc.set_layout import layout_of

if TYPE_CHECKING:  # generated for type checkers only
    from chipmesh.device.v1alpha1.device_pb2_grpc import DeviceServiceAsyncStub
    from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceAsyncStub
    from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceAsyncStub

log = get_logger(__name__)

CALL_TIMEOUT_S = 30.0

Progress = Callable[[str, float], None]
T = TypeVar("T")


@dataclass(frozen=True)
class ReadyExecutor:
    """What the scheduler is told of an executor, or of a set: then facts are those of its first rank here.

    ranks: all of the set, those of other hosts among them.
    """

    info: GetPluginInfoResponse
    report: CapabilityReport
    model: LoadedModel
    size: KvSize
    max_slots: int
    layout: ParallelLayout
    ranks: Sequence[RankInfo]


@dataclass(frozen=True)
class _Described:
    """What an executor says of itself before it has a model."""

    rank: Rank
    info: GetPluginInfoResponse
    report: CapabilityReport
    device: DeviceProperties


async def set_up_set(executors: ExecutorSet, config: WorkerConfig, *, progress: Progress) -> ReadyExecutor:
    """Everything between the executors' ready lines and their registration.

    progress: of the first rank's load.

    Raises:
        MeshError: an executor's refusal, or numbers that do not fit.
    """
    described = await _each(executors.ranks, lambda rank: _describe(rank, config))
    first = described[0]
    # Before the load, which may take minutes: a page size that is refused should be refused now.
    page_size: int = choose_page_size(config.page_size, first.report.page_sizes_tokens).value
    chips = [(each.report, each.device) for each in described]
    layout = await asyncio.to_thread(layout_of, config, chips)
    with _meeting_point(config) as rendezvous:

        async def load(rank: Rank) -> LoadedModel:
            told = progress if rank is first.rank else _quiet
            return await _load_model(rank, config, layout, rendezvous=rendezvous, progress=told)

        models = await _each(executors.ranks, load)
    window: int = choose_window(config.max_running_requests, first.report.preferred_batch_size).value
    sizes = await _each(
        executors.ranks,
        lambda rank: _size(rank, config, models[executors.ranks.index(rank)], page_size=page_size),
    )
    allocated = await _each(
        executors.ranks,
        lambda rank: _allocate(rank, sizes[executors.ranks.index(rank)], window=window),
    )
    agreed = allocated[0]
    size = replace(sizes[0], page_count=agreed.page_count)
    log.info("kv_cache", pages=size.page_count, page_size=size.page_size, slots=agreed.max_slots,
             bytes=agreed.allocated_bytes, rule=size.rule)  # fmt: skip
    return ReadyExecutor(
        first.info, first.report, models[0], size, agreed.max_slots, layout, tuple(agreed.ranks)
    )


def registration_of(
    ready: ReadyExecutor, config: WorkerConfig, executors: ExecutorSet, *, takeover_token: str
) -> RegisterRequest:
    """The registration of a ready executor, or of a set by its leader."""
    process = executors.first.process
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
        ranks=ready.ranks,
        tensor_parallel_size=ready.layout.tensor,
        pipeline_parallel_size=ready.layout.pipeline,
    )


def advertised(bound: str, advertise: str | None) -> str:
    """What others are told: `bound`, or `advertise` with the bound port where it has none."""
    if advertise is None or bound.startswith("unix:"):
        return advertise or bound
    has_port = advertise.rpartition(":")[2].isdigit() and not advertise.endswith("]")
    return advertise if has_port else f"{advertise}:{bound.rpartition(':')[2]}"


async def _each(ranks: Sequence[Rank], work: Callable[[Rank], Awaitable[T]]) -> list[T]:
    """The work of all ranks at once; the first error ends it, and names the rank where there are several."""

    async def one(rank: Rank) -> T:
        try:
            return await work(rank)
        except grpc.aio.AioRpcError as raw:
            error = from_rpc_error(raw)
            if len(ranks) > 1:
                error.message = f"{rank.label}: {error.message}"
            raise error from raw

    tasks = [asyncio.ensure_future(one(rank)) for rank in ranks]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _describe(rank: Rank, config: WorkerConfig) -> _Described:
    plugin: PluginServiceAsyncStub = PluginServiceStub(rank.channel)
    info = await plugin.GetPluginInfo(GetPluginInfoRequest(), timeout=CALL_TIMEOUT_S)
    capabilities = await plugin.GetCapabilities(GetCapabilitiesRequest(), timeout=CALL_TIMEOUT_S)
    return _Described(rank, info, capabilities.report, await _device(rank))


async def _device(rank: Rank) -> DeviceProperties:
    service: DeviceServiceAsyncStub = DeviceServiceStub(rank.channel)
    answer = await service.GetDevice(GetDeviceRequest(device=rank.device), timeout=CALL_TIMEOUT_S)
    return answer.device


@contextlib.contextmanager
def _meeting_point(config: WorkerConfig) -> Iterator[str]:
    """Where the ranks are to meet: a free port of this host, kept for rank 0, or as configured."""
    if config.spans_hosts:
        yield f"tcp://{config.rendezvous}"
        return
    with reserve_port() as port:
        yield f"tcp://127.0.0.1:{port}"


async def _load_model(
    rank: Rank, config: WorkerConfig, layout: ParallelLayout, *, rendezvous: str, progress: Progress
) -> LoadedModel:
    execution: ExecutionServiceAsyncStub = ExecutionServiceStub(rank.channel)
    request = LoadModelRequest(
        model_path=config.model_path,
        load_format=config.load_format,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        device=rank.device,
        strict=config.strict,
        quantization=config.quantization,
        cache_dir=str(config.cache_dir) if config.cache_dir is not None else "",
        parallel=_place(rank, config, layout, rendezvous=rendezvous) if config.is_set else None,
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


def _place(rank: Rank, config: WorkerConfig, layout: ParallelLayout, *, rendezvous: str) -> ParallelPlace:
    return ParallelPlace(
        rank=rank.number,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        rendezvous=rendezvous,
        join_timeout=_duration(config.join_timeout_s),
        step_timeout=_duration(config.step_timeout_s),
        address=advertised(rank.process.address, config.executor.advertise),
    )


async def _size(rank: Rank, config: WorkerConfig, model: LoadedModel, *, page_size: int) -> KvSize:
    device = await _device(rank)
    try:
        return size_kv_cache(
            _kv_request(config),
            _memory(device),
            page_size=page_size,
            kv_bytes_per_token=model.kv_bytes_per_token,
            weight_bytes=model.weight_bytes,
        )
    except MeshError as error:
        if config.is_set:
            error.message = f"{rank.label}: {error.message}"
        raise


async def _allocate(rank: Rank, size: KvSize, *, window: int) -> AllocateKvCacheResponse:
    execution: ExecutionServiceAsyncStub = ExecutionServiceStub(rank.channel)
    return await execution.AllocateKvCache(
        AllocateKvCacheRequest(
            page_count=size.page_count,
            page_size_tokens=size.page_size,
            max_slots=min(window, size.page_count),
        )
    )


def _kv_request(config: WorkerConfig) -> KvRequest:
    return KvRequest(
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
        mem_fraction_static=config.mem_fraction_static,
        executors_on_host=config.executors_here,
    )


def _memory(device: DeviceProperties) -> DeviceMemory:
    return DeviceMemory(
        total_bytes=device.memory_total_bytes,
        free_bytes=device.memory_free_bytes,
        shared_with_host=device.attributes.get("memory") == "host",
    )


def _duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(int(seconds * 1e9))
    return result


def _quiet(_stage: str, _fraction: float) -> None:
    return None
