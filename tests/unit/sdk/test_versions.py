"""Versions parse as vendors write them, and ranges compare by release."""

from __future__ import annotations

import pytest

from plugins.sdk.versions import Version, parse_version, version_in_range


@pytest.mark.parametrize(
    ("text", "release", "suffix"),
    [
        ("1.2.0.dev3+gabc", (1, 2), ".dev3+gabc"),
        ("v2.5.1+cpu", (2, 5, 1), "+cpu"),
        ("5.0.21.26", (5, 0, 21, 26), ""),
        ("3.6.2.1_post1", (3, 6, 2, 1), "_post1"),
        ("1.0rc1", (1,), "rc1"),
        ("0", (), ""),
    ],
)
def test_versions_as_vendors_write_them_parse(text: str, release: tuple[int, ...], suffix: str) -> None:
    assert parse_version(text) == Version(release, suffix)


@pytest.mark.parametrize("text", ["", "latest", "dev3", "1..2", "1.2 beta"])
def test_text_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no version"):
        parse_version(text)


@pytest.mark.parametrize(
    ("version", "allowed", "inside"),
    [
        ("2.13.0+cpu", ">=2.5,<3", True),
        ("2.4.1", ">=2.5,<3", False),
        ("3.0", ">=2.5,<3", False),
        ("1.2.0.dev3+gabc", ">=1.2", True),
        ("1.10", ">1.9", True),
        ("1.0.0", "==1.0", True),
        ("1.0", "<=0.9", False),
        ("anything 1", "", True),
    ],
)
def test_ranges(version: str, allowed: str, inside: bool) -> None:
    assert version_in_range(version if allowed else "1", allowed) is inside


def test_a_malformed_range_is_refused() -> None:
    with pytest.raises(ValueError, match="no version clause"):
        version_in_range("1.0", "~1.0")
