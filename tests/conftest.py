"""What every test runs under: a blocked event loop fails it, and hypothesis uses the profile of the run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import HealthCheck, settings

OUR_PACKAGES = ("meshkit", "gateway", "scheduler_svc", "worker_svc", "plugins")

# A shared CI machine may stall for seconds: no deadline per example. Derandomized: a red run can be repeated.
settings.register_profile(
    "ci", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "nightly",
    max_examples=5000,
    stateful_step_count=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Where our code may block while an event loop runs: (ending of the file's path, functions).
ALLOWED_TO_BLOCK: tuple[tuple[str, frozenset[str]], ...] = (
    # Printing a traceback reads source lines; it happens after the test has already failed.
    ("linecache.py", frozenset({"updatecache", "checkcache", "getlines"})),
    # A module imported for the first time inside a coroutine reads its file; imports happen once per process.
    ("<frozen importlib._bootstrap>", frozenset({"_find_and_load"})),
    # OpenTelemetry looks at the machine in a thread pool, once, before a service serves.
    ("meshkit/telemetry/tracing.py", frozenset({"configure_tracing"})),
    # Three small local files, looked at when a call begins and read when they were replaced.
    ("meshkit/rpc/tls.py", frozenset({"read", "read_if_changed"})),
    # Services say that they are ready by writing one small file, once, before they serve.
    ("meshkit/service.py", frozenset({"write_ready"})),
)


def _existing_packages() -> list[str]:
    return [name for name in OUR_PACKAGES if importlib.util.find_spec(name) is not None]


@pytest.fixture(autouse=True, scope="session")
def _grpc_aio_stays_up() -> None:
    """Holds grpc.aio's core for the session: its last user's end joins a thread inside a running loop."""
    grpc.aio.init_grpc_aio()


@pytest.fixture(autouse=True)
def _blocked_loop_fails_the_test(request: pytest.FixtureRequest) -> Iterator[BlockBuster | None]:
    """Raises BlockingError where our code blocks a running loop; tests that drive processes do without."""
    if {"e2e", "faults", "hosts"} & set(Path(str(request.node.path)).parts):
        yield None
        return
    with blockbuster_ctx(_existing_packages()) as blockbuster:
        for function in blockbuster.functions.values():
            for file_ending, functions in ALLOWED_TO_BLOCK:
                function.can_block_in(file_ending, functions)
        yield blockbuster
