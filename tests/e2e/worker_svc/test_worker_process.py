"""A worker as real processes: it registers, replaces a killed executor, drains, and leaves no orphan."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from chipmesh.device.v1alpha1.execution_pb2 import AttachRequest
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from chipmesh.scheduler.v1alpha1 import registry_pb2
from chipmesh.scheduler.v1alpha1.registry_pb2_grpc import (
    WorkerRegistryServiceServicer,
    add_WorkerRegistryServiceServicer_to_server,
)
from meshkit.errors import NotFound
from meshkit.rpc.channel import open_channel
from meshkit.rpc.server import RpcServer
from plugins.hash.oracle import continue_tokens
from tests.contract.worker_svc.harness import VOCAB, Driver, admit, chunk

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]
State = registry_pb2.HeartbeatRequest.ExecutorState


class Registry(WorkerRegistryServiceServicer):
    """A scheduler's registry: remembers what it was told."""

    def __init__(self) -> None:
        self.registrations: list[registry_pb2.RegisterRequest] = []
        self.beats: list[registry_pb2.HeartbeatRequest] = []
        self.deregistered: list[registry_pb2.DeregisterRequest] = []
        self.lease = ""
        self._changed = asyncio.Event()

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Any
    ) -> registry_pb2.RegisterResponse:
        self.registrations.append(request)
        self.lease = f"lease-{len(self.registrations)}"
        self._changed.set()
        response = registry_pb2.RegisterResponse(lease_id=self.lease, scheduler_id="test")
        response.heartbeat_interval.FromMilliseconds(50)
        return response

    async def Heartbeat(
        self, request: registry_pb2.HeartbeatRequest, context: Any
    ) -> registry_pb2.HeartbeatResponse:
        if request.lease_id != self.lease:
            raise NotFound("no such lease")
        self.beats.append(request)
        self._changed.set()
        return registry_pb2.HeartbeatResponse()

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: Any
    ) -> registry_pb2.DeregisterResponse:
        self.deregistered.append(request)
        self._changed.set()
        return registry_pb2.DeregisterResponse()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until calls have made `condition` true, at most 20 s."""

        async def wait() -> None:
            while not condition():
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(wait(), 20)


class Mesh:
    """A registry that is served, and the workers started against it."""

    def __init__(self, registry: Registry, address: str, folder: Path) -> None:
        self.registry = registry
        self.folder = folder
        self._address = address
        self.processes: list[asyncio.subprocess.Process] = []

    async def start_worker(self, **overrides: Any) -> asyncio.subprocess.Process:
        """Start `python -m worker_svc` on the hash model."""
        config = {
            "worker_id": "w0",
            "model": "hash",
            "scheduler_address": self._address,
            "backend": "hash",
            "max_total_tokens": 4096,
            "page_size": 16,
            "max_running_requests": 8,
            "ready_file": str(self.folder / "ready.json"),
            "log_level": "warning",
            "executor": {"restart_backoff_s": 0.05, "probe_interval_s": 0.1},
            **overrides,
        }
        file = self.folder / "worker.json"
        file.write_text(json.dumps(config))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "worker_svc", "--config", str(file),
            stderr=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        self.processes.append(process)
        return process

    async def start_ready_worker(self, **overrides: Any) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        """A worker that has registered, and its ready file."""
        count = len(self.registry.registrations)
        process = await self.start_worker(**overrides)
        await self.registry.until(lambda: len(self.registry.registrations) > count)
        ready = self.folder / "ready.json"
        await until(ready.exists)
        content: dict[str, Any] = json.loads(ready.read_text())
        return process, content

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Poll a state, at most 20 s."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110 - the state changes in another task or process
            await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), 20)


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    registry = Registry()
    server = RpcServer(listen="127.0.0.1:0")
    server.add(
        add_WorkerRegistryServiceServicer_to_server,
        registry,
        "chipmesh.scheduler.v1alpha1.WorkerRegistryService",
    )
    made = Mesh(registry, await server.start(), tmp_path)
    yield made
    await made.close()
    await server.stop(0.1)


async def test_a_worker_registers_an_executor_that_serves_exact_tokens(mesh: Mesh) -> None:
    _, ready = await mesh.start_ready_worker()
    registration = mesh.registry.registrations[0]
    assert (registration.page_count, registration.page_size_tokens, registration.max_slots) == (256, 16, 8)
    assert registration.capabilities.emulated
    assert registration.loaded_model.vocab_size == VOCAB
    assert ready["service"] == "worker"
    assert ready["executor_pid"] == registration.executor_pid
    assert ready["executor_address"] == registration.executor_address
    channel = open_channel(registration.executor_address, traced=False)
    execution = ExecutionServiceStub(channel)
    attached = await execution.Attach(AttachRequest(instance_id=registration.instance_id))
    driver = Driver(execution.ExecuteSteps(), attached.epoch)
    await driver.step(admitted=[admit(0, [0])], prefill=[chunk(0, [1, 2])])
    await driver.step(decode=True)
    assert driver.tokens[0] == continue_tokens([1, 2], 2, VOCAB)
    driver.call.cancel()
    await channel.close()


async def test_health_and_metrics_tell_the_executors_state(mesh: Mesh) -> None:
    _, ready = await mesh.start_ready_worker()
    body = await http_get(ready["http_address"], "/health")
    assert '"serving":true' in body
    assert '"executor":"ready' in body
    metrics = await http_get(ready["http_address"], "/metrics")
    assert 'chipmesh_executor_state{chip="hash",group="default",state="ready",worker="w0"} 1.0' in metrics


async def test_a_killed_executor_is_replaced_and_registered_again(mesh: Mesh) -> None:
    process, ready = await mesh.start_ready_worker()
    os.kill(ready["executor_pid"], signal.SIGKILL)
    await mesh.registry.until(lambda: len(mesh.registry.registrations) == 2)
    first, second = mesh.registry.registrations
    assert second.instance_id != first.instance_id
    assert second.executor_pid != first.executor_pid
    assert second.takeover_token == first.takeover_token != ""
    dead = [beat for beat in mesh.registry.beats if beat.executor_state == State.EXECUTOR_STATE_DEAD]
    assert {beat.instance_id for beat in dead} == {first.instance_id}
    file = mesh.folder / "ready.json"
    await until(lambda: json.loads(file.read_text())["executor_pid"] == second.executor_pid)
    assert process.returncode is None


async def test_a_worker_whose_executor_cannot_be_replaced_gives_up_with_the_cause(mesh: Mesh) -> None:
    once = mesh.folder / "python-once"
    used = mesh.folder / "used"
    once.write_text(f'#!/bin/sh\n[ -e {used} ] && exit 7\ntouch {used}\nexec {sys.executable} "$@"\n')
    once.chmod(0o755)
    executor = {"python": str(once), "restart_backoff_s": 0.02, "max_restarts": 1}
    process, ready = await mesh.start_ready_worker(executor=executor)
    os.kill(ready["executor_pid"], signal.SIGKILL)
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    last = stderr.decode().splitlines()[-1]
    assert "after 2 attempts" in last
    assert "status 7" in last


async def test_an_executor_that_answers_no_probe_is_replaced(mesh: Mesh) -> None:
    executor = {
        "restart_backoff_s": 0.02,
        "probe_interval_s": 0.1,
        "unresponsive_after_s": 0.5,
        "stop_timeout_s": 0.5,
    }
    _, ready = await mesh.start_ready_worker(executor=executor)
    os.kill(ready["executor_pid"], signal.SIGSTOP)
    await mesh.registry.until(lambda: len(mesh.registry.registrations) == 2)
    await until(lambda: not is_running(ready["executor_pid"]))


async def test_an_executor_that_hangs_in_a_step_is_replaced(mesh: Mesh) -> None:
    executor = {
        "restart_backoff_s": 0.02,
        "probe_interval_s": 0.1,
        "hung_after_s": 0.5,
        "stop_timeout_s": 0.5,
    }
    # A step of ten minutes is as good as one that never ends.
    _, ready = await mesh.start_ready_worker(executor=executor, backend_options={"step_ms": "600000"})
    channel = open_channel(ready["executor_address"], traced=False)
    execution = ExecutionServiceStub(channel)
    attached = await execution.Attach(AttachRequest(instance_id=ready["instance_id"]))
    driver = Driver(execution.ExecuteSteps(), attached.epoch)
    await driver.send(admitted=[admit(0, [0])], prefill=[chunk(0, [1])])
    await mesh.registry.until(lambda: len(mesh.registry.registrations) == 2)
    await until(lambda: not is_running(ready["executor_pid"]))
    driver.call.cancel()
    await channel.close()


async def test_a_scheduler_that_has_forgotten_the_worker_gets_it_again(mesh: Mesh) -> None:
    await mesh.start_ready_worker()
    mesh.registry.lease = "another"
    await mesh.registry.until(lambda: len(mesh.registry.registrations) == 2)
    first, second = mesh.registry.registrations
    assert first.instance_id == second.instance_id


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_no_executor_outlives_its_supervisor(mesh: Mesh, number: signal.Signals) -> None:
    process, ready = await mesh.start_ready_worker()
    process.send_signal(number)
    await process.wait()
    await until(lambda: not is_running(ready["executor_pid"]))


async def test_sigterm_drains_deregisters_and_exits_with_0(mesh: Mesh) -> None:
    process, ready = await mesh.start_ready_worker()
    channel = open_channel(ready["executor_address"], traced=False)
    execution = ExecutionServiceStub(channel)
    attached = await execution.Attach(AttachRequest(instance_id=ready["instance_id"]))
    driver = Driver(execution.ExecuteSteps(), attached.epoch)
    await driver.step(admitted=[admit(0, [0])], prefill=[chunk(0, [1])])
    process.terminate()
    draining = State.EXECUTOR_STATE_DRAINING
    await mesh.registry.until(lambda: any(beat.executor_state == draining for beat in mesh.registry.beats))
    for _ in range(5):
        await driver.step(decode=True)
    assert mesh.registry.deregistered == []
    await driver.step(released=[0])
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert len(mesh.registry.deregistered) == 1
    assert driver.tokens[0] == continue_tokens([1], 6, VOCAB)
    driver.call.cancel()
    await channel.close()


async def test_an_unknown_backend_ends_the_worker_with_one_line_that_lists_those_there_are(
    mesh: Mesh,
) -> None:
    process = await mesh.start_worker(backend="abacus")
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    last = stderr.decode().splitlines()[-1]
    assert last.startswith("worker: ")
    assert "'abacus'" in last
    assert "hash" in last
    assert mesh.registry.registrations == []


async def test_a_wrong_model_path_ends_the_worker_with_the_executors_cause(mesh: Mesh) -> None:
    process = await mesh.start_worker(model_path="/missing/model")
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert "/missing/model" in stderr.decode().splitlines()[-1]


async def test_an_interpreter_that_is_not_there_is_named(mesh: Mesh) -> None:
    process = await mesh.start_worker(executor={"python": "/missing/python"})
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert "executor.python: /missing/python" in stderr.decode().splitlines()[-1]


async def http_get(address: str, path: str) -> str:
    """The body of a small answer."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.decode()
