"""A chip is swapped under its worker id while streams run: none fails, no token is lost or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plugins.hash.oracle import continue_tokens
from tests.support.hash_model import VOCAB_SIZE, write_hash_model
from tests.support.mesh import RunningMesh, assert_page_identity, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

COUNT = 800
STREAMS = 12


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One worker: its streams have nowhere else to go. Steps take 10 ms, so that streams last for seconds."""
    folder = tmp_path_factory.mktemp("swap")
    with running_mesh(
        folder, "--backend", "hash", "--model-path", str(write_hash_model(folder)), "--load-format", "dummy",
        "--backend-option", "step_ms=10",
    ) as mesh:  # fmt: skip
        yield mesh


def under_streams(mesh: RunningMesh, act: Callable[[], None]) -> None:
    """Do something once every stream has tokens; all streams must end right."""

    def one(index: int) -> int:
        prompt = [index, 7, 3 * index % VOCAB_SIZE]
        answer = mesh.client.generate(token_request(prompt, max_tokens=COUNT))
        assert answer.token_ids == continue_tokens(prompt, COUNT, VOCAB_SIZE)
        return answer.messages

    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(one, index) for index in range(STREAMS)]
        wait_until_running(mesh)
        act()
        assert any(not stream.done() for stream in streams), "the streams were over before it happened"
        assert min(stream.result() for stream in streams) > 1


def wait_until_running(mesh: RunningMesh) -> None:
    while mesh.replicas()[0]["running"] < STREAMS:
        pass


def test_a_swap_under_streams_loses_nothing_and_keeps_worker_and_scheduler(mesh: RunningMesh) -> None:
    before, scheduler = mesh.replicas()[0], mesh.status()["scheduler"]["pid"]

    def swap_twice() -> None:
        for device in ("1", "0"):
            words = ("swap", "worker-0", "--to", "hash", "--device", device, "--option", "step_ms=10")
            stages = mesh.cli_json(*words)["stages"]
            assert (stages[0], stages[-1]) == ("order", "done")

    under_streams(mesh, swap_twice)
    after = mesh.replicas()[0]
    assert (after["worker"], mesh.status()["scheduler"]["pid"]) == (before["worker"], scheduler)
    assert after["instance_id"] != before["instance_id"]
    assert_page_identity(mesh.wait_until_idle())


def test_a_swap_that_fails_says_why_and_the_old_chip_serves_on(mesh: RunningMesh) -> None:
    before = mesh.replicas()[0]

    def try_it() -> None:
        done = mesh.cli("swap", "worker-0", "--to", "hash", "--option", "nonsense=1")
        assert done.returncode == 1
        assert "nonsense" in done.stderr

    under_streams(mesh, try_it)
    assert mesh.replicas()[0]["instance_id"] == before["instance_id"]


@pytest.mark.nightly
def test_where_both_do_not_fit_the_old_chip_goes_first_and_the_streams_wait(tmp_path: Path) -> None:
    options = (f"memory_file={tmp_path / 'memory'}", "step_ms=10")
    with running_mesh(
        tmp_path, "--backend", "hash", "--model-path", str(write_hash_model(tmp_path)), "--load-format",
        "dummy", *(word for option in options for word in ("--backend-option", option)),
    ) as mesh:  # fmt: skip
        swap = ("swap", "worker-0", "--to", "hash", *(w for option in options for w in ("--option", option)))
        first = mesh.replicas()[0]["instance_id"]
        refused = mesh.cli(*swap, "--never-pause")
        assert refused.returncode == 1
        assert "taken by another process; the former chip serves on" in refused.stderr
        assert mesh.replicas()[0]["instance_id"] == first

        def swap_and_fail() -> None:
            assert mesh.cli_json(*swap)["stages"].count("room") == 1
            second = mesh.replicas()[0]["instance_id"]
            assert second != first
            # This one has the chip to itself in the end, and is wrong then.
            failed = mesh.cli(*swap, "--option", "eos=999")
            assert failed.returncode == 1
            assert "the former chip is loaded again" in failed.stderr

        under_streams(mesh, swap_and_fail)
        assert_page_identity(mesh.wait_until_idle())


def test_an_unknown_worker_or_backend_is_refused_with_what_there_is(mesh: RunningMesh) -> None:
    unknown = mesh.cli("swap", "worker-9", "--to", "hash")
    assert unknown.returncode == 1
    assert "worker-0" in unknown.stderr
    absent = mesh.cli("swap", "worker-0", "--to", "tpu")
    assert absent.returncode == 1
    assert "installed" in absent.stderr


@pytest.mark.nightly
def test_another_chip_answers_after_the_swap(tmp_path: Path) -> None:
    model = write_hash_model(tmp_path)
    with running_mesh(
        tmp_path, "--backend", "hash", "--model-path", str(model), "--load-format", "dummy"
    ) as mesh:
        old = mesh.replicas()[0]
        mesh.cli_json("swap", "worker-0", "--to", "hash", "--device", "3")
        new = mesh.replicas()[0]
        assert (new["state"], new["executor_pid"] != old["executor_pid"]) == ("ready", True)
