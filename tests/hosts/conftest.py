"""One mesh over several hosts for all tests of this folder, in the network of scripts/test_hosts.sh."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from chaos.hosts import Network
from chaos.mesh import ChaosMesh, Shape

SHAPE = Shape(hosts=True, gateways=2, workers=2)


@pytest.fixture(scope="session", autouse=True)
def network_of_our_own() -> None:
    """Hosts are network namespaces; nothing of them may be seen in a network that others use."""
    if not os.environ.get("CHIPMESH_HOSTS_TEST"):
        pytest.skip("hosts need a network of their own: `bash scripts/test_hosts.sh` (as root) makes one")


@pytest.fixture(scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosMesh]:
    """Scheduler, two gateways and two workers, each on its host; every service must end well."""
    mesh = ChaosMesh(SHAPE, root=tmp_path_factory.mktemp("hosts"))
    try:
        await mesh.start()
        yield mesh
    finally:
        problems = await mesh.stop()
    assert problems == []


@pytest.fixture
async def two_hosts() -> AsyncIterator[Network]:
    """left and right, with nothing on them."""
    network = Network(1)
    await network.open(["left", "right"])
    yield network
    await network.close()
