"""Servers that answer as a gateway and a scheduler would, over real gRPC, for the commands that call them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc


class ScriptedGateway(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each Generate with `events`, or aborts with `error`; keeps the last request."""

    def __init__(self) -> None:
        self.events: list[inference_pb2.GenerationEvent] = []
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.request = inference_pb2.GenerateRequest()

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Iterator[Any]:
        self.request = request
        for event in self.events:
            yield inference_pb2.GenerateResponse(event=event)
        if self.error is not None:
            context.abort(*self.error)

    def unused(self, request: Any, context: Any) -> Any:
        """RPCs that `generate` never calls."""
        raise NotImplementedError

    ResumeGeneration = CancelGeneration = ListModels = Tokenize = unused


class ScriptedScheduler(admin_pb2_grpc.AdminServiceServicer):
    """Answers GetMesh with `mesh`; keeps what it is asked to change."""

    def __init__(self) -> None:
        self.mesh = admin_pb2.Mesh()
        self.traffic: admin_pb2.SetTrafficRequest | None = None
        self.shadow: admin_pb2.SetShadowRequest | None = None
        self.group: admin_pb2.SetGroupRequest | None = None
        self.profile: admin_pb2.ProfileRequest | None = None
        self.profile_error: tuple[grpc.StatusCode, str] | None = None
        self.trace = b""

    def GetMesh(self, request: admin_pb2.GetMeshRequest, context: Any) -> admin_pb2.GetMeshResponse:
        return admin_pb2.GetMeshResponse(mesh=self.mesh)

    def SetTraffic(self, request: admin_pb2.SetTrafficRequest, context: Any) -> admin_pb2.SetTrafficResponse:
        self.traffic = request
        return admin_pb2.SetTrafficResponse()

    def SetShadow(self, request: admin_pb2.SetShadowRequest, context: Any) -> admin_pb2.SetShadowResponse:
        self.shadow = request
        return admin_pb2.SetShadowResponse()

    def SetGroup(self, request: admin_pb2.SetGroupRequest, context: Any) -> admin_pb2.SetGroupResponse:
        self.group = request
        return admin_pb2.SetGroupResponse()

    def Profile(self, request: admin_pb2.ProfileRequest, context: Any) -> admin_pb2.ProfileResponse:
        self.profile = request
        if self.profile_error is not None:
            context.abort(*self.profile_error)
        return admin_pb2.ProfileResponse(worker=request.worker or "worker-0", chrome_trace=self.trace)

    def unused(self, request: Any, context: Any) -> Any:
        """RPCs that the command line never calls."""
        raise NotImplementedError

    WatchMesh = SwapChip = DrainWorker = FlushCache = SubscribeKvEvents = unused


@contextlib.contextmanager
def served(add: Callable[[grpc.Server], None]) -> Iterator[str]:
    """A server on a free port of loopback; yields its address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
def gateway_address(gateway: ScriptedGateway) -> Iterator[str]:
    with served(
        lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)
    ) as at:
        yield at


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    return ScriptedScheduler()


@pytest.fixture
def scheduler_address(scheduler: ScriptedScheduler) -> Iterator[str]:
    with served(lambda server: admin_pb2_grpc.add_AdminServiceServicer_to_server(scheduler, server)) as at:
        yield at
