"""The guard of tests/conftest.py is itself under test: one that never fires would hide every blocked loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockingError

import meshkit


def _nap_inside_meshkit() -> Callable[[], Any]:
    """A function that sleeps and claims to lie in meshkit: the guard tells our code by its file."""
    names: dict[str, Any] = {}
    source = "import time\ndef nap():\n    time.sleep(0.001)\n"
    exec(compile(source, str(Path(meshkit.__path__[0]) / "planted.py"), "exec"), names)
    nap: Callable[[], Any] = names["nap"]
    return nap


async def test_our_code_that_sleeps_on_the_event_loop_fails_the_test() -> None:
    with pytest.raises(BlockingError):
        _nap_inside_meshkit()()


async def test_our_code_may_sleep_on_a_thread() -> None:
    await asyncio.to_thread(_nap_inside_meshkit())
