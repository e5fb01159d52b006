"""A mesh of real processes with two groups, and a browser; both for all tests here."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.browsing import INSTALL, chromium, chromium_path, visit
from tests.support.mesh import RunningMesh, running_mesh
from tests.unit.gateway.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip(f"playwright is not installed: {INSTALL}")
    if chromium_path() is None:
        pytest.skip(f"chromium is not installed: {INSTALL}")
    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[RunningMesh]:
    """The hash model, which needs no weights, in two groups; steps of 20 ms, so that a stream can be seen."""
    del browser  # Without one nothing is started.
    folder = tmp_path_factory.mktemp("page")
    model = write_tiny_model(folder / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    with running_mesh(
        folder, "--model-path", str(model), "--load-format", "dummy", "--device-groups", "hash:0;hash:1",
        "--backend-option", "step_ms=20",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def url(mesh: RunningMesh) -> str:
    """As `chipmesh up` says it."""
    return str(mesh.description["page"])


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The page on a wide screen, with the mesh on it."""
    with visit(browser, url) as open_page:
        open_page.wait_for_selector(".worker[data-state=ready] >> nth=1")
        yield open_page
