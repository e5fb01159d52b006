"""Visibility of devices: fixed when the runtime loads, checked against what it sees."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from meshkit.errors import FailedPrecondition
from plugins.sdk.visibility import Visibility, count_device_files

NAMES = ("ACME_VISIBLE_DEVICES", "OTHER_VISIBLE_DEVICES")


def test_a_variable_that_changes_later_is_reported_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    environment = dict.fromkeys(NAMES, "0,1")
    visibility = Visibility(NAMES, "0,1", environment)
    with caplog.at_level(logging.WARNING):
        visibility.warn_if_changed()
        assert not caplog.records
        environment["OTHER_VISIBLE_DEVICES"] = "2"
        visibility.warn_if_changed()
        visibility.warn_if_changed()
    assert len(caplog.records) == 1
    assert "OTHER_VISIBLE_DEVICES" in caplog.text
    assert "ACME_VISIBLE_DEVICES" not in caplog.text


def test_a_variable_that_is_set_later_is_a_change_too(caplog: pytest.LogCaptureFixture) -> None:
    environment: dict[str, str] = {}
    visibility = Visibility(NAMES[:1], None, environment)
    visibility.warn_if_changed()
    assert not caplog.records
    environment["ACME_VISIBLE_DEVICES"] = "0"
    visibility.warn_if_changed()
    assert len(caplog.records) == 1


def test_other_devices_than_the_runtime_sees_are_refused() -> None:
    Visibility(NAMES, None, {}).require_seen(8, listed_by="acme-smi")
    named = Visibility(NAMES, "7,8", {})
    named.require_seen(2, listed_by="acme-smi")
    with pytest.raises(
        FailedPrecondition, match=r"name 2 devices \(7,8\), but the runtime sees 1; .* acme-smi"
    ):
        named.require_seen(1, listed_by="acme-smi")


def test_devices_are_counted_by_the_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert count_device_files("acme", None, root=tmp_path) == 0
    for name in ("acme0", "acme1", "acme10", "acmectl", "acme1p", "other0"):
        (tmp_path / "dev" / name).touch()
    assert count_device_files("acme", None, root=tmp_path) == 3
    assert count_device_files("acme", "1, 2", root=tmp_path) == 2
    assert count_device_files("acme", "2,3", root=tmp_path) == 1
    assert count_device_files("acme", "GPU-8932f937", root=tmp_path) is None
