"""Every dependency's licence is one that we allow, and docs/licenses.md says what is installed."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import loaded_script


@pytest.fixture(scope="module")
def licenses() -> Iterator[ModuleType]:
    with loaded_script("licenses") as module:
        yield module


def test_every_dependencys_licence_is_allowed(licenses: ModuleType) -> None:
    packages = licenses.installed_packages()
    assert {"grpcio", "torch", "pytest", "uvloop"} <= {package.name for package in packages}
    assert [package for package in packages if not licenses.is_allowed(package.license)] == []


def test_the_list_in_the_docs_is_of_what_is_installed(licenses: ModuleType) -> None:
    """Versions apart: they differ from one Python to another."""
    told = {
        (cells[1], cells[3])
        for line in licenses.LIST.read_text().splitlines()
        if line.startswith("| ") and (cells := [cell.strip() for cell in line.split("|")])
    }
    missing = [each for each in licenses.installed_packages() if (each.name, each.license) not in told]
    assert missing == [], "run `bash scripts/sbom.sh`"


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("AGPL-3.0-only", False),
        ("GPL-3.0-or-later OR MIT", True),
        ("GPL-3.0-or-later AND MIT", False),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("MIT AND (GPL-2.0-only OR Proprietary)", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0-only OR MIT AND Proprietary", False),
        ("(MIT", False),
        ("MIT)", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_an_expression_is_allowed_where_allowed_licences_meet_it(
    licenses: ModuleType, expression: str, allowed: bool
) -> None:
    assert licenses.is_allowed(expression) is allowed


@pytest.mark.parametrize(
    ("fields", "license_"),
    [
        ({"License-Expression": "MIT", "License": "whatever"}, "MIT"),
        ({"Classifier": "License :: OSI Approved :: BSD License", "License": "BSD"}, "BSD-3-Clause"),
        ({"Classifier": "License :: Other/Proprietary License", "License": "Secret\nMore"}, "Secret"),
        ({"License": "Apache 2.0"}, "Apache-2.0"),
        ({}, "unknown"),
    ],
)
def test_a_licence_is_read_from_the_newest_field_that_says_one(
    licenses: ModuleType, fields: dict[str, str], license_: str
) -> None:
    about: Any = Message()
    for name, value in fields.items():
        about[name] = value
    assert licenses.license_of(about) == license_
