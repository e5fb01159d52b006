"""The mesh as its scheduler tells it, followed while somebody looks; the last word stays, with its age."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Literal

import grpc.aio

from chipmesh.scheduler.v1alpha1 import admin_pb2
from gateway.web_page.admin import AdminStub
from gateway.web_page.feed import Feed
from gateway.web_page.mesh_json import describe_mesh
from meshkit.errors import from_rpc_error

RETRY_S = 0.5
"""Between two tries; one is cheap, and a person waits for it."""

Status = Literal["connecting", "live", "away"]


class MeshWatch:
    """One WatchMesh stream for all viewers, and none while there is no viewer.

    admin: None where the configuration gives the gateway no right to ask; `problem` says so then.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        admin: AdminStub | None,
        *,
        problem: str = "",
        retry_s: float = RETRY_S,
        feed: Feed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.feed = feed or Feed()
        self._admin = admin
        self._retry_s = retry_s
        self._clock = clock
        self._status: Status = "connecting" if admin is not None else "away"
        self._problem = problem
        self._mesh: dict[str, Any] | None = None
        self._seen_at = 0.0
        self._viewers = 0
        self._viewed, self._unviewed = asyncio.Event(), asyncio.Event()

    def __repr__(self) -> str:
        return f"<MeshWatch {self._status} viewers={self._viewers}>"

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Somebody looks for as long as this is entered."""
        self._viewers += 1
        self._viewed.set()
        self._unviewed.clear()
        try:
            yield
        finally:
            self._viewers -= 1
            if self._viewers == 0:
                self._viewed.clear()
                self._unviewed.set()

    def state(self) -> dict[str, Any]:
        """{"status", "problem", "age_s", "mesh"}. age_s: since the scheduler was last heard, None before."""
        live = self._status == "live"
        age_s = None if self._mesh is None else 0.0 if live else self._clock() - self._seen_at
        return {"status": self._status, "problem": self._problem, "age_s": age_s, "mesh": self._mesh}

    async def run(self) -> None:
        """Follow the scheduler whenever there are viewers; returns never."""
        while True:
            await self._viewed.wait()
            if self._admin is None:
                await self._unviewed.wait()
                continue
            following = asyncio.ensure_future(self._follow(self._admin))
            unviewed = asyncio.ensure_future(self._unviewed.wait())
            try:
                await asyncio.wait({following, unviewed}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
            finally:
                for task in (following, unviewed):
                    task.cancel()
                await asyncio.gather(following, unviewed, return_exceptions=True)
                self._lost("connecting", "")

    async def _follow(self, admin: AdminStub) -> None:
        while True:
            try:
                async for message in _messages(admin):
                    self._took(message.mesh)
                self._lost("away", "the scheduler has ended the connection")
            except grpc.aio.AioRpcError as error:
                self._lost("away", from_rpc_error(error).message)
            await asyncio.sleep(self._retry_s)

    def _took(self, mesh: admin_pb2.Mesh) -> None:
        self._mesh = describe_mesh(mesh)
        self._status, self._problem, self._seen_at = "live", "", self._clock()
        self.feed.bump()

    def _lost(self, status: Status, problem: str) -> None:
        if self._status == "live":
            self._seen_at = self._clock()  # Until now the connection stood, so that was the mesh.
        if (status, problem) != (self._status, self._problem):
            self._status, self._problem = status, problem
            self.feed.bump()


async def _messages(admin: AdminStub) -> AsyncIterator[admin_pb2.WatchMeshResponse]:
    call = admin.WatchMesh(admin_pb2.WatchMeshRequest())
    try:
        async for message in call:
            yield message
    finally:
        call.cancel()
