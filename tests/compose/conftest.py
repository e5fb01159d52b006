"""One mesh for all tests of this folder, on the engine that scripts/test_compose.sh has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compose.engine import GATEWAY_ADDRESS, ComposeMesh, docker
from tests.compose.streams import Streams
from tests.support.golden import load_golden


@pytest.fixture(scope="session")
def mesh() -> Iterator[ComposeMesh]:
    """Up, with the model's volume filled beforehand, as on a host without a network; down at the end."""
    folder, prefill = os.environ.get("CHIPMESH_COMPOSE_TEST"), os.environ.get("CHIPMESH_COMPOSE_PREFILL")
    if not folder or not prefill:
        pytest.skip("no container engine was started: `bash scripts/test_compose.sh` (as root) starts one")
    mesh = ComposeMesh(Path(folder))
    try:
        # As deploy/README.md says it.
        mesh.compose("run", "--rm", "--no-deps", "-v", f"{prefill}:/prefill:ro", "--entrypoint", "cp",
                     "model", "-r", "/prefill/models", "/var/lib/chipmesh/")  # fmt: skip
        mesh.compose("up", "-d")
        mesh.wait_until_healthy()
        yield mesh
    finally:
        if log := os.environ.get("CHIPMESH_COMPOSE_LOG"):
            Path(log).write_text(mesh.compose("logs", "--no-color", "--tail=60"), encoding="utf-8")
        mesh.compose("down", "-v")
    assert docker("ps", "-aq") == ""
    assert "chipmesh" not in docker("network", "ls", "--format", "{{.Name}}")
    assert "chipmesh" not in docker("volume", "ls", "--format", "{{.Name}}")


@pytest.fixture
def streaming(mesh: ComposeMesh) -> Callable[[], Streams]:
    """Makes clients outside of the containers, at the published port."""
    del mesh  # It must be up.
    return lambda: Streams(GATEWAY_ADDRESS, load_golden())
