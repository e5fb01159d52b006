"""Replicas of several ranks with a real model: the tokens of one, and what a rank's death or delay does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshkit.cli.mesh_status import describe_status, fetch_mesh
from tests.support.golden import Golden, load_golden
from tests.support.hash_model import write_hash_model
from tests.support.mesh import Generation, RunningMesh, assert_page_identity, running_mesh, token_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEP_TIMEOUT_S = 5.0
LONGEST_HANG_S = 10.0
STREAMS = 3
SET, ALONE = "worker-0", "worker-1"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Two groups of one model: a replica of two ranks, and one of one. SmolLM2 has 9 heads, an odd number,
    so its two ranks are two stages, whose bits are those of one.
    """
    with running_mesh(
        tmp_path_factory.mktemp("mesh"), "--model-path", "smollm2-135m", "--dtype", "float32",
        "--device-groups", "cpu:0+cpu:1;cpu:2", "--backend-option", "devices=3",
        "--max-total-tokens", "16384",
    ) as mesh:  # fmt: skip
        yield mesh


def replicas(mesh: RunningMesh) -> dict[str, dict[str, Any]]:
    """As `chipmesh status --json` has them, by worker, without a process for each look."""
    address = mesh.description["scheduler"]["address"]
    status = describe_status(asyncio.run(fetch_mesh(address)), endpoint=address)
    return {each["worker"]: each for group in status["groups"] for each in group["replicas"]}


def replica(mesh: RunningMesh, worker: str = SET) -> dict[str, Any]:
    return replicas(mesh)[worker]


def until(holds: Callable[[], Any], *, timeout_s: float, what: str) -> Any:
    """What `holds` returns once it is true; polls a state."""
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
    return found


def until_ready(mesh: RunningMesh, worker: str = SET) -> dict[str, Any]:
    until(lambda: replica(mesh, worker)["state"] == "ready", timeout_s=90, what=f"{worker} is ready")
    return replica(mesh, worker)


class Stream:
    """One greedy stream, and the longest time that it stood still once it had a token."""

    def __init__(self, golden: Golden, *, tokens: int = 48) -> None:
        self.tokens = tokens
        self.golden = replace(golden, token_ids=golden.token_ids[:tokens], gaps=golden.gaps[:tokens])
        self.count = 0
        self.longest_pause_s = 0.0
        self.worker = ""
        """That it ended on."""

    def run(self, mesh: RunningMesh) -> Stream:
        events = mesh.client.stream(token_request(self.golden.prompt_token_ids, max_tokens=self.tokens))
        generation = Generation(next(events).accepted)
        last = time.monotonic()
        for event in events:
            generation.add(event)
            now = time.monotonic()
            if self.count:
                self.longest_pause_s = max(self.longest_pause_s, now - last)
            last, self.count = now, len(generation.token_ids)
        self.golden.check(generation.token_ids, where="over a set of ranks")
        assert generation.finished is not None
        self.worker = generation.finished.placement.worker
        return self


@contextmanager
def running_streams(mesh: RunningMesh) -> Iterator[list[Future[Stream]]]:
    """Streams that all have a token, some of them on the set; they are followed to their ends."""
    streams = [Stream(golden) for golden in load_golden()[:STREAMS]]
    with ThreadPoolExecutor(STREAMS) as pool:
        futures = [pool.submit(stream.run, mesh) for stream in streams]
        until(lambda: all(stream.count for stream in streams), timeout_s=60, what="all streams have a token")
        yield futures
        for future in futures:
            future.result(timeout=120)


def strike(mesh: RunningMesh, rank: int, number: signal.Signals) -> int:
    """Signal a rank of the set while it has streams; its pid."""
    found = replica(mesh)
    assert found["running"], "the set runs no stream: the fault would show nothing"
    pid = int(found["ranks"][rank]["pid"])
    os.kill(pid, number)
    return pid


def named(mesh: RunningMesh, rank: int, *, timeout_s: float) -> str:
    """What the mesh says once it tells of the set's loss; it must name the rank."""
    message = until(lambda: replica(mesh)["message"], timeout_s=timeout_s, what="the loss is told")
    assert f"rank {rank}" in message, message
    return str(message)


