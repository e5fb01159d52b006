"""Back ends of a test live as long as the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from plugins.conformance.kit import run_conformance
from plugins.conformance.report import Report
from plugins.sdk import registry
from plugins.sdk.backend import Backend

# Small tensors: a second thread costs more than it saves, and much more beside other processes.
torch.set_num_threads(1)

Check = Callable[..., Report]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Runs the kit, without heavy shape classes, against the back end that a factory makes."""
    monkeypatch.setattr(registry, "_registered", {})

    def run(make: Callable[[], Backend], only: str = "") -> Report:
        registry.register_backend("planted", lambda options: make())
        return run_conformance("planted", only=only, quick=True)

    return run
