"""docs/configuration.md says what the configuration models are, and every field says what it means."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.scripts import loaded_script


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    with loaded_script("config_reference") as module:
        yield module


def test_the_page_is_what_the_models_are(reference: ModuleType) -> None:
    assert reference.REFERENCE.read_text(encoding="utf-8") == reference.render(), (
        "run `python scripts/config_reference.py`"
    )


def test_every_field_says_what_it_means(reference: ModuleType) -> None:
    assert reference.undocumented() == []
