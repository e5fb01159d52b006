"""The mesh on the hash model: a token depends on all before it, so any loss, repetition or mix-up shows."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plugins.hash.oracle import continue_tokens
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import RunningMesh, assert_page_identity, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hash_model(tmp_path_factory.mktemp("hash-model"))


@pytest.fixture
def mesh(tmp_path: Path, model: Path) -> Iterator[RunningMesh]:
    """Two workers whose pages together hold fewer tokens than the test makes: they must evict."""
    with running_mesh(
        tmp_path, "--backend", "hash", "--model-path", str(model), "--load-format", "dummy",
        "--device-groups", "hash:0,hash:1", "--max-total-tokens", "1024", "--page-size", "8",
        "--chunked-prefill-size", "32",
    ) as mesh:  # fmt: skip
        yield mesh


def prompt_of(index: int) -> list[int]:
    """Prompts that share a prefix, of different lengths."""
    return [(7 * position) % VOCAB_SIZE for position in range(40)] + [index % VOCAB_SIZE] * (1 + index % 9)


def check(mesh: RunningMesh, index: int, *, count: int) -> None:
    answer = mesh.client.generate(token_request(prompt_of(index), max_tokens=count))
    assert answer.token_ids == continue_tokens(prompt_of(index), count, VOCAB_SIZE)
    assert answer.finish_reason == "length"


def test_64_streams_under_memory_pressure_are_exact(mesh: RunningMesh) -> None:
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(lambda index: check(mesh, index, count=20 + index), range(64)))
    assert_page_identity(mesh.wait_until_idle())
    metrics = mesh.scrape("scheduler")
    evicted = [
        float(value) for value in re.findall(r"^chipmesh_evicted_tokens_total\{.*\} (\S+)$", metrics, re.M)
    ]
    assert sum(evicted) > 0, "memory was never short, so this test has shown nothing"


def test_streams_survive_the_death_of_their_executor_without_losing_a_token(mesh: RunningMesh) -> None:
    victim = mesh.description["workers"][0]
    reached = 0

    def one(index: int) -> None:
        nonlocal reached
        request = token_request(prompt_of(index), max_tokens=400)
        events = mesh.client.stream(request)
        assert next(events).WhichOneof("kind") == "accepted"
        seen: list[int] = []
        for event in events:
            if event.WhichOneof("kind") == "output":
                assert event.output.first_index == len(seen)
                seen.extend(event.output.token_ids)
                if index == 0 and reached == 0 and len(seen) > 20:
                    reached = len(seen)
                    os.kill(victim["executor_pid"], signal.SIGKILL)
        assert seen == continue_tokens(prompt_of(index), 400, VOCAB_SIZE)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(16)))
    assert 0 < reached < 400, "the executor was not killed in the middle"
    assert_page_identity(mesh.wait_until_idle())
