"""The meshes that the tests of one file share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.chaos_meshes import Meshes


@pytest.fixture(scope="module")
async def meshes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Meshes]:
    """Every service must end well, too."""
    meshes = Meshes(tmp_path_factory.mktemp("meshes"))
    yield meshes
    await meshes.stop()
