"""ExecutionService.Profile on executors that serve: what it shows, what it refuses, that steps go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema  # type: ignore[import-untyped]
import pytest
from google.protobuf.duration_pb2 import Duration
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from chipmesh.device.v1alpha1.execution_pb2 import (
    AllocateKvCacheRequest,
    LoadModelRequest,
    ProfileRequest,
)
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from meshkit.config import TracingConfig
from meshkit.rpc.channel import open_channel
from meshkit.telemetry.tracing import configure_tracing
from tests.contract.worker_svc.harness import INSTANCE, PAGE, Driver, Harness, admit, chunk
from tests.contract.worker_svc.test_device_services import refusal
from tests.unit.models.tiny_llama import write_model
from tests.unit.worker_svc.test_profile import TRACE_SCHEMA
from worker_svc.executor.app import Executor
from worker_svc.executor.settings import ExecutorSettings

# Large enough that computing, not Python, takes the time of a step.
SIZES = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_hidden_layers": 6, "vocab_size": 8192, "max_position_embeddings": 512,
}  # fmt: skip


def lasting(seconds: float) -> ProfileRequest:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return ProfileRequest(duration=duration)


async def profile_while(harness: Harness, driver: Driver, seconds: float = 0.3) -> dict[str, Any]:
    """The trace of a profile during which the driver decodes on and on."""
    profiling = asyncio.ensure_future(harness.execution.Profile(lasting(seconds)))
    while not profiling.done() and driver.step_seq < 200:  # As many as the pages hold.
        await driver.step(decode=True)
    trace: dict[str, Any] = json.loads((await profiling).chrome_trace)
    jsonschema.validate(trace, TRACE_SCHEMA)
    return trace


@pytest.fixture
async def computing(tmp_path: Path) -> AsyncIterator[Harness]:
    """An executor of the plugin that computes, with a model of random weights."""
    executor = Executor(
        ExecutorSettings(
            backend="cpu",
            backend_options={"threads": "2"},
            instance_id=INSTANCE,
            span_attributes={"chipmesh.worker": "worker-7"},
        )
    )
    address = await executor.start()
    channel = open_channel(address, traced=False)
    harness = Harness(channel, ExecutionServiceStub(channel))
    model = write_model(tmp_path / "model", **SIZES)
    async for _ in harness.execution.LoadModel(LoadModelRequest(model_path=str(model), load_format="dummy")):
        pass
    await harness.execution.AllocateKvCache(
        AllocateKvCacheRequest(page_count=256, page_size_tokens=16, max_slots=8)
    )
    yield harness
    await channel.close()
    assert await executor.stop(1.0)


async def decoding(harness: Harness, *, slots: int, pages: int = 16) -> Driver:
    """Prompts of 48 tokens in so many slots, about to decode."""
    driver = await harness.drive()
    await driver.step(
        admitted=[admit(slot, range(slot * pages, (slot + 1) * pages)) for slot in range(slots)],
        prefill=[chunk(slot, range(1, 49)) for slot in range(slots)],
    )
    return driver


async def test_most_of_a_native_step_is_in_its_classes_and_all_of_it_is_accounted_for(
    computing: Harness,
) -> None:
    driver = await decoding(computing, slots=4)
    trace = await profile_while(computing, driver)
    driver.call.cancel()
    summary = trace["chipmesh"]
    assert summary["worker"] == "worker-7"
    assert summary["steps"] > 3
    shares = {line["class"]: line["share"] for line in summary["classes"]}
    # Nine tenths where nothing else wants the processors (docs/profiling.md): no test measures that.
    assert sum(share for name, share in shares.items() if name != "host") > 0.5
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    assert {"attention", "linear", "mlp", "norm", "rope", "sampling", "embedding"} <= set(shares)
    assert all(line["native"] and "kernel" in line["program"] for line in summary["operators"])
    assert 0 <= summary["idle_share"] < 1
    assert summary["step_s"] + summary["idle_s"] == pytest.approx(summary["seconds"], rel=1e-6)
    categories = {event.get("cat") for event in trace["traceEvents"]}
    assert {"step", "gap", "attention", "linear", "mlp"} <= categories


async def test_tokens_are_the_same_with_a_profile_in_the_middle(computing: Harness) -> None:
    driver = await decoding(computing, slots=2)
    for _ in range(4):
        await driver.step(decode=True)
    await profile_while(computing, driver, 0.05)
    made = driver.tokens
    driver.call.cancel()
    again = await decoding(computing, slots=2)
    for _ in range(len(made[0]) - 1):
        await again.step(decode=True)
    assert again.tokens == made
    again.call.cancel()


async def test_the_hash_model_shows_its_steps_and_says_that_it_shows_no_more(
    harness: Harness, driver: Driver
) -> None:
    await driver.step(admitted=[admit(0, range(60))], prefill=[chunk(0, [1, 2])])
    profiling = asyncio.ensure_future(harness.execution.Profile(lasting(0.1)))
    while not profiling.done() and driver.step_seq < 59 * PAGE:
        await driver.step(decode=True)
    summary = json.loads((await profiling).chrome_trace)["chipmesh"]
    assert summary["steps"] > 0
    assert (summary["classes"], summary["operators"]) == ([], [])
    assert "the inside of its steps" in summary["notes"][0]


async def test_a_second_profile_at_once_is_refused_and_one_after_it_is_not(harness: Harness) -> None:
    first = asyncio.ensure_future(harness.execution.Profile(lasting(0.2)))
    error = None
    while error is None and not first.done():  # Which of the two comes first is the network's matter.
        second = asyncio.ensure_future(harness.execution.Profile(lasting(0.2)))
        error = await refusal(second)
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "PROFILE_RUNNING")
    assert (await first).chrome_trace
    assert (await harness.execution.Profile(lasting(0.01))).chrome_trace


async def test_a_caller_that_leaves_ends_its_profile(harness: Harness) -> None:
    leaving = harness.execution.Profile(lasting(60))
    error = await refusal(harness.execution.Profile(lasting(0.01)))
    assert error.reason == "PROFILE_RUNNING"
    leaving.cancel()
    code = None
    while code is not grpc.StatusCode.OK:
        assert code in (None, grpc.StatusCode.ALREADY_EXISTS), code  # The cancel is under way.
        code = await harness.execution.Profile(lasting(0.01)).code()


@pytest.mark.parametrize("seconds", [0.0, -1.0, 60.001, 1e9])
async def test_a_time_out_of_bounds_is_refused_by_its_field(harness: Harness, seconds: float) -> None:
    error = await refusal(harness.execution.Profile(lasting(seconds)))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "duration")
    assert "at most 60" in error.message


async def test_without_a_model_there_is_nothing_to_profile(bare: Harness) -> None:
    error = await refusal(bare.execution.Profile(lasting(0.01)))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_MODEL")
    assert (await refusal(bare.execution.Profile(lasting(0.01)))).reason == "NO_MODEL"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    handle = configure_tracing("executor", TracingConfig(), exporter=memory)
    yield memory
    handle.shutdown()


async def test_operator_classes_are_spans_beneath_the_call(
    exporter: InMemorySpanExporter, computing: Harness
) -> None:
    driver = await decoding(computing, slots=2)
    await profile_while(computing, driver, 0.05)
    driver.call.cancel()
    spans = [span for span in exporter.get_finished_spans() if "executor.operators" in span.name]
    (call,) = [span for span in exporter.get_finished_spans() if span.name.endswith("/Profile")]
    assert {"chipmesh.executor.operators attention", "chipmesh.executor.operators mlp"} <= {
        span.name for span in spans
    }
    assert call.context is not None
    for span in spans:
        assert span.parent is not None
        assert span.parent.span_id == call.context.span_id
