"""The scheduler drives the real executor with the hash model: exact tokens, prefixes, cancels, moves."""

from __future__ import annotations

from typing import Any

from chipmesh.device.v1alpha1 import execution_pb2, plugin_pb2
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceStub
from chipmesh.scheduler.v1alpha1 import registry_pb2
from meshkit.rpc.channel import open_channel
from plugins.hash.oracle import continue_tokens
from tests.contract.scheduler_svc.fake_peers import until
from worker_svc.executor.app import Executor
from worker_svc.executor.settings import ExecutorSettings

VOCAB_SIZE = 32000
PAGE_SIZE = 4


async def register_hash_executor(m: Any, worker: str, *, page_count: int) -> Executor:
    """Start, load, allocate and register, as a supervisor would; returns the executor once it is attached."""
    instance_id = f"{worker}-hash"
    executor = Executor(ExecutorSettings(backend="hash", instance_id=instance_id))
    address = await executor.start()
    async with open_channel(address, traced=False) as channel:
        execution, plugin = ExecutionServiceStub(channel), PluginServiceStub(channel)
        load = execution_pb2.LoadModelRequest(load_format="dummy", dtype="auto", kv_cache_dtype="auto")
        events = [event async for event in execution.LoadModel(load)]
        await execution.AllocateKvCache(
            execution_pb2.AllocateKvCacheRequest(
                page_count=page_count, page_size_tokens=PAGE_SIZE, max_slots=16
            )
        )
        info = await plugin.GetPluginInfo(plugin_pb2.GetPluginInfoRequest())
        capabilities = await plugin.GetCapabilities(plugin_pb2.GetCapabilitiesRequest())
    request = registry_pb2.RegisterRequest(
        worker_id=worker, instance_id=instance_id, executor_address=address, group="g", model="m",
        plugin=info, capabilities=capabilities.report, loaded_model=events[-1].model,
        page_count=page_count, page_size_tokens=PAGE_SIZE, max_slots=16, supervisor_pid=1,
    )  # fmt: skip
    await (await m.supervisor(worker)).register(request)
    await m.until_ready(worker, instance_id)
    return executor


async def test_the_real_executor_gives_exact_tokens_prefixes_and_its_pages_back(mesh: Any) -> None:
    async with mesh(chunked_prefill_size=24) as m:
        executor = await register_hash_executor(m, "w0", page_count=60)
        try:
            gateway = await m.gateway()
            prompts = [[(i * 31 + n) % VOCAB_SIZE for n in range(5 + i)] for i in range(24)]
            cancelled = await gateway.submit([1, 2, 3], 200)
            live = [await gateway.submit(prompt, 20) for prompt in prompts]
            await cancelled.has_tokens(1)
            await gateway.cancel(cancelled)
            for seen, prompt in zip(live, prompts, strict=True):
                await seen.end()
                assert seen.tokens == continue_tokens(prompt, 20, VOCAB_SIZE)
            again = await (await gateway.submit(prompts[-1], 20)).end()
            assert again.tokens == live[-1].tokens
            batcher = m.service.engine.core.batcher(m.service.pool.member("w0").replica)
            await until(lambda: batcher.pages.held == 0 and batcher.running == 0, "idle")
            assert (await m.replicas())["w0"].numeric_class
        finally:
            await executor.stop(0.2)


async def test_requests_move_from_a_real_executor_that_ends_to_another(mesh: Any) -> None:
    async with mesh() as m:
        first = await register_hash_executor(m, "w0", page_count=400)
        second = await register_hash_executor(m, "w1", page_count=400)
        try:
            gateway = await m.gateway()
            prompts = [[i, i + 1] for i in range(8)]
            live = [await gateway.submit(prompt, 150) for prompt in prompts]
            for seen in live:
                await seen.has_tokens(2)
            await first.stop(0)
            for seen, prompt in zip(live, prompts, strict=True):
                await seen.end()
                assert seen.tokens == continue_tokens(prompt, 150, VOCAB_SIZE)
        finally:
            await second.stop(0.2)
