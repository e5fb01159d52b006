"""Both ends of the device contract speak of the same version."""

from __future__ import annotations

from plugins.sdk import versions
from scheduler_svc.servicers import registry


def test_scheduler_and_plugins_name_the_same_contract_version() -> None:
    assert registry.CONTRACT_VERSION == versions.CONTRACT_VERSION
