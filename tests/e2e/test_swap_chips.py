"""Chips under one worker id: cpu to an emulated one and back, twice, under greedy streams of a real model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.golden import Golden, load_golden
from tests.support.mesh import Generation, RunningMesh, assert_page_identity, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]

STREAMS = 8


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    with running_mesh(
        tmp_path_factory.mktemp("mesh"), "--model-path", "smollm2-135m", "--dtype", "float32"
    ) as mesh:
        yield mesh


def generate(mesh: RunningMesh, golden: Golden) -> Generation:
    return mesh.client.generate(token_request(golden.prompt_token_ids, max_tokens=48))


def test_greedy_streams_go_through_four_swaps_and_equal_the_reference(mesh: RunningMesh) -> None:
    scheduler = mesh.status()["scheduler"]["pid"]
    prompts = load_golden()[:STREAMS]
    chips: list[str] = []

    def stream_again_and_again(golden: Golden) -> int:
        """One client: streams one after the other until the last swap is over; how many."""
        count = 0
        while len(chips) < 4:
            golden.check(generate(mesh, golden).token_ids, where="while chips are swapped")
            count += 1
        return count

    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream_again_and_again, golden) for golden in prompts]
        for words in (("kunlun", "--emulate"), ("cpu",), ("kunlun", "--emulate"), ("cpu",)):
            mesh.cli_json("swap", "worker-0", "--to", *words)
            chips.append(mesh.replicas()[0]["chip"])
        assert all(stream.result() for stream in streams)
    assert chips == ["kunlun", "cpu", "kunlun", "cpu"]
    assert mesh.status()["scheduler"]["pid"] == scheduler
    assert_page_identity(mesh.wait_until_idle(timeout_s=30))
