"""Weights among groups of a real mesh: kept before, during and after a change; no cache is shared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from chipmesh.inference.v1alpha1 import inference_pb2
from plugins.hash.oracle import continue_tokens
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import RunningMesh, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

REQUESTS = 1000
BOUND = 38
"""Three standard deviations of 1,000 draws at 80/20, 3 * sqrt(1000 * 0.8 * 0.2); turns are far closer."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    folder = tmp_path_factory.mktemp("traffic")
    groups = folder / "groups.json"
    groups.write_text(json.dumps({"groups": [
        {"name": "large", "devices": "hash:0", "weight": 80},
        {"name": "small", "devices": "hash:1", "weight": 20},
    ]}))  # fmt: skip
    model = write_hash_model(folder)
    with running_mesh(
        folder, "--model-path", str(model), "--load-format", "dummy", "--groups-file", str(groups)
    ) as mesh:
        yield mesh


def ask(mesh: RunningMesh, prompt: list[int]) -> inference_pb2.Finished:
    """One request; its answer is checked."""
    answer = mesh.client.generate(token_request(prompt, max_tokens=3))
    assert answer.token_ids == continue_tokens(prompt, 3, VOCAB_SIZE)
    assert answer.finished is not None
    return answer.finished


def groups_of(mesh: RunningMesh, count: int) -> Counter[str]:
    """Where `count` requests went."""
    with ThreadPoolExecutor(16) as pool:
        ends = pool.map(lambda index: ask(mesh, [index % VOCAB_SIZE, index // VOCAB_SIZE, 5]), range(count))
        return Counter(end.placement.group for end in ends)


def test_a_thousand_requests_follow_the_weights_before_during_and_after_a_change(mesh: RunningMesh) -> None:
    before = groups_of(mesh, REQUESTS)
    assert abs(before["large"] - 800) <= BOUND
    assert sum(before.values()) == REQUESTS
    with ThreadPoolExecutor(1) as other:
        during = other.submit(groups_of, mesh, REQUESTS)
        mesh.cli_json("traffic", "set", "large=50", "small=50")
        counted = during.result()
    assert 500 - BOUND <= counted["large"] <= 800 + BOUND
    assert sum(counted.values()) == REQUESTS
    after = groups_of(mesh, REQUESTS)
    assert abs(after["large"] - 500) <= BOUND
    shares = {
        line["group"]: line["share"]
        for line in next(iter(mesh.cli_json("traffic", "show")["models"].values()))
    }
    assert shares == {"large": 0.5, "small": 0.5}


def test_a_group_shares_no_cache_with_another(mesh: RunningMesh) -> None:
    prompt = [(3 * position) % VOCAB_SIZE for position in range(200)]
    mesh.cli_json("traffic", "set", "large=1")
    assert [ask(mesh, prompt).usage.cached_tokens for _ in range(2)] == [0, 192]
    mesh.cli_json("traffic", "set", "small=1")
    assert ask(mesh, prompt).usage.cached_tokens == 0


def test_weights_that_cannot_be_are_refused_and_change_nothing(mesh: RunningMesh) -> None:
    mesh.cli_json("traffic", "set", "large=3", "small=1")
    for words, said in ((("large=0", "small=0"), "all weights"), (("none=1",), "none")):
        done = mesh.cli("traffic", "set", *words)
        assert done.returncode != 0
        assert said in done.stderr
    weights = {group["name"]: group["weight"] for group in mesh.status()["groups"]}
    assert weights == {"large": 3.0, "small": 1.0}
