"""Fixtures: an executor in this process with the hash plugin behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from meshkit.rpc.channel import open_channel
from tests.contract.worker_svc.harness import INSTANCE, Driver, Harness
from worker_svc.executor.app import Executor
from worker_svc.executor.settings import ExecutorSettings


@pytest.fixture
async def bare() -> AsyncIterator[Harness]:
    """An executor without a model."""
    executor = Executor(ExecutorSettings(backend="hash", instance_id=INSTANCE))
    address = await executor.start()
    channel = open_channel(address, traced=False)
    yield Harness(channel, ExecutionServiceStub(channel))
    await channel.close()
    assert await executor.stop(0.2)


@pytest.fixture
async def harness(bare: Harness) -> Harness:
    """An executor with the hash model and its pages."""
    await bare.load()
    return bare


@pytest.fixture
async def driver(harness: Harness) -> AsyncIterator[Driver]:
    """A stream to an executor."""
    driver = await harness.drive()
    yield driver
    driver.call.cancel()
