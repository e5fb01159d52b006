"""Models of all families, made once for the session. Everything is made here; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.parity.oracle import Oracle


@dataclass(frozen=True)
class Family:
    """A variant: its name, its folder as `transformers` saved it, and who knows better."""

    name: str
    folder: Path
    oracle: Oracle


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products of such sizes are slower on two threads, and other test processes run beside this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """A variant by its name; made when first asked for."""
    # Not at the top: where transformers is missing, the tests are skipped and this file is still read.
    from tests.parity.oracle import Oracle
    from tests.parity.tiny_models import VARIANTS, make_model, save_model

    made: dict[str, Family] = {}
    root = tmp_path_factory.mktemp("families")

    def find(name: str) -> Family:
        if name not in made:
            model = make_model(VARIANTS[name])
            made[name] = Family(name, save_model(model, root / name), Oracle(model))
        return made[name]

    return find


@pytest.fixture
def family(request: pytest.FixtureRequest, family_of: Callable[[str], Family]) -> Family:
    """Of a test that is parametrised by the variants' names."""
    return family_of(request.param)
