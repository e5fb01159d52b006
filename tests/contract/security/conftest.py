"""The certificates of one mesh, made before any loop runs."""

from __future__ import annotations

import pytest

from tests.support.certificates import Pki


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("certificates"))
