"""The scheduler's configuration refuses what cannot work, by name."""

from __future__ import annotations

from typing import Any

import pytest

from meshkit.config import parse_config
from meshkit.errors import InvalidArgument
from scheduler_svc.config import SchedulerConfig


def parse(raw: dict[str, Any]) -> SchedulerConfig:
    return parse_config(SchedulerConfig, raw, source="test")


def test_defaults_are_a_working_configuration() -> None:
    config = parse({})
    assert config.depth == 2
    assert config.group("default") is None


def test_without_overlap_one_step_is_in_flight() -> None:
    assert parse({"enable_overlap": False}).depth == 1


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ({"groups": [{"name": "a", "model": "m"}, {"name": "a", "model": "n"}]}, "given twice: a"),
        ({"groups": [{"name": "a", "model": "m", "weight": -1}]}, "groups.0.weight"),
        ({"groups": [{"name": "", "model": "m"}]}, "groups.0.name"),
        ({"schedule_policy": "best"}, "schedule_policy"),
        ({"max_queued_requests": 0}, "max_queued_requests"),
        ({"lease_duration_s": 0.3}, "lease_duration_s is 0.3"),
        ({"heartbeat": 1}, "heartbeat_interval_s"),
    ],
)
def test_a_wrong_value_is_refused_by_name(raw: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidArgument, match=names):
        parse(raw)
