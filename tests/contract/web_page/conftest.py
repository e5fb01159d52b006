"""The mesh that most tests here look at."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.web_page.page_mesh import PageMesh, page_mesh
from tests.support.certificates import Pki


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[PageMesh]:
    """On loopback, without keys."""
    async with page_mesh(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Certificates of one mesh."""
    return Pki(tmp_path_factory.mktemp("certificates"))
