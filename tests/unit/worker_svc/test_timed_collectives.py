"""Collectives with a clock beside: the same results, each told with its bytes, its algorithm and its wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from meshkit.errors import NotFound
from plugins.cpu.collectives import GlooCollectives
from plugins.sdk.timing import COMMUNICATION, OperatorTimes
from worker_svc.timed_collectives import TimedCollectives

T = TypeVar("T")
TIMEOUT_S = 60.0


def on_two_ranks(
    folder: Path, work: Callable[[TimedCollectives, int], T], *, sees_overlap: bool = True
) -> list[T]:
    """What `work` returned on each rank."""
    done = threading.Barrier(2)

    def run(rank: int) -> T:
        timed = TimedCollectives(GlooCollectives(border=1024), sees_overlap=sees_overlap)
        timed.collectives.init_group(
            "pair", rank=rank, world_size=2, rendezvous=f"file://{folder}/meet", timeout_s=TIMEOUT_S
        )
        try:
            return work(timed, rank)
        finally:
            done.wait(TIMEOUT_S)
            timed.collectives.destroy_group("pair")

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_every_collective_is_told_with_its_bytes_and_its_algorithm(tmp_path: Path) -> None:
    def work(timed: TimedCollectives, rank: int) -> OperatorTimes:
        it, mine = timed.collectives, torch.full((64,), float(rank + 1))
        assert torch.equal(it.all_reduce("pair", mine), torch.full((64,), 3.0))
        stop = timed.start(most_runs=100)
        it.all_reduce("pair", mine)
        it.all_reduce("pair", torch.zeros(4096))
        it.all_gather("pair", mine)
        it.reduce_scatter("pair", mine)
        it.broadcast("pair", mine, root=1)
        it.barrier("pair")
        times = stop()
        it.barrier("pair")
        return times

    for times in on_two_ranks(tmp_path, work):
        told = [
            (run.operator.name, run.operator.program.split(", ")[1:], run.size_bytes) for run in times.runs
        ]
        assert told == [
            ("all_reduce", ["gather"], 256),
            ("all_reduce", ["ring"], 16384),
            ("all_gather", [], 256),
            ("reduce_scatter", [], 256),
            ("broadcast", [], 256),
            ("barrier", [], 0),
        ]
        assert {run.operator.kind for run in times.runs} == {COMMUNICATION}
        assert all(run.held_s == run.seconds > 0 for run in times.runs)
        assert times.notes == []


def test_a_sum_that_was_begun_lasts_until_its_wait_and_holds_the_step_for_less(tmp_path: Path) -> None:
    computed = threading.Barrier(2)

    def work(timed: TimedCollectives, rank: int) -> OperatorTimes:
        stop = timed.start(most_runs=100)
        pending = timed.collectives.begin_all_reduce("pair", torch.ones(8), timeout_s=TIMEOUT_S)
        computed.wait(TIMEOUT_S)  # Computing, as far as the clock is concerned.
        assert torch.equal(pending.wait(), torch.full((8,), 2.0))
        pending.wait()
        return stop()

    for times in on_two_ranks(tmp_path, work):
        (run,) = times.runs
        assert 0 < run.held_s < run.seconds


def test_a_sum_that_ends_after_the_profile_is_left_out(tmp_path: Path) -> None:
    def work(timed: TimedCollectives, rank: int) -> tuple[OperatorTimes, OperatorTimes]:
        first = timed.start(most_runs=100)
        pending = timed.collectives.begin_all_reduce("pair", torch.ones(8))
        ended = first()
        second = timed.start(most_runs=100)
        pending.wait()
        return ended, second()

    for ended, later in on_two_ranks(tmp_path, work):
        assert (ended.runs, later.runs) == ([], [])


def test_where_operators_are_waited_for_the_profile_says_that_overlap_was_not_seen(tmp_path: Path) -> None:
    def work(timed: TimedCollectives, rank: int) -> OperatorTimes:
        stop = timed.start(most_runs=100)
        timed.collectives.barrier("pair")
        return stop()

    for times in on_two_ranks(tmp_path, work, sees_overlap=False):
        assert "was not seen" in times.notes[0]


def test_errors_and_facts_are_the_plugins() -> None:
    it = TimedCollectives(GlooCollectives(), sees_overlap=True).collectives
    assert it.library.startswith("gloo")
    assert it.algorithms() == ("ring", "gather")
    assert it.topology() == ()
    for call in (
        lambda: it.algorithm("pair", 8),
        lambda: it.all_reduce("pair", torch.ones(1)),
        lambda: it.begin_all_reduce("pair", torch.ones(1)),
    ):
        with pytest.raises(NotFound, match="InitGroup"):
            call()
