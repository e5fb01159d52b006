"""The tiny model, opened as the gateway opens it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import ServedModelConfig
from gateway.models import ServedModel, open_served_model
from tests.unit.gateway.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> ServedModel:
    config = ServedModelConfig(name="tiny", path=str(tiny_folder))
    return open_served_model(config, cache_dir=tiny_folder.parent)
