"""Constrained streams under memory pressure and a scheduler that is killed: the same bytes as undisturbed.

Nightly: each push has one replay of this kind, after an executor's death, in test_constraints.py.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.test_constraints import STORY, ask, schema
from tests.support.mesh import MeshClient
from tests.support.services import Services

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(180)]

MODEL = "smollm2-135m"
STREAMS = 6
POOL_TOKENS = 320
"""Of less than half of what the streams come to."""


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    yield services
    services.stop_all()


def start(services: Services) -> tuple[dict[str, Any], dict[str, Any]]:
    scheduler = services.start("scheduler", "scheduler", schedule_conservativeness=0.01)
    address = scheduler["address"]
    models = [{"name": MODEL, "path": MODEL}]
    gateway = services.start("gateway", "gateway", scheduler_address=address, models=models)
    services.start(
        "worker", "worker", scheduler_address=address, worker_id="w0", model=MODEL, model_path=MODEL,
        backend="cpu", dtype="float32", max_total_tokens=POOL_TOKENS, page_size=16,
    )  # fmt: skip
    return scheduler, gateway


def retractions(http_address: str) -> float:
    with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("chipmesh_num_retracted_reqs{"))


def test_retraction_and_a_scheduler_that_is_killed_change_no_byte(services: Services) -> None:
    scheduler, gateway = start(services)
    client = MeshClient(gateway["address"])
    requests = [
        ask(f"Story {index}.", seed=index, temperature=float(index % 2), max_tokens=200, **schema(STORY))
        for index in range(STREAMS)
    ]
    undisturbed = [client.generate(request) for request in requests]
    with ThreadPoolExecutor(STREAMS) as pool:
        crowded = list(pool.map(client.generate, requests))
    assert retractions(scheduler["http_address"]) > 0
    killed: list[int] = []

    def one(index: int) -> list[int]:
        tokens: list[int] = []
        for event in client.stream(requests[index]):
            tokens += event.output.token_ids
            if index == 0 and not killed and len(tokens) > 10:
                killed.append(len(tokens))
                services.kill("scheduler")
                services.start("scheduler", "scheduler", listen=scheduler["address"])
        return tokens

    try:
        with ThreadPoolExecutor(STREAMS) as pool:
            disturbed = list(pool.map(one, range(STREAMS)))
    finally:
        client.close()
    assert killed
    wanted = [answer.token_ids for answer in undisturbed]
    assert [answer.token_ids for answer in crowded] == wanted
    assert disturbed == wanted
    for answer in undisturbed:
        jsonschema.validate(json.loads(answer.text), STORY)
