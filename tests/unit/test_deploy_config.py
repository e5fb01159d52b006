"""The configuration files that we ship are ones that the services take."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from meshkit.config import ServiceConfig, describe, load_config
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "config"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gateway", GatewayConfig),
        ("scheduler", SchedulerConfig),
        ("worker", WorkerConfig),
        ("sets/two-chips", WorkerConfig),
        ("sets/host-0", WorkerConfig),
        ("sets/host-1", WorkerConfig),
    ],
)
def test_a_shipped_configuration_is_valid(name: str, model: type[ServiceConfig]) -> None:
    assert load_config(model, FOLDER / f"{name}.json").listen.startswith("127.0.0.1:")


def test_a_workers_takeover_token_is_masked_where_its_configuration_is_printed() -> None:
    given = {"worker_id": "w", "model": "m", "scheduler_address": "127.0.0.1:1", "model_path": "m"}
    config = WorkerConfig.model_validate({**given, "takeover_token": "hunter2"})
    assert "hunter2" not in describe(config)
