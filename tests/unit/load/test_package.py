"""What the package offers is there, whenever it is first asked for."""

from __future__ import annotations

import pytest

import meshkit.load


@pytest.mark.parametrize("name", meshkit.load.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(meshkit.load, name).__name__ == name


def test_no_other_name_is() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = meshkit.load.no_such_name
