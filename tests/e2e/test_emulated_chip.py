"""A mesh with a worker on an emulated chip: it says so, falls back as planned, gives the golden tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.golden import Golden, load_golden
from tests.support.mesh import RunningMesh, assert_page_identity, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One worker of the vendor's plugin, on the emulator of that vendor's runtime."""
    with running_mesh(
        tmp_path_factory.mktemp("mesh"), "--model-path", "smollm2-135m", "--backend", "kunlun", "--emulate",
        "--dtype", "float32",
    ) as mesh:  # fmt: skip
        yield mesh


def check(mesh: RunningMesh, golden: Golden) -> None:
    answer = mesh.client.generate(token_request(golden.prompt_token_ids, max_tokens=48))
    golden.check(answer.token_ids, where="emulated")


def test_an_emulated_worker_answers_as_the_reference_and_says_that_it_is_emulated(mesh: RunningMesh) -> None:
    check(mesh, load_golden()[0])
    (replica,) = mesh.replicas()
    assert (replica["chip"], replica["emulated"], replica["numeric_class"]) == ("kunlun", True, "float32")


def test_the_workers_metrics_count_fallbacks(mesh: RunningMesh) -> None:
    metrics = mesh.scrape_worker(0)
    calls = [line for line in metrics.splitlines() if line.startswith("chipmesh_operator_calls{")]
    assert any('operator="attention_decode"' in line and 'choice="native"' in line for line in calls)
    assert any('operator="sample"' in line and 'choice="reference"' in line for line in calls)


@pytest.mark.nightly
def test_all_golden_prompts_agree_in_batches(mesh: RunningMesh) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda golden: check(mesh, golden), load_golden()))
    assert_page_identity(mesh.wait_until_idle(timeout_s=30))