def test_groups_of_different_layouts_serve_one_model_at_once(mesh: RunningMesh) -> None:
    found = replicas(mesh)
    assert (found[SET]["tensor_parallel_size"], found[SET]["pipeline_parallel_size"]) == (1, 2)
    assert (found[ALONE]["tensor_parallel_size"], found[ALONE]["pipeline_parallel_size"]) == (1, 1)
    assert [(each["rank"], each["device"]) for each in found[SET]["ranks"]] == [(0, 0), (1, 1)]
    assert len({each["pid"] for each in found[SET]["ranks"]}) == 2
    assert [(each["rank"], each["device"]) for each in found[ALONE]["ranks"]] == [(0, 2)]
    assert "is a set of 2 ranks (tensor parallel 1, pipeline parallel 2)" in mesh.cli("status").stdout
    streams = [Stream(load_golden()[0], tokens=16).run(mesh) for _ in range(2)]
    assert {stream.worker for stream in streams} == {SET, ALONE}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_the_death_of_a_rank_is_told_by_name_and_its_streams_go_on(mesh: RunningMesh, rank: int) -> None:
    before = until_ready(mesh)
    with running_streams(mesh) as streams:
        strike(mesh, rank, signal.SIGKILL)
        assert "signal 9" in named(mesh, rank, timeout_s=LONGEST_HANG_S)
    assert max(stream.result().longest_pause_s for stream in streams) < LONGEST_HANG_S
    after = until_ready(mesh)
    assert not {each["pid"] for each in after["ranks"]} & {each["pid"] for each in before["ranks"]}
    assert_page_identity(mesh.wait_until_idle(timeout_s=30))


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_late_is_named_in_time(mesh: RunningMesh, rank: int) -> None:
    until_ready(mesh)
    with running_streams(mesh) as streams:
        pid = strike(mesh, rank, signal.SIGSTOP)
        named(mesh, rank, timeout_s=STEP_TIMEOUT_S + 5)
    assert max(stream.result().longest_pause_s for stream in streams) < LONGEST_HANG_S
    until_ready(mesh)
    assert not Path(f"/proc/{pid}").exists(), "the frozen rank was left behind"


@pytest.mark.nightly
def test_a_set_is_swapped_for_one_chip_and_back_under_streams(mesh: RunningMesh) -> None:
    until_ready(mesh)
    for devices, ranks in ((("--device", "1"), 1), (("--device", "0", "--device", "1"), 2)):
        with running_streams(mesh):
            mesh.cli_json("swap", SET, "--to", "cpu", "--option", "devices=3", *devices)
        assert len(until_ready(mesh)["ranks"]) == ranks
    assert_page_identity(mesh.wait_until_idle(timeout_s=30))


# ---------------------------------------------------------------- tensor parallel


@pytest.mark.nightly
def test_two_tensor_ranks_give_the_tokens_of_one_and_a_groups_file_says_which_layout(tmp_path: Path) -> None:
    """A random model of 4 heads: what divides by two is split by rows and columns."""
    (tmp_path / "model").mkdir()
    model = write_hash_model(tmp_path / "model")
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps({"groups": [
        {"name": "rows", "devices": "cpu:0+cpu:1", "tensor_parallel_size": 2},
        {"name": "stages", "devices": "cpu:2+cpu:3", "pipeline_parallel_size": 2},
        {"name": "alone", "devices": "cpu:4"},
    ]}), encoding="utf-8")  # fmt: skip
    with running_mesh(
        tmp_path / "mesh", "--model-path", str(model), "--load-format", "dummy", "--dtype", "float32",
        "--groups-file", str(groups), "--backend-option", "devices=5", "--max-total-tokens", "4096",
    ) as mesh:  # fmt: skip
        found = replicas(mesh)
        sizes = {
            worker: (each["tensor_parallel_size"], each["pipeline_parallel_size"])
            for worker, each in found.items()
        }
        assert sizes == {"worker-0": (2, 1), "worker-1": (1, 2), "worker-2": (1, 1)}
        classes = {worker: each["numeric_class"] for worker, each in found.items()}
        assert classes["worker-0"] == f"{classes['worker-2']}+tp2"
        assert classes["worker-1"] == classes["worker-2"]
        for prompt in ([5, 6, 7], list(range(40))):
            tokens = _by_worker(mesh, prompt)
            assert set(tokens) == set(sizes)
            assert len({tuple(each) for each in tokens.values()}) == 1, tokens


def _by_worker(mesh: RunningMesh, prompt: Sequence[int]) -> dict[str, list[int]]:
    """The tokens that each group gives; they take turns."""
    answers = [mesh.client.generate(token_request(prompt, max_tokens=24)) for _ in range(9)]
    return {answer.finished.placement.worker: answer.token_ids for answer in answers if answer.finished}
