"""Meshes whose client is a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.gateway_sglang.router_client import MeshFactory, RouterMesh, router_mesh


@pytest.fixture
def run_mesh(tiny_model: Path, tmp_path: Path) -> MeshFactory:
    """`async with run_mesh(replicas=..., **config) as mesh:`"""

    def run(*, model: Path = tiny_model, **config: Any) -> AbstractAsyncContextManager[RouterMesh]:
        return router_mesh(model, tmp_path, **config)

    return run


@pytest.fixture(scope="module")
async def shared_mesh(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RouterMesh]:
    """Its ended requests are not kept, so tests may use one id."""
    async with router_mesh(tiny_model, tmp_path_factory.mktemp("mesh"), keep_finished_s=0) as running:
        yield running


@pytest.fixture
async def mesh(shared_mesh: RouterMesh) -> RouterMesh:
    """A mesh with defaults on which nothing runs; tests of one file share it."""
    await shared_mesh.settle()
    return shared_mesh
